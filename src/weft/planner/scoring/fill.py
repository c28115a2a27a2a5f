"""Settings that a table leaves out, and the columns of a run.

A setting that is not given is taken as its authors would have chosen it: of the candidates that fit into memory the
fastest, by the same model; where none fits, the fastest of those that need little more than the least.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from weft.planner.cost.machine import Tables
from weft.planner.estimator import Estimates, estimate
from weft.planner.scoring.rows import PublishedRun
from weft.planner.space import PRECISIONS, Columns
from weft.spec.plan import RECOMPUTES, SCHEDULES

_MICROBATCHES = (1, 2, 4, 8, 16)
_VIRTUAL = tuple(range(1, 13))
#: Where no candidate fits, those count that need at most this much more than the least.
_NEAR_LEAST = 1.1
#: What embedding and head may count as, in layers, where stages are filled.
_ENDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Remade:
    """One way to recompute. share: of the layers. budget: share of what no recompute keeps, as the cheapest mix of
    kernels leaves it; inf: none."""

    name: str
    share: float = 1.0
    budget: float = math.inf


_STATED = {"half": Remade("full", 0.5), "experts": Remade("none", budget=0.4)} | {
    name: Remade(name) for name in ("none", "attention", "selective", "full")
}
#: From nothing to all, in steps: recipes name single kernels or a number of layers.
_NOT_STATED = (
    Remade("none"),
    *(Remade("none", budget=kept) for kept in (0.85, 0.7, 0.55, 0.4)),
    *(Remade("full", share) for share in (0.25, 0.5, 0.75, 1.0)),
)


def candidates(run: PublishedRun) -> Columns:
    """The plans that the run may have had: one, where its row says everything."""
    per_rank = max(1, run.job.global_batch // run.dp)
    layers = run.job.shape.layers
    sizes = (1,) if run.job.shape.moe_layers else _MICROBATCHES  # each token's activations are there top_k times
    micros = (run.microbatch,) if run.microbatch else tuple(b for b in sizes if per_rank % b == 0) or (1,)
    chunks = tuple(v for v in _VIRTUAL if any((layers + ends) % (run.pp * v) == 0 for ends in _ENDS))
    chunks = tuple(v for v in chunks if v > 1) or chunks if run.interleaved else chunks
    stages = (run.virtual_stages,) if run.virtual_stages else chunks or (1,)
    policies = (_STATED[run.recompute],) if run.recompute else (*_NOT_STATED, *_scores(run))
    zeros = (run.zero,) if run.zero is not None else (0, 1, 2)
    experts = (run.ep,) if run.ep is not None else _expert_groups(run)
    rows = [
        (b, v, r, z, e)
        for b, v, r, z, e in itertools.product(micros, stages, policies, zeros, experts)
        if v == 1 or (per_rank // b) % run.pp == 0
    ]
    rows = rows or [(micros[0], 1, policies[0], zeros[0], experts[0])]
    micro, virtual, policy, zero, ep = zip(*rows, strict=True)
    micro, zero = np.minimum(np.array(micro), per_rank), np.array(zero)
    shard = np.where(zero == 0, 1, run.shard)
    return Columns.make(
        len(rows),
        pp=run.pp,
        dp_replicate=run.dp // shard,
        dp_shard=shard,
        cp=run.cp,
        tp=run.tp,
        ep=ep,
        zero=zero,
        sp=run.sp,
        schedule=[SCHEDULES.index("interleaved" if v > 1 else "1f1b") for v in virtual],
        virtual_stages=virtual,
        microbatch=micro,
        num_micro=np.maximum(1, per_rank // micro),
        recompute=[RECOMPUTES.index(each.name) for each in policy],
        recompute_share=[each.share for each in policy],
        activation_budget=[each.budget for each in policy],
        precision=PRECISIONS.index(run.precision),
        compile=run.compile,
        reshard=0,
        offload_optimizer=1.0 if run.host_optimizer else 0.0,
        offload_activations=1.0 if run.host_activations else 0.0,
    )


def _expert_groups(run: PublishedRun) -> tuple[int, ...]:
    """Sizes of expert parallelism that a run may have had which does not say."""
    ranks, experts = run.dp * run.cp * run.tp, run.job.shape.num_experts
    return tuple(e for e in (2**power for power in range(8)) if ranks % e == 0 and experts % e == 0)


def _scores(run: PublishedRun) -> tuple[Remade, ...]:
    """Recompute of attention's scores alone, where these are kept."""
    return () if run.job.stack.flash else (Remade("attention"),)


def predict(run: PublishedRun, tables: Tables) -> tuple[Estimates, int]:
    """Estimates of a run's candidates, and the row that stands for it."""
    columns = candidates(run)
    estimates = estimate(run.job, run.cluster, columns, tables)
    if len(columns) == 1:
        return estimates, 0
    fits = estimates.fits_probability > 0.5
    if not fits.any():  # the run was possible: then memory is taken too high, of all candidates alike
        fits = estimates.total_bytes <= _NEAR_LEAST * estimates.total_bytes.min()
    return estimates, int(np.argmin(np.where(fits, estimates.step_s, np.inf)))
