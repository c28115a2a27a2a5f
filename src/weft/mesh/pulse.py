"""Where this process stands among the ranks, written by what communicates and read by the thread that watches.

Writing costs three attributes a collective, so nothing here looks at a clock: the watcher notes when something moved.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


class Wait(Protocol):
    """What a rank waits for."""

    def where(self) -> tuple[str, tuple[int, ...]]:
        """Return (the collective and its axis in words, the global ranks that take part)."""
        ...

    def late(self) -> tuple[int, ...]:
        """Return the global ranks known to hold it up; empty where that is not known."""
        ...


class Pulse:
    """The last sign of life of one mesh on this rank.

    waiting: what this rank waits for now. moved: grows whenever a wait has ended. in_step: a training step is under
    way.
    phases: work that is under way, the innermost last, such as "saves a checkpoint", and whether it may take long.
    """

    __slots__ = ("in_step", "moved", "phases", "waiting")

    def __init__(self) -> None:
        self.waiting: Wait | None = None
        self.moved = 0
        self.in_step = False
        self.phases: list[tuple[str, bool]] = []

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
