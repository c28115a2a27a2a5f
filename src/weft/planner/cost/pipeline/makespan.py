"""The seconds of a schedule, and nothing else of it: what the clock says of many thousands of actions, in little time.

`pipeline_sim` tells when each step of each rank runs, which pictures need; a test holds the two together.
"""

from __future__ import annotations

from collections import defaultdict

from weft.planner.cost.pipeline.pipeline_sim import Durations
from weft.spec.schedule import Action, Schedule, parts

#: Not made yet.
_OPEN = -1.0


class _Clock:
    """When forwards and gradients of inputs are made, by stage and microbatch, and which ranks wait for them."""

    def __init__(self, schedule: Schedule, durations: Durations):
        self._last = schedule.num_stages - 1
        self._seconds = {
            kind: [durations.of(Action(kind, stage, 0)) for stage in range(schedule.num_stages)]
            for kind in ("F", "B", "W", "BW")
        }
        row = [_OPEN] * schedule.num_microbatches
        self._forward, self._backward = ([row.copy() for _ in range(schedule.num_stages)] for _ in range(2))
        self._waiting: dict[tuple[bool, int, int], list[int]] = defaultdict(list)

    def run(self, rank: int, actions: list[Action], now: float, ready: list[int]) -> tuple[int, float]:
        """Run a rank's next actions from a moment on, until one waits for another rank; how many ran, and until when.

        Ranks that wait for what is made are added to `ready`.
        """
        forward, backward, last, seconds, waiting = (
            self._forward, self._backward, self._last, self._seconds, self._waiting,
        )  # fmt: skip
        for place, (kind, stage, microbatch) in enumerate(actions):
            is_forward = kind == "F"
            if is_forward:
                there = forward[stage - 1][microbatch] if stage else 0.0
                needed = (True, stage - 1, microbatch)
            elif kind == "W" or stage == last:
                there = (backward if kind == "W" else forward)[stage][microbatch]
                needed = (kind != "W", stage, microbatch)
            else:
                there, needed = backward[stage + 1][microbatch], (False, stage + 1, microbatch)
                if forward[stage][microbatch] == _OPEN:
                    there, needed = _OPEN, (True, stage, microbatch)
                there = there if there == _OPEN else max(there, forward[stage][microbatch])
            if there == _OPEN:
                waiting[needed].append(rank)
                return place, now
            now = max(now, there) + seconds[kind][stage]
            if kind != "W":
                (forward if is_forward else backward)[stage][microbatch] = now
                ready += waiting.pop((is_forward, stage, microbatch), ())
        return len(actions), now


def makespan_s(schedule: Schedule, durations: Durations) -> float:
    """Return the seconds of a whole optimizer step without the update, as `simulate` has them.

    Args:
        schedule: the lists of all ranks.
        durations: seconds of every action. Of pairs nothing is hidden, and what is made is there at once.

    Raises:
        ValueError: where its ranks wait for each other in a circle.
    """
    if durations.hidden or durations.latency_s:
        raise ValueError("pairs that hide work, and latency, are simulate's")
    left = [[action for step in steps for action in parts(step)] for steps in schedule.ranks]
    clock, ends = _Clock(schedule, durations), [0.0] * len(left)
    ready = list(range(len(left)))
    while ready:
        rank = ready.pop()
        ran, ends[rank] = clock.run(rank, left[rank], ends[rank], ready)
        del left[rank][:ran]
    if any(left):
        stuck = ", ".join(str(actions[0]) for actions in left if actions)
        raise ValueError(f"schedule {schedule.name}: its ranks wait for each other at {stuck}")
    return max(ends)
