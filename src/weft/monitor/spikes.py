"""SpikeWatch: detect steps at which the loss jumps far above its recent values."""

from __future__ import annotations

import math
import statistics
from collections import deque

#: Number of recent steps that define the usual loss, and the minimum needed before any alarm.
WINDOW, _MIN_STEPS = 100, 20
#: A spike exceeds the median by this many median absolute deviations, and the best median by this factor.
DEVIATIONS, ABOVE_BEST = 5.0, 1.5
#: A spike exceeds this fraction of the highest median so far: noise around a converged loss is no spike.
FLOOR = 0.01
#: A single step raises an alarm if it exceeds all recent steps by this factor; otherwise two in a row are needed.
_SINGLE_STEP_FACTOR = 1.5
#: Steps without another alarm after the first one. The number doubles with every spike that ended by itself.
QUIET_STEPS = 50
#: A spike that lasts this many steps raises an alarm even within the quiet steps.
_LASTING = 20


class SpikeWatch:
    """Detects loss spikes of one run, step by step.

    Losses of a spike do not enter the usual loss. A spike ends when the loss falls below its bound. After a spike of
    `WINDOW` steps the new level is the usual one.
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[float] = deque(maxlen=WINDOW)  # with the losses of spikes
        self._best, self._highest = math.inf, 0.0  # of the medians
        self._in_a_row = 0
        self._alarmed = False
        self._quiet_left, self._quiet = 0, QUIET_STEPS

    def observe(self, loss: float) -> float | None:
        """Return the usual loss (median) if this step raises an alarm, else None."""
        if not math.isfinite(loss):
            return None  # NonFiniteGuard handles these
        usual, bound = self._bound()
        highest = max(self._recent, default=loss)
        self._recent.append(loss)
        self._quiet_left = max(0, self._quiet_left - 1)
        if loss <= bound:
            self._end_spike()
            self._window.append(loss)
            return None
        self._in_a_row += 1
        if self._in_a_row > WINDOW:
            self._window.clear()
            self._best, self._in_a_row, self._alarmed = math.inf, 0, False
            return None
        if self._alarmed or not self._is_alarm(loss, highest):
            return None
        self._alarmed, self._quiet_left = True, self._quiet
        return usual

    def _is_alarm(self, loss: float, highest: float) -> bool:
        if self._quiet_left:
            return self._in_a_row >= _LASTING
        return self._in_a_row > 1 or loss > _SINGLE_STEP_FACTOR * highest

    def _end_spike(self) -> None:
        if self._alarmed:
            self._quiet *= 2
        self._in_a_row, self._alarmed = 0, False

    def _bound(self) -> tuple[float, float]:
        """Return (median, bound). The bound is infinite while too few steps are in the window."""
        if len(self._window) < _MIN_STEPS:
            return math.nan, math.inf
        usual = statistics.median(self._window)
        self._best, self._highest = min(self._best, usual), max(self._highest, usual)
        deviation = statistics.median(abs(value - usual) for value in self._window)
        # The median of a falling curve lags above it, so the best median keeps the bound from being too low.
        return usual, max(usual + DEVIATIONS * deviation, ABOVE_BEST * self._best, FLOOR * self._highest)
