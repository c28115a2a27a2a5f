"""Cost of a pipeline schedule: a simulation of its steps in which each rank runs one step at a time, and closed forms.

The simulation agrees with the closed forms of 1F1B, interleaved and zero-bubble schedules where these are exact. In
other cases (different lengths of forward, input gradient and weight gradient, or uneven stages) use the simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.pipeline_schedule import Action, Schedule, parts
from weft.config.plan import SCHEDULES
from weft.planner.space.columns import Columns

#: Time (s) of one microbatch: one number for all stages, or one per stage.
PerStage = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class Durations:
    """Time (s) of each kind of action, as one number or per stage.

    Attributes:
        latency_s: time from the end of an action until another rank has its result. Both ranks can compute meanwhile.
    """

    forward_s: PerStage
    input_gradient_s: PerStage
    weight_gradient_s: PerStage
    latency_s: float = 0.0

    def of(self, kind: str, stage: int) -> float:
        """Return the time (s) of a kind of action (F, B, W, or BW for both gradients) on a stage."""
        each = {"F": self.forward_s, "B": self.input_gradient_s, "W": self.weight_gradient_s}
        values = (each[letter] for letter in kind)
        return sum(value if isinstance(value, int | float) else value[stage] for value in values)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every step on every rank.

    Attributes:
        makespan_s: time (s) of the optimizer step, without the update.
        idle_s: idle seconds per rank.
        in_flight: per rank, the peak number of pairs of stage and microbatch whose activations it stores.
        starts_s, ends_s: per rank, the start and end of each step, in the order of the schedule.
    """

    makespan_s: float
    idle_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def bubble_s(self) -> float:
        """Smallest idle time (s) of any rank: the time that the schedule adds to the compute of the busiest rank."""
        return min(self.idle_s)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Run the schedule on a simulated clock.

    If a step is a forward and a backward, they do not overlap: the forward's output is sent before the backward begins.

    Raises:
        ValueError: if the schedule's ranks wait for each other in a cycle.
    """
    clock = _Clock(schedule, durations)
    clock.run_all()
    makespan = max(end[-1] for end in clock.ends)
    starts, ends, idle = list[tuple[float, ...]](), list[tuple[float, ...]](), list[float]()
    for steps, times in zip(schedule.ranks, clock.ends, strict=True):
        seconds = [durations.of(action.kind, action.stage) for step in steps for action in parts(step)]
        stops = list(accumulate(len(parts(step)) for step in steps))
        firsts = [0, *stops[:-1]]
        starts.append(tuple(times[first] - seconds[first] for first in firsts))
        ends.append(tuple(times[stop - 1] for stop in stops))
        idle.append(makespan - sum(seconds))
    held = tuple(schedule.in_flight(rank) for rank in range(schedule.num_ranks))
    return Timeline(makespan_s=makespan, idle_s=tuple(idle), in_flight=held, starts_s=tuple(starts), ends_s=tuple(ends))


def makespan_s(schedule: Schedule, durations: Durations) -> float:
    """Return the time (s) of an optimizer step without the update, as `simulate` computes it.

    Raises:
        ValueError: if the schedule's ranks wait for each other in a cycle.
    """
    clock = _Clock(schedule, durations)
    clock.run_all()
    return max(times[-1] for times in clock.ends)


#: Not computed yet.
_OPEN = -1.0


class _Clock:
    """End times of forwards and input gradients by stage and microbatch, and the ranks that wait for each of them.

    ends: end times of each rank's actions, in the order of its list.
    """

    def __init__(self, schedule: Schedule, durations: Durations):
        count = schedule.num_stages
        self._name, self._last = schedule.name, count - 1
        self._left = [[action for step in steps for action in parts(step)] for steps in schedule.ranks]
        self.ends: list[list[float]] = [[] for _ in schedule.ranks]
        self._seconds = {kind: [durations.of(kind, stage) for stage in range(count)] for kind in ("F", "B", "W", "BW")}
        owners = [schedule.owner(stage) for stage in range(count)]
        #: Latency of a message between a stage and the next.
        self._far = [durations.latency_s * (one != other) for one, other in pairwise(owners)]
        row = [_OPEN] * schedule.num_microbatches
        self._forward, self._backward = ([row.copy() for _ in range(count)] for _ in range(2))
        self._waiting: dict[tuple[bool, int, int], list[int]] = defaultdict(list)

    def run_all(self) -> None:
        """Run all actions of all ranks. Raises ValueError if ranks wait for each other in a cycle."""
        ready = list(range(len(self._left)))
        while ready:
            rank = ready.pop()
            ran = self._run(rank, self._left[rank], self.ends[rank], ready)
            del self._left[rank][:ran]
        if any(self._left):
            stuck = ", ".join(str(actions[0]) for actions in self._left if actions)
            raise ValueError(f"schedule {self._name}: its ranks wait for each other at {stuck}")

    def _run(self, rank: int, actions: list[Action], ends: list[float], ready: list[int]) -> int:
        """Run a rank's next actions until one must wait for another rank. Return how many ran.

        Ranks that waited for one of the results are added to `ready`.
        """
        forward, backward, last, seconds, far = self._forward, self._backward, self._last, self._seconds, self._far
        now = ends[-1] if ends else 0.0
        for place, (kind, stage, microbatch) in enumerate(actions):
            is_forward, there = kind == "F", 0.0
            needed = (True, stage - 1, microbatch)
            if is_forward and stage:
                there = forward[stage - 1][microbatch]
                there = there if there == _OPEN else there + far[stage - 1]
            elif not is_forward and (kind == "W" or stage == last):
                there = (backward if kind == "W" else forward)[stage][microbatch]
                needed = (kind != "W", stage, microbatch)
            elif not is_forward:
                there, needed = backward[stage + 1][microbatch], (False, stage + 1, microbatch)
                if forward[stage][microbatch] == _OPEN:
                    there, needed = _OPEN, (True, stage, microbatch)
                there = there if there == _OPEN else max(there + far[stage], forward[stage][microbatch])
            if there == _OPEN:
                self._waiting[needed].append(rank)
                return place
            now = max(now, there) + seconds[kind][stage]
            ends.append(now)
            if kind != "W":
                (forward if is_forward else backward)[stage][microbatch] = now
                ready += self._waiting.pop((is_forward, stage, microbatch), ())
        return len(actions)


# Pipelines in closed form: layers per stage, bubble of each schedule, microbatches in flight.

Array = NDArray[np.float64]

_CODE = {name: SCHEDULES.index(name) for name in SCHEDULES}
#: By code of schedule: True if it is interleaved (several chunks per rank, in rounds); True if its stages form a V.
_LOOPED = np.array([name in ("interleaved", "zb_interleaved") for name in SCHEDULES])
_V_SHAPED = np.array([name in ("zb_v", "dualpipe_v") for name in SCHEDULES])
#: By code of schedule: index of its formula in `in_flight`.
_KINDS = {"gpipe": 0, "1f1b": 1, "interleaved": 2, "zb_h1": 3, "zb_interleaved": 3, "zb_v": 3, "dualpipe_v": 4}
_HELD = np.array([_KINDS[name] for name in SCHEDULES])


@dataclass(frozen=True, slots=True)
class Stages:
    """Number of layers of a pipeline's first rank, of the middle rank with the most layers, and of the last rank."""

    first: Array
    middle: Array
    last: Array


def chunks_per_rank(columns: Columns) -> Array:
    """Return the number of model chunks on each rank: `virtual_stages` if interleaved, 2 for V schedules, else 1."""
    chunks = np.where(_looped(columns), columns.virtual_stages, 1 + _V_SHAPED.take(columns.schedule))
    return np.where(columns.pp > 1, chunks, 1).astype(np.float64)


def split_layers(num_layers: int, columns: Columns) -> Stages:
    """Return the number of layers per rank. If they do not divide evenly, the last rank has fewer, then the first.

    Most frameworks give these ranks fewer layers, because they also have the head and the embedding.
    """
    return even_layers(num_layers, columns.pp, chunks_per_rank(columns))


def even_layers(num_layers: int, num_ranks: NDArray[Any], chunks: Array) -> Stages:
    """Return the number of layers per rank like `split_layers`, from the numbers of ranks and of chunks per rank."""
    p, v = num_ranks.astype(np.float64), chunks
    full = v * np.ceil(num_layers / (p * v))
    short = p * full - num_layers
    every, rest = np.floor(short / p), short % p
    return Stages(
        first=np.maximum(0.0, full - every - (rest >= 2)),
        middle=np.maximum(0.0, full - every),
        last=np.maximum(0.0, full - every - (rest >= 1)),
    )


def bubble_s(columns: Columns, forward: Any, backward: Any, wgrad: Any, slack: Any) -> Array:
    """Return the time (s) that the busiest rank waits for the others.

    Narayanan et al. 2021 (arXiv 2104.04473), Qi et al. 2023 (2401.10241), DeepSeek-AI 2024. For equal stages the value
    is the longest path through the schedule in closed form, as in the simulation. It is exact except for zb_v between p
    and 2 p - 1 microbatches, where it is interpolated linearly.

    Args:
        forward: time (s) of one microbatch on one rank, over all its chunks.
        wgrad: the part of backward for weight gradients.
        slack: time of one microbatch summed over all ranks except the busiest; (p - 1)(forward + backward) if all are
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
    # Interleaved schedules run in rounds of p microbatches. The unused chunks of an incomplete round are idle time.
    ragged = np.where(_looped(columns), (v - 1) * ((-columns.num_micro) % p) * whole / v, 0.0)
    return np.where(p > 1, slack / v * share + ragged, 0.0)


def _longest(*paths: Any) -> Array:
    return np.maximum.reduce(np.broadcast_arrays(*paths))


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


#: Idle time of equal stages, from the times of one chunk (forward, input gradient, weight gradient), ranks,
#: microbatches.
_FORMS: dict[str, Callable[[Array, Array, Array, Array, Array], Array]] = {
    # Each microbatch after the first fills idle time with one more weight gradient.
    "zb_h1": lambda f, b, w, p, m: (p - 1) * (f + b) - np.minimum(p - 1, m - 1) * np.minimum(np.minimum(f, b), w),
    "zb_interleaved": lambda f, b, w, p, m: (p - 1) * _longest(f, b, f + b - w),
    "zb_v": _zb_v,
    # A pair's forward is sent before its backward begins. With the overlapped pairs of the paper, each costs one more
    # forward.
    "dualpipe_v": lambda f, b, w, p, m: (
        _longest((p - 1) * f, (p - 1) * b - f) + (p - 1) * (np.maximum(0.0, b - w) + np.maximum(0.0, f - b - w))
    ),
}


def _looped(columns: Columns) -> NDArray[np.bool_]:
    return _LOOPED.take(columns.schedule)


def in_flight(columns: Columns, rank: Any) -> Array:
    """Return the peak number of microbatches whose activations `rank` of the pipeline stores, over all its chunks.

    It is 1 without a pipeline. A schedule that defers weight gradients keeps their inputs until then, so that every
    rank stores as many as the first.
    """
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    m = columns.num_micro.astype(np.float64)
    rank = np.asarray(rank, dtype=np.float64)
    warm = p - rank
    looped = (2 * (p - rank - 1) + (v - 1) * p + 1) / v
    kind = _HELD.take(columns.schedule)
    held = np.choose(kind, [m, warm, looped, p, p + 0.5])
    return np.where(p > 1, np.minimum(m, held), 1.0)


#: The columns that decide how many microbatches are in flight.
OF_FLIGHT = ("pp", "schedule", "virtual_stages", "num_micro")
_EVERY = slice(None)


def fullest_moment(
    columns: Columns, rank: Any, one_pass: Array, gradients: Array, index: NDArray[Any] | slice = _EVERY
) -> tuple[Array, Array]:
    """Return the microbatches in flight and the share of gradients when activations plus gradients are largest.

    Gradients of a chunk are created in its first backward. A schedule that has run most forwards by then releases
    activations while gradients are created, so that the maxima of both are never reached together.

    Args:
        rank: position in the pipeline; a number, or one for each row of `columns`.
        one_pass: activation bytes of a microbatch on the rank, for each plan.
        gradients: bytes of the rank's gradients, for each plan.
        index: row of `columns` for each plan.
    """
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    kind = _HELD.take(columns.schedule)
    every = columns.num_micro * v
    ahead = np.choose(np.minimum(kind, 2), [every, p - rank - 1, 2 * (p - rank - 1) + (v - 1) * p])
    last_begins = (v - 1) * p + 1  # index, from 1, of the backward that creates the last chunk's gradients
    held = in_flight(columns, rank)[index]
    # Schedules that defer weight gradients are not modeled in such detail. With many microbatches both maxima are
    # reached.
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
    """Return microbatches in flight and share of gradients at the peak, as `fullest_moment`.

    All forwards must have run before the last chunk's first backward ends.
    """
    full = np.maximum(1.0, every - ahead)  # the last backward at which the maximum number of microbatches is in flight
    held, begun = np.zeros(len(p)), np.ones(len(p))
    most = np.full(len(p), -np.inf)
    for wanted in (full, p * np.ceil(full / p) + 1, last_begins):
        number = np.clip(wanted, full, np.maximum(full, last_begins))
        chunks = np.minimum(every, ahead + number) - number + 1
        made = np.minimum(v, np.ceil(number / p))
        is_first = ((number - 1) % p == 0) & (number <= last_begins)
        for less, later in ((0, is_first), (is_first, 0)):  # before and after a backward that creates gradients
            passes, share = (chunks - less) / v, (made - later) / v
            total = passes * one_pass + share * gradients
            held, begun = np.where(total > most, passes, held), np.where(total > most, share, begun)
            most = np.maximum(most, total)
    return held, begun


def sends(columns: Columns) -> Array:
    """Return the number of transfers between stages that delay the step, if sends do not overlap with compute."""
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    m = columns.num_micro.astype(np.float64)
    once = np.where(columns.schedule == _CODE["gpipe"], 2 * (p - 1), 2 * ((p - 1) * (1 + m / p) - 1))
    return np.where(p > 1, np.where(v > 1, 2 * v * m, once), 0.0)


def hidden_sends(columns: Columns) -> Array:
    """Return the number of transfers that delay the step if sends overlap with compute.

    These are the transfers while the pipeline fills and drains.
    """
    p, v = columns.pp.astype(np.float64), chunks_per_rank(columns)
    return np.where(p > 1, 2 * (v * p - 1), 0.0)
