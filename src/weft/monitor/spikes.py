"""SpikeWatch: tells once when the loss jumps far above what it was."""

from __future__ import annotations

import math
import statistics
from collections import deque

#: Steps that "usual" is taken from, and how many of them must be there.
WINDOW, _LEAST = 100, 20
#: A spike is above the median by so many median absolute deviations, and above the best median by this factor.
DEVIATIONS, ABOVE_BEST = 5.0, 1.5
#: One step alone counts when it is above all of the last steps by this factor; else two in a row are needed.
_ALONE = 1.5


class SpikeWatch:
    """Watches the losses of one run, step by step.

    A loss of a spike does not enter what is usual. A spike is over when the loss is below its bound again; one that
    lasts for as long as the window is the new usual.
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[float] = deque(maxlen=WINDOW)  # spikes too
        self._best = math.inf
        self._in_a_row = 0
        self._told = False

    def observe(self, loss: float) -> float | None:
        """Return the usual loss (median) when this step begins a spike that is worth a line, else None."""
        if not math.isfinite(loss):
            return None  # the guard's matter
        usual, bound = self._bound()
        highest = max(self._recent, default=loss)
        self._recent.append(loss)
        if loss <= bound:
            self._in_a_row, self._told = 0, False
            self._window.append(loss)
            return None
        self._in_a_row += 1
        if self._in_a_row > WINDOW:
            self._window.clear()
            self._best, self._in_a_row = math.inf, 0
            return None
        if self._told or (self._in_a_row == 1 and loss <= _ALONE * highest):
            return None
        self._told = True
        return usual

    def _bound(self) -> tuple[float, float]:
        """(median, what a loss must exceed); nothing exceeds the bound while few steps are known."""
        if len(self._window) < _LEAST:
            return math.nan, math.inf
        usual = statistics.median(self._window)
        self._best = min(self._best, usual)
        spread = statistics.median(abs(value - usual) for value in self._window)
        # A curve that falls has a median that lags above it: the best median keeps the bound from being too low.
        return usual, max(usual + DEVIATIONS * spread, ABOVE_BEST * self._best)
