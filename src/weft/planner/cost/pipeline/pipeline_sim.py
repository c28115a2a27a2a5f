"""What a schedule costs: its steps carried out on a clock, one stream of work on each rank.

Exact for the closed forms of 1F1B, interleaving and zero bubble where those are exact; where they are not (forward,
input gradient and weight gradient of different lengths, uneven stages) this is the number.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.spec.schedule import Action, Pair, Schedule, Step, makes, needs, parts

#: Seconds of one microbatch: the same for every stage, or one number for each.
PerStage = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of each kind of action; per stage, where a sequence is given.

    hidden: of a pair, the share of its shorter part that hides behind the longer; with 0, which is what the runtime
    does, the two run one after the other. latency_s: from the end of an action until another rank has what it made; it
    runs beside the work of both.
    """

    forward_s: PerStage
    input_gradient_s: PerStage
    weight_gradient_s: PerStage
    hidden: float = 0.0
    latency_s: float = 0.0

    def of(self, action: Action) -> float:
        """Return the seconds of one action."""
        stage = action.stage
        if action.kind == "F":
            return _at(self.forward_s, stage)
        if action.kind == "B":
            return _at(self.input_gradient_s, stage)
        if action.kind == "W":
            return _at(self.weight_gradient_s, stage)
        return _at(self.input_gradient_s, stage) + _at(self.weight_gradient_s, stage)

    def of_step(self, step: Step) -> float:
        """Return the seconds of one step: of a pair, less than the sum."""
        lengths = [self.of(action) for action in parts(step)]
        return sum(lengths) - (self.hidden * min(lengths) if isinstance(step, Pair) else 0.0)


def _at(value: PerStage, stage: int) -> float:
    return value if isinstance(value, int | float) else value[stage]


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each step of each rank ran.

    makespan_s: of the whole optimizer step, without the update. idle_s: per rank, its waiting.
    in_flight: per rank, most stages' activations of one microbatch held at once.
    starts_s, ends_s: per rank, in the order of the schedule's list.
    """

    makespan_s: float
    idle_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def bubble_s(self) -> float:
        """Waiting of the rank that waits least: what the schedule adds to the work of the busiest rank."""
        return min(self.idle_s)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Carry the schedule out on a clock.

    Raises:
        ValueError: where its ranks wait for each other in a circle.
    """
    ranks = schedule.ranks
    if durations.hidden:
        starts, ends = _run(schedule, ranks, durations)
    else:
        # Of a pair nothing hides: its parts run one after the other, and the forward's output leaves before the
        # backward begins.
        starts, ends = _run(schedule, [[one for step in steps for one in parts(step)] for steps in ranks], durations)
        counts = [[len(parts(step)) for step in steps] for steps in ranks]
        starts = [_each(times, count, 0) for times, count in zip(starts, counts, strict=True)]
        ends = [_each(times, count, -1) for times, count in zip(ends, counts, strict=True)]
    makespan = max(end[-1] for end in ends)
    busy = [sum(durations.of_step(step) for step in steps) for steps in ranks]
    return Timeline(
        makespan_s=makespan,
        idle_s=tuple(makespan - one for one in busy),
        in_flight=tuple(schedule.in_flight(rank) for rank in range(schedule.num_ranks)),
        starts_s=tuple(map(tuple, starts)),
        ends_s=tuple(map(tuple, ends)),
    )


def _each(times: list[float], counts: list[int], place: int) -> list[float]:
    """Of consecutive groups of times, the first (place 0) or last (-1) of each."""
    groups = zip(accumulate(counts), counts, strict=True)
    return [times[stop - count : stop][place] for stop, count in groups]


def _run(
    schedule: Schedule, ranks: Sequence[Sequence[Step]], durations: Durations
) -> tuple[list[list[float]], list[list[float]]]:
    """When each step of the ranks' lists begins and ends."""
    done: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}
    starts: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    ready = list(range(schedule.num_ranks))
    heapq.heapify(ready)
    while ready:
        rank = heapq.heappop(ready)
        while len(ends[rank]) < len(ranks[rank]):
            step = ranks[rank][len(ends[rank])]
            start = _start(schedule, step, rank, done, durations.latency_s)
            if isinstance(start, Action):
                waiting.setdefault(start, []).append(rank)
                break
            start = max(start, ends[rank][-1] if ends[rank] else 0.0)
            end = start + durations.of_step(step)
            starts[rank].append(start)
            ends[rank].append(end)
            for made in [one for action in parts(step) for one in makes(action)]:
                done[made] = end
                for other in waiting.pop(made, ()):
                    heapq.heappush(ready, other)
    stuck = [str(steps[len(end)]) for steps, end in zip(ranks, ends, strict=True) if len(end) < len(steps)]
    if stuck:
        raise ValueError(f"schedule {schedule.name}: its ranks wait for each other at {', '.join(stuck)}")
    return starts, ends


def _start(schedule: Schedule, step: Step, rank: int, done: dict[Action, float], latency_s: float) -> float | Action:
    """When all that a step needs is there, or an action that is still missing."""
    start = 0.0
    for action in parts(step):
        for need in needs(schedule, action):
            if need not in done:
                return need
            far = schedule.owner(need.stage) != rank
            start = max(start, done[need] + (latency_s if far else 0.0))
    return start
