"""Settings that a table leaves out, and the columns of a run.

A setting that is not given is taken as its authors would have chosen it: of the candidates that fit into memory the
fastest, by the same model; where none fits, the one that needs least.
"""

from __future__ import annotations

import itertools

import numpy as np

from weft.planner.cost.machine import Tables
from weft.planner.estimator import Estimates, estimate
from weft.planner.scoring.runs import PublishedRun
from weft.planner.space import PRECISIONS, Columns
from weft.spec.plan import RECOMPUTES, SCHEDULES

_MICROBATCHES = (1, 2, 4, 8, 16)
_VIRTUAL = tuple(range(1, 13))


def candidates(run: PublishedRun) -> Columns:
    """The plans that the run may have had: one, where its row says everything."""
    per_rank = max(1, run.job.global_batch // run.dp)
    sizes = (1,) if run.job.shape.moe_layers else _MICROBATCHES  # each token's activations are there top_k times
    micros = (run.microbatch,) if run.microbatch else tuple(b for b in sizes if per_rank % b == 0) or (1,)
    stages = (
        (run.virtual_stages,)
        if run.virtual_stages
        else tuple(v for v in _VIRTUAL if run.job.shape.layers % (run.pp * v) == 0) or (1,)
    )
    policies = (run.recompute,) if run.recompute else ("none", "attention", "full")
    rows = [
        (b, v, r) for b, v, r in itertools.product(micros, stages, policies) if v == 1 or (per_rank // b) % run.pp == 0
    ]
    rows = rows or [(micros[0], 1, policies[0])]
    micro, virtual, policy = zip(*rows, strict=True)
    micro = np.minimum(np.array(micro), per_rank)
    names = ["full" if name == "half" else name for name in policy]
    return Columns.make(
        len(rows),
        pp=run.pp,
        dp_replicate=run.dp if run.zero == 0 else run.dp // run.shard,
        dp_shard=1 if run.zero == 0 else run.shard,
        cp=run.cp,
        tp=run.tp,
        ep=run.ep,
        zero=run.zero,
        sp=run.sp,
        schedule=[SCHEDULES.index("interleaved" if v > 1 else "1f1b") for v in virtual],
        virtual_stages=virtual,
        microbatch=micro,
        num_micro=np.maximum(1, per_rank // micro),
        recompute=[RECOMPUTES.index(name) for name in names],
        recompute_share=[0.5 if name == "half" else 1.0 for name in policy],
        precision=PRECISIONS.index(run.precision),
        compile=run.compile,
        reshard=0,
    )


def predict(run: PublishedRun, tables: Tables) -> tuple[Estimates, int]:
    """Estimates of a run's candidates, and the row that stands for it."""
    columns = candidates(run)
    estimates = estimate(run.job, run.cluster, columns, tables)
    if len(columns) == 1:
        return estimates, 0
    fits = estimates.fits_probability > 0.5
    order = np.where(fits, estimates.step_s, np.inf) if fits.any() else estimates.total_bytes
    return estimates, int(np.argmin(order))
