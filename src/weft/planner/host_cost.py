"""Seconds that memory saved costs: transfers to and from the host, the optimizer's step there, recompute by budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.planner.columns import Columns, Job
from weft.planner.memory_cost import layer_bytes
from weft.planner.tables import Tables
from weft.spec.plan import RECOMPUTES, RESHARDS

Array = NDArray[np.float64]

#: Bytes per second that the optimizer on the host moves through memory: two sockets of eight DDR5 channels, at 60 %.
_HOST_STEP_RATE = 2 * 250e9 * 0.6
#: Bytes per parameter that an Adam step moves there (g, p, m and v read; p, m and v written).
_HOST_STEP_BYTES = 28.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What goes on beside the transfers: seconds of one pass of one layer, layers of a rank, its own parameters."""

    forward: Array
    backward: Array
    layers: Array
    own: Array


def offload_s(job: Job, columns: Columns, tables: Tables, work: Work, devices_per_node: int) -> Array:
    """Seconds of a step that the host adds: what does not hide under compute, and the optimizer's step on the host.

    Transfers run beside compute, out in forward and in during backward (Ren et al. 2021, arXiv 2101.06840); of each
    layer only what is longer than its compute is waited for.
    """
    shares = (columns.offload_optimizer, columns.offload_params, columns.offload_activations)
    if not any(share.any() for share in shares):
        return np.zeros(len(columns))
    optimizer, params, activations = shares
    rate, passes = tables.host_rate, columns.num_micro.astype(np.float64)
    whole_s = passes * work.layers * (work.forward + work.backward)
    stepped = np.maximum(optimizer, params) * work.own
    step = stepped * (_HOST_STEP_BYTES * devices_per_node / _HOST_STEP_RATE)
    out = optimizer * work.own * job.stack.grad_bytes / rate
    back = optimizer * work.own * job.stack.weight_bytes / rate
    gathers = np.choose(columns.reshard, [2 * passes, passes, np.ones(len(columns))]) if len(RESHARDS) == 3 else passes
    sums = np.where(columns.reshard == RESHARDS.index("after_step"), 1.0, passes)
    moved = params * work.own * (gathers * job.stack.gather_bytes + sums * job.stack.grad_bytes) / rate
    late = np.maximum(0.0, out + moved - whole_s * (2 / 3))
    each = activations * layer_bytes(job, columns).kept / rate
    waits = np.maximum(0.0, each - work.forward) + np.maximum(0.0, each - work.backward)
    return step + back + late + passes * work.layers * waits


def budget_s(job: Job, columns: Columns, forward: Array, selective: Array) -> Array:
    """Seconds of recompute of one pass of one layer under a budget that is a share of what recompute=none keeps.

    forward, selective: what full and selective recompute take. Between the policies the budget mixes them, layer by
    layer, so the time goes in straight lines from one to the next.
    """
    budget = columns.activation_budget
    if not np.isfinite(budget).any():
        return np.zeros(len(columns))
    kept = {}
    for name in ("selective", "full"):
        code = np.full(len(columns), RECOMPUTES.index(name), dtype=np.uint8)
        found = layer_bytes(job, replace(columns, recompute=code, recompute_share=np.ones(len(columns))))
        kept[name] = found.kept / found.whole
    high, low = kept["selective"], kept["full"]
    share = np.clip(budget, low, 1.0)
    upper = selective * (1 - share) / np.maximum(1 - high, 1e-9)
    lower = selective + (forward - selective) * (high - share) / np.maximum(high - low, 1e-9)
    return np.where(budget < 1, np.where(share >= high, upper, lower), 0.0)
