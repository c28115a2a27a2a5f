"""Where this process stands among the ranks, written by what communicates and read by the thread that watches.

Writing costs three attributes a collective, so nothing here looks at a clock: the watcher notes when something moved.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

#: Steps that "usual" is taken from, and how many of them must be known.
_STEPS, _ENOUGH = 32, 3


class Wait(Protocol):
    """What a rank waits for."""

    def where(self) -> tuple[str, tuple[int, ...]]:
        """Return (the collective and its axis in words, the global ranks that take part)."""
        ...

    def late(self) -> tuple[int, ...]:
        """Return the global ranks known to hold it up; empty where that is not known."""
        ...


class Heartbeat:
    """The last sign of life of one mesh on this rank.

    waiting: what this rank waits for now. moved: grows whenever a wait has ended. in_step: a training step is under
    way.
    phases: work that is under way, the innermost last, such as "saves a checkpoint", and whether it may take long.
    planned_s: seconds of a step as the plan expects them, 0 where nothing is known.
    """

    __slots__ = ("_steps", "in_step", "moved", "phases", "planned_s", "waiting")

    def __init__(self) -> None:
        self.waiting: Wait | None = None
        self.moved = 0
        self.in_step = False
        self.phases: list[tuple[str, bool]] = []
        self.planned_s = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def step_took(self, seconds: float) -> None:
        """Hear how long a step took; all ranks hear of the same steps."""
        self._steps.append(seconds)

    def usual_s(self) -> float:
        """Return how long a step usually takes here: what was measured, or planned where that is longer; 0: unknown."""
        steps = list(self._steps)
        if len(steps) < _ENOUGH:
            return 0.0  # the first ones compile and warm up
        return max(statistics.median(steps), self.planned_s)

    @contextmanager
    def doing(self, phase: str, may_take_long: bool = True) -> Generator[None]:
        """Say that this rank does, within the block, what others may have to wait for: "saves a checkpoint"."""
        self.phases.append((phase, may_take_long))
        self.moved += 1
        try:
            yield
        finally:
            self.phases.pop()
            self.moved += 1
