"""Python's garbage collector in turns that all ranks take at the same step.

Left alone it looks through every object of a rank whenever so many are new, for tenths of a second and at another time
on each rank, and in each step all ranks wait for the slowest.
"""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageTurns:
    """While it is open, Python collects garbage after each step whose number is a multiple of `every`, and only then.

    What was there after the first step is left out. Nothing changes where `every` is 0 or the collector was off before.

    Args:
        every: steps between collections.
    """

    def __init__(self, every: int):
        self.every = every
        self._num_steps = 0
        self._was_on = self._has_frozen = False

    def __enter__(self) -> GarbageTurns:
        self._was_on = self.every > 0 and gc.isenabled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_on:
            gc.enable()
        self._has_frozen = False

    def after_step(self, step: int | None = None) -> None:
        """Take a turn where it is due.

        Args:
            step: its number, the same on all ranks; None: as often as this was called.
        """
        self._num_steps += 1
        if not self._was_on:
            return  # who turned the collector off wants no turns
        if self._num_steps == 1:
            gc.disable()
            gc.collect()
            if not gc.get_freeze_count():
                gc.freeze()
                self._has_frozen = True
        elif (self._num_steps if step is None else step) % self.every == 0:
            gc.collect()
