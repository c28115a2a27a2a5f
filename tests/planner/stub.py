"""An estimate of round numbers, so that tests can compare reports literally for any cost model constants."""

from __future__ import annotations

import numpy as np

from weft.config.plan import RECOMPUTES
from weft.planner.estimator import Estimates

GIB = 2.0**30


class Round(Estimates):
    """Estimates with a certain fit."""

    @property
    def fits_probability(self):
        return np.where(self.total_bytes <= self.usable_bytes, 0.99, 0.01)


def estimate(job, cluster, columns, tables) -> Round:
    """Return 10 s of products over tp and passes; 60 GiB of optimizer, 60 of activations per pass of 8 sequences."""
    share = np.where(columns.zero >= 1, columns.dp_shard, 1)
    kept = np.where(columns.recompute == RECOMPUTES.index("full"), 0.1, 1.0)
    again = np.where(columns.recompute == RECOMPUTES.index("full"), 3.0, 0.0)
    terms = {
        "gemm": np.full(len(columns), 10.0),
        "recompute": again,
        "tp": 0.5 * (columns.tp - 1.0),
        "host": 0.125 * columns.num_micro,
    }
    memory = {
        "parameters": np.full(len(columns), 10.0 * GIB) / columns.tp,
        "optimizer": 60.0 * GIB / (columns.tp * share) * (1 - columns.offload_optimizer),
        "activations": 7.5 * GIB * columns.microbatch * kept / columns.tp,
        **{name: np.zeros(len(columns)) for name in ("gradients", "logits", "buffers")},
        "communicators": np.zeros(len(columns)),
        "context": np.full(len(columns), GIB),
        "reserve": np.zeros(len(columns)),
    }
    return Round(
        terms=terms,
        memory=memory,
        usable_bytes=80 * GIB,
        tokens=float(job.global_batch * job.seq_len),
        memory_spread=0.05,
        host_bytes=np.zeros(len(columns)),
        host_limit=np.inf,
    )
