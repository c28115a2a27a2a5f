"""Pipelines in closed form: how layers fall on stages, the bubble of each schedule, passes in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.columns import Columns
from weft.spec.plan import SCHEDULES

Array = NDArray[np.float64]

_CODE = {name: SCHEDULES.index(name) for name in SCHEDULES}
#: By code of schedule: whether it works in rounds over several chunks of each rank; whether it has the form of a V.
_LOOPED = np.array([name in ("interleaved", "zb_interleaved") for name in SCHEDULES])
_V_SHAPED = np.array([name in ("zb_v", "dualpipe_v") for name in SCHEDULES])
#: By code: which count of passes in flight it has, of those in `in_flight`.
_HELD = np.array([{"gpipe": 0, "zb_v": 3, "dualpipe_v": 4}.get(name, 1) for name in SCHEDULES])


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of the first rank of a pipeline, of the fullest rank between the ends, and of the last rank."""

    first: Array
    middle: Array
    last: Array


def chunks_per_rank(columns: Columns) -> Array:
    """Parts of the model that each rank holds: the virtual stages, and two where the schedule has the form of a V."""
    chunks = np.where(_looped(columns), columns.virtual_stages, 1 + _V_SHAPED.take(columns.schedule))
    return np.where(columns.pp > 1, chunks, 1).astype(np.float64)


def split_layers(num_layers: int, columns: Columns) -> Stages:
    """How many layers the ranks hold. Where they do not come out even, the last rank has less, then the first.

    The ends also hold the head and the embedding; most programs relieve them so.
    """
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    full = v * np.ceil(num_layers / (p * v))
    short = p * full - num_layers
    every, rest = np.floor(short / p), short % p
    return Stages(
        first=np.maximum(0.0, full - every - (rest >= 2)),
        middle=np.maximum(0.0, full - every),
        last=np.maximum(0.0, full - every - (rest >= 1)),
    )


def balanced_layers(num_layers: int, columns: Columns, first_cost: Array, last_cost: Array) -> Stages:
    """How many layers the ranks hold where embedding and head count as `first_cost` and `last_cost` layers."""
    p = columns.pp.astype(np.float64)
    even = split_layers(num_layers, columns)
    mean = (num_layers + first_cost + last_cost) / p
    last = np.clip(np.floor(mean - last_cost + 0.5), 0, even.middle)
    first = np.clip(np.floor(mean - first_cost + 0.5), 0, num_layers - last)
    first = np.where(p == 2, num_layers - last, first)
    middle = np.ceil((num_layers - first - last) / np.maximum(1, p - 2))
    own = (p > 1) & (chunks_per_rank(columns) == 1)
    return Stages(
        first=np.where(own, first, even.first),
        middle=np.where(own & (p > 2), middle, even.middle),
        last=np.where(own, last, even.last),
    )


def bubble_s(columns: Columns, forward: Any, backward: Any, wgrad: Any, slack: Any) -> Array:
    """Seconds that the fullest rank waits for the others.

    forward, backward: of one pass on one rank, all its chunks. wgrad: the part of backward that makes weight
    gradients. slack: sum over the ranks of a pass's seconds, less the fullest rank's; (p - 1)(forward + backward)
    where all are equal. Narayanan et al. 2021 (arXiv 2104.04473), Qi et al. 2023 (2401.10241), DeepSeek-AI 2024.
    """
    p, v = columns.pp, chunks_per_rank(columns)
    whole = np.maximum(forward + backward, 1e-30)
    dgrad = backward - wgrad
    deferred = forward + np.maximum(0.0, dgrad - wgrad)
    shares = {
        "zb_h1": np.maximum(0.0, forward + dgrad - wgrad) / whole,
        "zb_interleaved": deferred / whole,
        "zb_v": deferred / whole,
        # A pair's forward is sent before its backward begins: the paper's overlapped pairs cost one forward more.
        "dualpipe_v": np.maximum(0.0, 2 * backward - 3 * wgrad) / whole,
    }
    share = np.ones(len(columns))
    for name, value in shares.items():
        share = np.where(columns.schedule == _CODE[name], value, share)
    # Interleaving works in rounds of p passes; an incomplete round costs the chunks that are not filled.
    ragged = np.where(_looped(columns), (v - 1) * ((-columns.num_micro) % p) * whole / v, 0.0)
    return np.where(p > 1, slack / v * share + ragged, 0.0)


def _looped(columns: Columns) -> NDArray[np.bool_]:
    return _LOOPED.take(columns.schedule)


def in_flight(columns: Columns, rank: Any) -> Array:
    """Passes whose activations rank `rank` of the pipeline holds at its fullest moment, in whole passes of the rank."""
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    m = columns.num_micro.astype(np.float64)
    rank = np.asarray(rank, dtype=np.float64)
    warm = p - rank
    looped = (2 * (p - rank - 1) + (v - 1) * p + 1) / v
    kind = np.where(_looped(columns) & (v > 1), 2, _HELD.take(columns.schedule))
    held = np.choose(kind, [m, warm, looped, p, p + 0.5])
    return np.where(p > 1, np.minimum(m, held), 1.0)


def sends(columns: Columns) -> Array:
    """Transfers between stages that the step waits for, one after another, where sends do not hide under compute."""
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    m = columns.num_micro.astype(np.float64)
    once = 2 * ((p - 1) * (1 + m / p) - 1)
    return np.where(p > 1, np.where(v > 1, 2 * v * m, once), 0.0)


def hidden_sends(columns: Columns) -> Array:
    """The same where they do hide: those of filling and draining."""
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    return np.where(p > 1, 2 * (v * p - 1), 0.0)
