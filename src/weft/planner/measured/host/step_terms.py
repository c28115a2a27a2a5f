"""Step time of plans whose ranks share the cores of one measured host.

Ranks that compute at the same time slow each other down: laws are asked with the number of ranks at work. In a pipeline
that number changes: while it fills and drains some ranks wait, and the others have the cores to themselves. Nothing
hides under compute, since a rank carries its messages on its own core.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import Parts, budget_s, replay_s
from weft.planner.measured.host.crowd import Crowd, crowd_of
from weft.planner.measured.host.data_parallel import data_parallel_s
from weft.planner.measured.host.host_layer import VALUE, CrowdedLaws, dtype_of, layer_costs
from weft.planner.measured.host.live_bytes import host_memory
from weft.planner.measured.host.waiting import waiting_s
from weft.planner.measured.laws import Laws
from weft.planner.space import Columns, Job
from weft.spec.plan import RECOMPUTES

Array = NDArray[np.float64]

#: The terms that this model fills; the others of a step are zero on a host.
FILLED = (
    "gemm",
    "attention",
    "memory_bound",
    "recompute",
    "tp",
    "cp",
    "ep",
    "pp_p2p",
    "bubble",
    "dp_exposed",
    "optimizer",
)


def host_parts(job: Job, columns: Columns, laws: Laws) -> Parts:
    """Return seconds by term and bytes by class of every row, as `cost.device_parts` has them for devices.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        laws: of the host's primitives.
    """
    return host_terms(job, columns, laws), host_memory(job, columns)


def host_terms(job: Job, columns: Columns, laws: Laws) -> dict[str, Array]:
    """Seconds of a step by term, FILLED, for every row."""
    terms = {name: np.zeros(len(columns)) for name in FILLED}
    for dtype, rows in dtype_of(columns):
        part = columns[rows]
        crowd = crowd_of(job, part)
        for name, seconds in _terms(job, part, laws, dtype, crowd).items():
            terms[name][rows] = seconds
    return terms


@dataclass(frozen=True, slots=True)
class PassTerms:
    """Seconds of one microbatch on the busiest rank, by term."""

    terms: dict[str, Array]

    @property
    def total(self) -> Array:
        return np.sum(list(self.terms.values()), axis=0)

    @property
    def compute(self) -> Array:
        """Without what travels, but for that of what is made again."""
        return np.sum([self.terms[name] for name in ("gemm", "attention", "memory_bound", "recompute")], axis=0)


def _terms(job: Job, columns: Columns, laws: Laws, dtype: str, crowd: Crowd) -> dict[str, Array]:
    m = columns.num_micro.astype(float)
    full = _pass(job, columns, crowd, laws, crowd.steady, dtype)
    terms = {name: m * seconds for name, seconds in full.terms.items()}
    terms["bubble"], terms["pp_p2p"] = np.zeros(len(columns)), np.zeros(len(columns))
    piped = columns.pp > 1
    if piped.any():
        bubble, sends = _pipeline(job, columns[piped], laws, dtype, crowd.rows(piped), full.total[piped])
        terms["bubble"][piped], terms["pp_p2p"][piped] = bubble, sends
    clock = CrowdedLaws(laws, columns.world_size.astype(float), dtype)
    terms["dp_exposed"], terms["optimizer"], pieces = data_parallel_s(job, columns, clock, crowd)
    for name, seconds in waiting_s(job, columns, clock, crowd.layers, m * full.compute, pieces).items():
        terms[name] = terms[name] + seconds
    return terms


def _pass(job: Job, columns: Columns, crowd: Crowd, laws: Laws, active: Array, dtype: str) -> PassTerms:
    """One microbatch on the busiest rank, forward and backward, with what recompute does again."""
    layers, costs = crowd.layers, layer_costs(job, columns, laws, active, dtype)
    repeated = budget_s(job, columns, costs)
    for name, seconds in replay_s(job, columns, costs).items():
        repeated = np.where(columns.recompute == RECOMPUTES.index(name), seconds, repeated)
    embed, head = crowd.has_embedding, crowd.has_head
    return PassTerms({
        "gemm": layers * (costs.gemm_f + costs.gemm_b) + head * costs.head_gemm,
        "attention": layers * (costs.attn_f + costs.attn_b),
        "memory_bound": layers * (costs.memory_f + costs.memory_b) + embed * costs.embed + head * costs.head_memory,
        "recompute": layers * repeated * columns.recompute_share,
        "tp": layers * (costs.tp_f + costs.tp_b) + embed * costs.embed_tp + head * costs.head_tp,
        "cp": layers * (costs.cp_f + costs.cp_b),
        "ep": layers * (costs.ep_f + costs.ep_b),
    })  # fmt: skip


def _pipeline(job: Job, columns: Columns, laws: Laws, dtype: str, crowd: Crowd, full: Array) -> tuple[Array, Array]:
    """Seconds that filling and draining cost beyond the busiest rank's own passes, and those of messages.

    While `stages` of them are at work, a pass takes what the laws say for so many ranks at once. Each number of stages
    below all is met twice, once filling and once draining; in half of these slots the busiest rank waits.
    """
    p, m = columns.pp.astype(float), columns.num_micro.astype(float)
    share = crowd.bubble_share
    slots = np.zeros(len(columns))
    for stages in range(1, int(p.max())):
        met = np.minimum(stages, m)
        active = np.maximum(1.0, met * crowd.steady / p)
        each = _pass(job, columns, crowd, laws, active, dtype).total
        slots = slots + np.where(stages < p, 2 * each, 0.0)
    # (p - 1) passes of the busiest rank lie within filling and draining, at the pace of those.
    bubble = share * (slots - (p - 1) * full)
    clock = CrowdedLaws(laws, crowd.steady, dtype)
    tokens = columns.microbatch * (job.seq_len / columns.cp)
    size = tokens * job.shape.crossings * job.shape.hidden * VALUE / np.where(columns.sp, columns.tp, 1)
    each = clock.travel("send", size, np.full(len(columns), 2))
    return bubble, each * crowd.sends
