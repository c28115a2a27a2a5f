"""How many communicators a rank of Weft's has: one for each set of ranks that something on the device goes over.

A joined axis whose other axes have one rank is the same set, and the set of all ranks is the default group. Between
stages of a pipeline each content and direction has a lane, a group of its two ranks (`comm/peer/lanes.py`); nothing of
the device goes over the axis's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.space import Columns, Job
from weft.spec.plan import SCHEDULES

Counts = NDArray[np.int64]

_V_SHAPED = tuple(SCHEDULES.index(name) for name in ("zb_v", "dualpipe_v"))
#: A set of ranks as the axes along which they differ; the last five stand for sets that are none of axes alone.
_REPLICATE, _SHARD, _CP, _TP, _PP, _EXPERTS, _BESIDE, _COPIES, _NEIGHBOURS, _ENDS = (1 << bit for bit in range(10))


def axis_groups(job: Job, columns: Columns, end: bool) -> Counts:
    """Return the communicators of a rank over axes of the mesh, one entry per plan.

    Args:
        job: model, sequence and batch.
        columns: the plans.
        end: whether the rank holds the embedding or the head.
    """
    t, p = _used(columns.tp, _TP), _used(columns.pp, _PP)
    r, s, c = _used(columns.dp_replicate, _REPLICATE), _used(columns.dp_shard, _SHARD), _used(columns.cp, _CP)
    none = np.zeros_like(t)
    sets = [
        r | s | c | t | p,  # the norm, and whether a step is taken
        t,
        c,
        s | c,  # gradients and weights
        r,  # gradients between replicas
        r | s,  # samples
        r | s | c,  # tokens
        r | s | c | t,  # of one stage
        np.where(columns.zero == 3, s | c | t, none),  # the norm of what is sharded
    ]
    if (columns.ep > 1).any():
        sets += _expert_sets(columns, (r, s, c, t))
    kv_heads = job.shape.kv_heads
    if kv_heads:  # heads of keys that several ranks of tp hold
        sets.append(np.where(columns.tp > kv_heads, r | s | c | _COPIES, none))
    near = (columns.reshard_within > 1) & (columns.reshard_within < columns.dp_shard)
    sets.append(np.where(near, _NEIGHBOURS, none))
    if end and job.shape.tied:  # the gradient of the weight that the first and the last stage share
        sets.append(np.where(columns.pp > 2, _ENDS, p))
    ordered = np.sort(np.stack(np.broadcast_arrays(*sets)), axis=0)
    return (ordered[0] > 0) + np.count_nonzero(np.diff(ordered, axis=0), axis=0)


def lanes(columns: Columns, rank: Any) -> Counts:
    """Return the lanes of a rank to other stages, one entry per plan.

    Args:
        columns: the plans.
        rank: place in the pipeline; a number, or one for each plan.
    """
    p = columns.pp
    sides = 1 * (rank > 0) + (rank < p - 1)
    # A V goes both ways between neighbours; several stages on a rank, one after another, close the chain to a ring.
    sides = np.where(np.isin(columns.schedule, _V_SHAPED), 2 * sides, np.where(columns.virtual_stages > 1, 2, sides))
    return np.where(p > 1, 2 * sides, 0)


def _used(sizes: Counts, bit: int) -> Counts:
    return np.where(sizes > 1, bit, 0)


def _expert_sets(columns: Columns, bits: tuple[Counts, Counts, Counts, Counts]) -> list[Counts]:
    """The ranks among which experts are divided, those with the same ones, and these in all replicas."""
    r, s, c, t = bits
    e, inner = columns.ep, columns.tp * columns.cp
    borders = [e == columns.tp, e == inner, e == inner * columns.dp_shard]
    among = np.select(borders, [t, c | t, s | c | t], _EXPERTS)
    beside = np.select(borders, [s | c, s, np.zeros_like(s)], _BESIDE)
    return [np.where(e > 1, each, 0) for each in (among, beside, r | beside)]
