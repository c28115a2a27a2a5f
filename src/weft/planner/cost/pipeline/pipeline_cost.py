"""Pipelines in closed form: how layers fall on stages, the bubble of each schedule, passes in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.space import Columns
from weft.spec.plan import SCHEDULES

Array = NDArray[np.float64]

_CODE = {name: SCHEDULES.index(name) for name in SCHEDULES}
#: By code of schedule: whether it works in rounds over several chunks of each rank; whether it has the form of a V.
_LOOPED = np.array([name in ("interleaved", "zb_interleaved") for name in SCHEDULES])
_V_SHAPED = np.array([name in ("zb_v", "dualpipe_v") for name in SCHEDULES])
#: By code: which count of passes in flight it has, of those in `in_flight`.
_KINDS = {"gpipe": 0, "1f1b": 1, "interleaved": 2, "zb_h1": 3, "zb_interleaved": 3, "zb_v": 3, "dualpipe_v": 4}
_HELD = np.array([_KINDS[name] for name in SCHEDULES])


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of the first rank of a pipeline, of the fullest rank between the ends, and of the last rank."""

    first: Array
    middle: Array
    last: Array

    def rows(self, index: NDArray[Any] | slice) -> Stages:
        """Return the layers of plans, by the kind that each is of."""
        return Stages(self.first[index], self.middle[index], self.last[index])


def chunks_per_rank(columns: Columns) -> Array:
    """Count the parts of the model on each rank: virtual stages, and two where the schedule has the form of a V."""
    chunks = np.where(_looped(columns), columns.virtual_stages, 1 + _V_SHAPED.take(columns.schedule))
    return np.where(columns.pp > 1, chunks, 1).astype(np.float64)


def split_layers(num_layers: int, columns: Columns) -> Stages:
    """Return how many layers the ranks hold. Where they do not come out even, the last rank has less, then the first.

    The ends also hold the head and the embedding; most programs relieve them so.
    """
    return even_layers(num_layers, columns.pp, chunks_per_rank(columns))


def even_layers(num_layers: int, num_ranks: NDArray[Any], chunks: Array) -> Stages:
    """Return the same by the ranks of a pipeline and the chunks of each.

    Args:
        num_layers: of the whole model.
        num_ranks: of each plan's pipeline.
        chunks: as `chunks_per_rank` counts them.
    """
    p, v = num_ranks.astype(np.float64), chunks
    full = v * np.ceil(num_layers / (p * v))
    short = p * full - num_layers
    every, rest = np.floor(short / p), short % p
    return Stages(
        first=np.maximum(0.0, full - every - (rest >= 2)),
        middle=np.maximum(0.0, full - every),
        last=np.maximum(0.0, full - every - (rest >= 1)),
    )


def balanced_layers(num_layers: int, columns: Columns, first_cost: Array, last_cost: Array) -> Stages:
    """Return how many layers the ranks hold where embedding and head count as layers.

    Args:
        num_layers: of the whole model.
        columns: the plans.
        first_cost: of the embedding, in layers.
        last_cost: of the head, in layers.
    """
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
    """Return the seconds that the fullest rank waits for the others.

    Narayanan et al. 2021 (arXiv 2104.04473), Qi et al. 2023 (2401.10241), DeepSeek-AI 2024. Of equal stages each is the
    longest path through its schedule, in closed form, as the clock finds it (`pipeline_sim`): exact but for zb_v
    between p
    and 2 p - 1 passes, where it is drawn straight.

    Args:
        columns: the plans.
        forward: seconds of one pass on one rank, all its chunks.
        backward: the same.
        wgrad: the part of backward that makes weight gradients.
        slack: sum over the ranks of a pass's seconds, less the fullest rank's; (p - 1)(forward + backward) where all
            are
            equal.
    """
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    whole = np.maximum(forward + backward, 1e-30)
    parts = (forward / whole, (backward - wgrad) / whole, wgrad / whole, p, columns.num_micro.astype(np.float64))
    share = np.ones(len(columns))
    for name, form in _FORMS.items():
        rows = np.flatnonzero((columns.schedule == _CODE[name]) & (p > 1))
        if len(rows):
            share[rows] = form(*(np.broadcast_to(part, p.shape)[rows] for part in parts)) / (p[rows] - 1)
    # Interleaving works in rounds of p passes; an incomplete round costs the chunks that are not filled.
    ragged = np.where(_looped(columns), (v - 1) * ((-columns.num_micro) % p) * whole / v, 0.0)
    return np.where(p > 1, slack / v * share + ragged, 0.0)


def _longest(*paths: Any) -> Array:
    return np.maximum.reduce(np.broadcast_arrays(*paths))


def _zb_h1(f: Array, b: Array, w: Array, p: Array, m: Array) -> Array:
    """Each pass but the first lets a rank fill its waiting with one more weight gradient."""
    return (p - 1) * (f + b) - np.minimum(p - 1, m - 1) * np.minimum(np.minimum(f, b), w)


def _zb_interleaved(f: Array, b: Array, w: Array, p: Array, m: Array) -> Array:
    return (p - 1) * _longest(f, b, f + b - w)


def _zb_v(f: Array, b: Array, w: Array, p: Array, m: Array) -> Array:
    q = p - 1

    def few(j: Array) -> Array:
        return _longest(
            2 * (q - j) * f + 2 * q * b,
            (2 * q - j) * (f + b),
            2 * q * f + (2 * q - 3 * j) * b - j * w,
            2 * q * f + 2 * (q - j) * b - 2 * j * w,
        )

    many = _longest(
        2 * q * (b - w),
        b + (q - 1) * w,
        f + (q - 1) * w,
        q * b,
        2 * q * f - q * b - w,
        (2 * q - 1) * f - (q - 1) * b,
        2 * q * f - (2 * q + 1) * w,
        (2 * q - 1) * f + b - 2 * q * w,
    )
    between = np.clip((m - p) / q, 0.0, 1.0)
    return few(np.minimum(m - 1, q)) * (1 - between) + many * between


def _dualpipe_v(f: Array, b: Array, w: Array, p: Array, m: Array) -> Array:
    # A pair's forward is sent before its backward begins: the paper's overlapped pairs cost a forward more each.
    late = np.maximum(0.0, b - w) + np.maximum(0.0, f - b - w)
    return _longest((p - 1) * f, (p - 1) * b - f) + (p - 1) * late


#: Waiting of equal stages by the parts of a chunk's pass: forward, input gradient, weight gradient; ranks, passes.
_FORMS = {"zb_h1": _zb_h1, "zb_interleaved": _zb_interleaved, "zb_v": _zb_v, "dualpipe_v": _dualpipe_v}


def _looped(columns: Columns) -> NDArray[np.bool_]:
    return _LOOPED.take(columns.schedule)


def in_flight(columns: Columns, rank: Any) -> Array:
    """Count the passes whose activations `rank` of the pipeline holds at most, in whole passes of the rank.

    A schedule that puts weight gradients off holds what they need until then: as much on every rank as on the first.
    """
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    m = columns.num_micro.astype(np.float64)
    rank = np.asarray(rank, dtype=np.float64)
    warm = p - rank
    looped = (2 * (p - rank - 1) + (v - 1) * p + 1) / v
    kind = _HELD.take(columns.schedule)
    held = np.choose(kind, [m, warm, looped, p, p + 0.5])
    return np.where(p > 1, np.minimum(m, held), 1.0)


#: The columns that decide how many passes are in flight.
OF_FLIGHT = ("pp", "schedule", "virtual_stages", "num_micro")
_EVERY = slice(None)


def fullest_moment(
    columns: Columns, rank: Any, one_pass: Array, gradients: Array, index: NDArray[Any] | slice = _EVERY
) -> tuple[Array, Array]:
    """Return the passes in flight and the share of gradients that are there when both together are most.

    Gradients of a chunk are made in its first backward. A schedule that has run most forwards by then lets go of
    activations while gradients grow: the two are never there whole at once.

    Args:
        columns: the plans, or one for each kind by OF_FLIGHT.
        rank: place in the pipeline; a number, or one for each of those.
        one_pass: bytes of a pass's activations on the rank.
        gradients: bytes of all gradients of the rank, where they add up over the passes.
        index: the kind of each plan.
    """
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    kind = _HELD.take(columns.schedule)
    every = columns.num_micro * v
    ahead = np.choose(np.minimum(kind, 2), [every, p - rank - 1, 2 * (p - rank - 1) + (v - 1) * p])
    last_begins = (v - 1) * p + 1  # the backward, counted from 1, in which the last chunk's gradients are made
    held = in_flight(columns, rank)[index]
    # Those that put weight gradients off are not followed so closely, and of many passes all is there at once.
    fills = (kind <= 2) & (p > 1) & (every - ahead <= last_begins)
    rows = np.flatnonzero(fills[index]) if fills.any() else np.zeros(0, dtype=np.intp)
    if not len(rows):
        return held, np.broadcast_to(np.float64(1.0), held.shape)
    held, begun = held.copy(), np.ones(len(held))
    own = rows if isinstance(index, slice) else index[rows]
    some = (np.broadcast_to(each, held.shape)[rows] for each in (one_pass, gradients))
    held[rows], begun[rows] = _fullest(*(each[own] for each in (p, v, every, ahead, last_begins)), *some)
    return held, begun


def _fullest(
    p: Array, v: Array, every: Array, ahead: Array, last_begins: Array, one_pass: Array, gradients: Array
) -> tuple[Array, Array]:
    """Passes in flight and share of gradients, of schedules that are still filling when gradients begin."""
    full = np.maximum(1.0, every - ahead)  # the last backward before which as many passes as ever are in flight
    held, begun = np.zeros(len(p)), np.ones(len(p))
    most = np.full(len(p), -np.inf)
    for wanted in (full, p * np.ceil(full / p) + 1, last_begins):
        number = np.clip(wanted, full, np.maximum(full, last_begins))
        chunks = np.minimum(every, ahead + number) - number + 1
        made = np.minimum(v, np.ceil(number / p))
        is_first = ((number - 1) % p == 0) & (number <= last_begins)
        for less, later in ((0, is_first), (is_first, 0)):  # before and after a backward that makes gradients
            passes, share = (chunks - less) / v, (made - later) / v
            total = passes * one_pass + share * gradients
            held, begun = np.where(total > most, passes, held), np.where(total > most, share, begun)
            most = np.maximum(most, total)
    return held, begun


def sends(columns: Columns) -> Array:
    """Count the transfers between stages that the step waits for, one by one, where sends do not hide under compute."""
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    m = columns.num_micro.astype(np.float64)
    once = np.where(columns.schedule == _CODE["gpipe"], 2 * (p - 1), 2 * ((p - 1) * (1 + m / p) - 1))
    return np.where(p > 1, np.where(v > 1, 2 * v * m, once), 0.0)


def hidden_sends(columns: Columns) -> Array:
    """Count the transfers that the step waits for where sends hide under compute: those of filling and draining."""
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    return np.where(p > 1, 2 * (v * p - 1), 0.0)
