"""What judges remember: for how long something has been so, and what is usual."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise

from weft.monitor.figures import FigureReading
from weft.spec.figures import RunSpan

#: Readings that a window keeps at most; of a longer span every n-th stands for the others.
MOST_KEPT = 1000
#: Readings that must be there before a median or a deviation says anything.
_LEAST = 20
#: What is usual is asked anew once this part of a window is new.
_REFRESHED = 25
#: Median absolute deviations of a normal distribution in one standard deviation.
_MAD = 1.4826
#: A deviation is at least this share of the median: figures that hardly move are no reason to alert.
_LEAST_DEVIATION = 1e-3


class Streak:
    """For how long something has been so."""

    def __init__(self, span: RunSpan | None):
        self._span = span
        self._count = 0
        self._began = 0.0
        self.since: int | None = None

    def see(self, is_so: bool, reading: FigureReading) -> bool:
        """Whether it has been so for the whole span."""
        if not is_so:
            self._count, self.since = 0, None
            return False
        if not self._count:
            self._began, self.since = reading.time, reading.step
        self._count += 1
        if self._span is None:
            return True
        if self._span.unit == "s":
            return reading.time - self._began >= self._span.amount
        return self._count >= self._span.amount


class TimeWindow:
    """The last readings of a span, without those that were out of bounds."""

    def __init__(self, span: RunSpan):
        self._span = span
        self._stride = max(1, math.ceil(span.amount / MOST_KEPT)) if span.unit != "s" else 1
        self._values: deque[tuple[float, float]] = deque()
        self._number = 0
        self._least = _LEAST if span.unit == "s" else max(2, min(_LEAST, int(span.amount)))
        self._known: tuple[float, float, float] | None = None
        self._new = 0

    def add(self, value: float, time: float) -> None:
        """Take a reading."""
        self._number += 1
        if self._number % self._stride:
            return
        self._new += 1
        if self._new * _REFRESHED >= len(self._values):
            self._known, self._new = None, 0  # what is usual moves slowly: sorting it at each step would cost more
        self._values.append((time, value))
        if self._span.unit == "s":
            while self._values and self._values[0][0] < time - self._span.amount:
                self._values.popleft()
        most = MOST_KEPT if self._span.unit == "s" else math.ceil(self._span.amount / self._stride)
        if len(self._values) > most:
            # Of a span of time too many readings: the older half thins out.
            if self._span.unit == "s":
                half = len(self._values) // 2
                self._values = deque([*list(self._values)[:half:2], *list(self._values)[half:]])
            else:
                self._values.popleft()

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._known = None

    def usual(self) -> tuple[float, float, float] | None:
        """(median, median of the newest fifth, deviation from it); None while too few readings are known."""
        if len(self._values) < self._least:
            return None
        if self._known is None:
            values = [value for _, value in self._values]
            middle = statistics.median(values)
            # From one reading to the next: a curve that falls would make the deviation from its median large.
            moves = statistics.median(abs(after - before) for before, after in pairwise(values))
            recent = statistics.median(values[-max(_LEAST, len(values) // 5) :])
            self._known = middle, recent, max(_MAD * moves / math.sqrt(2), _LEAST_DEVIATION * abs(recent))
        return self._known
