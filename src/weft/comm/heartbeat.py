"""Progress of this process, written by collectives and read by the hang watch's thread.

Recording a collective sets three attributes and reads no clock. The watch thread records when they changed.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

#: Number of recent steps whose median is the usual step time, and the minimum number for a median.
_STEPS, _ENOUGH = 32, 3


class Wait(Protocol):
    """An operation that a rank waits for."""

    def where(self) -> tuple[str, tuple[int, ...]]:
        """Return (description of the collective and its axis, global ranks that take part)."""
        ...

    def late(self) -> tuple[int, ...]:
        """Return the global ranks identified as late. Empty if they cannot be determined."""
        ...


class Heartbeat:
    """Progress of one mesh on this rank.

    `waiting` is the current wait. `moved` increases whenever a wait ends. `in_step` is True during a training step.
    `phases` is the stack of work in progress, innermost last, as (description such as "saves a checkpoint", True if it
    may take long). `planned_s` is the planned step time in seconds, 0 if unknown.
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
        """Record the duration of a step. All ranks record the same steps."""
        self._steps.append(seconds)

    def usual_s(self) -> float:
        """Return the usual step time (s): the larger of the measured median and `planned_s`; 0 before three steps."""
        steps = list(self._steps)
        if len(steps) < _ENOUGH:
            return 0.0  # the first ones compile and warm up
        return max(statistics.median(steps), self.planned_s)

    @contextmanager
    def doing(self, phase: str, may_take_long: bool = True) -> Generator[None]:
        """Record within the block that this rank does work that others may wait for, such as "saves a checkpoint"."""
        self.phases.append((phase, may_take_long))
        self.moved += 1
        try:
            yield
        finally:
            self.phases.pop()
            self.moved += 1
