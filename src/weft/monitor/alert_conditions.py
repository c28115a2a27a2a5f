"""Evaluators of alert conditions, one class per kind, with the streaks and windows of readings that they use."""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from weft.config import metrics as kinds
from weft.config.metrics import METRICS, Condition, RunSpan, Series
from weft.monitor.metrics import MetricReading
from weft.units import format_bytes, format_seconds

#: Maximum number of readings in a window. If a span has more readings, only every n-th is kept.
MOST_KEPT = 1000
#: Minimum number of readings for a median or a deviation.
_LEAST = 20
#: The usual value is recomputed once 1/n of the readings in a window are new, with this n.
_REFRESHED = 25
#: Factor from the median absolute deviation to the standard deviation of a normal distribution.
_MAD = 1.4826
#: Minimum deviation as a share of the median, so that tiny changes of nearly constant metrics do not alert.
_LEAST_DEVIATION = 1e-3


class Streak:
    """Tracks for how long a condition has been true without interruption.

    Attributes:
        since: step of the first reading of this time, or None while the condition is false.
    """

    def __init__(self, span: RunSpan | None):
        self._span = span
        self._count = 0
        self._began = 0.0
        self.since: int | None = None

    def see(self, is_so: bool, reading: MetricReading) -> bool:
        """Record whether the condition is true (`is_so`) at a reading.

        Return True if it has been true for the span without interruption. Without a span, return `is_so`.
        """
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
    """The values of a metric in the last steps or seconds, from which its usual value is computed."""

    def __init__(self, span: RunSpan):
        self._span = span
        self._stride = max(1, math.ceil(span.amount / MOST_KEPT)) if span.unit != "s" else 1
        self._values: deque[tuple[float, float]] = deque()
        self._number = 0
        self._least = _LEAST if span.unit == "s" else max(2, min(_LEAST, int(span.amount)))
        self._known: tuple[float, float, float] | None = None
        self._new = 0

    def add(self, value: float, time: float) -> None:
        """Add a reading, and drop readings older than the span.

        If the span has more than 1,000 steps, only every n-th reading is kept. If it is a time with more readings,
        every second one of the older half is dropped.
        """
        self._number += 1
        if self._number % self._stride:
            return
        self._new += 1
        if self._new * _REFRESHED >= len(self._values):
            self._known, self._new = None, 0  # the median changes slowly, so it is not recomputed at each step
        self._values.append((time, value))
        if self._span.unit == "s":
            while self._values and self._values[0][0] < time - self._span.amount:
                self._values.popleft()
        most = MOST_KEPT if self._span.unit == "s" else math.ceil(self._span.amount / self._stride)
        if len(self._values) > most:
            # If a span of time has too many readings, drop every other one of the older half.
            if self._span.unit == "s":
                half = len(self._values) // 2
                self._values = deque([*list(self._values)[:half:2], *list(self._values)[half:]])
            else:
                self._values.popleft()

    def clear(self) -> None:
        """Drop all readings."""
        self._values.clear()
        self._known = None

    def usual(self) -> tuple[float, float, float] | None:
        """Return (median, median of the newest readings, deviation), or None with too few readings.

        The newest readings are a fifth of all, but at least 20. The deviation is estimated from differences of
        successive readings. The result is computed again once 4 % of the readings are new.
        """
        if len(self._values) < self._least:
            return None
        if self._known is None:
            values = [value for _, value in self._values]
            middle = statistics.median(values)
            # Use differences of successive readings: for a falling curve, the deviation from its median is too large.
            moves = statistics.median(abs(after - before) for before, after in pairwise(values))
            recent = statistics.median(values[-max(_LEAST, len(values) // 5) :])
            self._known = middle, recent, max(_MAD * moves / math.sqrt(2), _LEAST_DEVIATION * abs(recent))
        return self._known


# One evaluator for each condition. It gets a run's readings and events in order.

#: Number of buckets of a trend's span, and of its parts, whose means must all move in the same direction.
_BUCKETS, _QUARTERS = 64, 4


class Judge:
    """Base class of the evaluators of alert conditions.

    Attributes:
        holds: True while the condition is true.
        message: the reason as text.
        since: the step since which it is true, or None if unknown.
        metrics: names of the metrics that it reads.
    """

    metrics: frozenset[str] = frozenset()

    def __init__(self, series: Series | None = None) -> None:
        self.holds = False
        self.message = ""
        self.since: int | None = None
        self._series = series
        if series is not None:
            self.metrics = frozenset({series.name})

    def reads(self, reading: MetricReading) -> bool:
        """Return True if the condition uses this reading. A condition without a label uses readings of any label."""
        return self._series is None or self._series.label in ("", reading.label)

    def take(self, reading: MetricReading) -> None:
        """Add a reading of one of `metrics`."""

    def add_event(self, event: str, time: float) -> None:
        """Add an event. Called before `take` gets the readings of that event."""

    def tick(self, now: float) -> None:
        """Update the current time, for conditions about missing events."""

    def all(self) -> Iterator[Judge]:
        """Yield this evaluator and the evaluators of its condition's parts."""
        yield self


class _CompareJudge(Judge):
    def __init__(self, condition: kinds.Compare):
        super().__init__(condition.series)
        self._condition = condition
        self.metrics |= {"planned"} if condition.of == "plan" else set[str]()
        self._streaks: dict[str, Streak] = {}
        self._windows: dict[str, TimeWindow] = {}
        self._out: dict[str, int] = {}
        self._true: dict[str, tuple[str, int | None]] = {}
        self._planned: float | None = None

    def take(self, reading: MetricReading) -> None:
        condition = self._condition
        if reading.name != condition.series.name:
            if reading.label == condition.series.name:
                self._planned = reading.value
            return
        if not self.reads(reading):
            return
        high = condition.operator.startswith(">")
        value, who = (reading.high, reading.at_high) if high else (reading.low, reading.at_low)
        bound, base = self._bound(reading.label, value, reading)
        is_so = bound is not None and _COMPARE[condition.operator](value, bound)
        streak = self._streaks.setdefault(reading.label, Streak(condition.hold))
        if streak.see(is_so, reading):
            owner = f" on {who}" if who else ""
            text = f"{reading.series} is {_shown(reading, value)}{owner}{f', {base}' if base else ''}"
            self._true[reading.label] = (text, streak.since)
        else:
            self._true.pop(reading.label, None)
        self.holds = bool(self._true)
        if self._true:
            self.message, self.since = next(iter(self._true.values()))

    def _bound(self, label: str, value: float, reading: MetricReading) -> tuple[float | None, str]:
        condition = self._condition
        if condition.of == "":
            return condition.value, ""
        if condition.of == "plan":
            planned = self._planned
            return (None, "") if planned is None else (condition.value * planned, f"planned {_shown(reading, planned)}")
        assert condition.over is not None
        window = self._windows.setdefault(label, TimeWindow(condition.over))
        usual = window.usual()
        bound, level = None, math.nan
        if usual is not None:
            way = 1.0 if condition.operator.startswith(">") else -1.0
            middle, recent, spread = usual
            level = recent if condition.of == "sigma" else middle
            bound = level + way * condition.value * spread if condition.of == "sigma" else condition.value * level
        if bound is None or not _COMPARE[condition.operator](value, bound):
            self._out[label] = 0
            if math.isfinite(value):
                window.add(value, reading.time)
        else:
            # Outliers are not added to the window, until enough of them in a row show that the usual value has changed.
            self._out[label] = self._out.get(label, 0) + 1
            most = condition.over.amount if condition.over.unit != "s" else MOST_KEPT
            if self._out[label] > most:
                window.clear()
        return bound, "" if usual is None else f"usually {_shown(reading, level)}"


class _StateJudge(Judge):
    def __init__(self, condition: kinds.State):
        super().__init__(condition.series)
        self._condition, self._streaks = condition, dict[str, Streak]()
        self._true: dict[str, int | None] = {}

    def take(self, reading: MetricReading) -> None:
        condition = self._condition
        if not self.reads(reading):
            return
        values = (reading.value, reading.low, reading.high)
        is_nan, is_inf = any(map(math.isnan, values)), any(map(math.isinf, values))
        is_so = {"nan": is_nan, "inf": is_inf, "not finite": is_nan or is_inf}[condition.state]
        streak = self._streaks.setdefault(reading.label, Streak(condition.hold))
        if streak.see(is_so, reading):
            self._true[reading.label] = streak.since
            self.message = f"{reading.series} is {'nan' if is_nan else 'inf'}"
        else:
            self._true.pop(reading.label, None)
        self.holds = bool(self._true)
        self.since = next(iter(self._true.values()), None)


class _NoImprovementJudge(Judge):
    def __init__(self, condition: kinds.NoImprovement):
        super().__init__(condition.series)
        self._condition = condition
        self._best: float | None = None
        self._best_at: tuple[int | None, float] = (None, 0.0)
        self._number = 0

    def take(self, reading: MetricReading) -> None:
        condition = self._condition
        if not self.reads(reading):
            return
        self._number += 1
        if self._is_better(reading.value):
            self._best, self._best_at, self._number = reading.value, (reading.step, reading.time), 0
        passed = reading.time - self._best_at[1] if condition.span.unit == "s" else self._number
        self.holds = self._best is not None and passed >= condition.span.amount
        if self.holds and self._best is not None:
            self.since = self._best_at[0]
            at = f" of step {self.since}" if self.since is not None else ""
            self.message = (
                f"{reading.series} is {_shown(reading, reading.value)}; the best is {_shown(reading, self._best)}{at}"
            )

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        gain = self._condition.by * abs(self._best) if self._condition.relative else self._condition.by
        return value > self._best + gain if self._condition.way == "higher" else value < self._best - gain


class _TrendJudge(Judge):
    def __init__(self, condition: kinds.Trend):
        super().__init__(condition.series)
        self._condition = condition
        self._buckets: dict[str, deque[tuple[float, float, int]]] = {}  # (when, sum, count)
        self._numbers: dict[str, int] = {}
        self._true: dict[str, str] = {}

    def take(self, reading: MetricReading) -> None:
        condition = self._condition
        if not self.reads(reading):
            return
        value = reading.high if condition.rises else reading.low
        number = self._numbers[reading.label] = self._numbers.get(reading.label, -1) + 1
        if not math.isfinite(value):
            return
        at, width = (reading.time if condition.span.unit == "s" else float(number)), condition.span.amount / _BUCKETS
        buckets = self._buckets.setdefault(reading.label, deque())
        if buckets and at < buckets[-1][0] + width:
            when, total, count = buckets[-1]
            buckets[-1] = (when, total + value, count + 1)
        else:
            buckets.append((at, value, 1))
        while buckets and buckets[0][0] < at - condition.span.amount - width:
            buckets.popleft()
        moved = self._moved(buckets, at)
        if moved is not None and moved >= condition.by:
            how = f"{moved:.0%}" if condition.relative else _shown(reading, moved)
            way = "rose" if condition.rises else "fell"
            self._true[reading.label] = (
                f"{reading.series} {way} by {how} over {condition.span}, to {_shown(reading, value)}"
            )
        else:
            self._true.pop(reading.label, None)
        self.holds = bool(self._true)
        self.message = next(iter(self._true.values()), self.message)

    def _moved(self, buckets: deque[tuple[float, float, int]], at: float) -> float | None:
        """Return the change over the span, as a fraction of the first part's level if the condition is relative.

        Return None with too little data, or if the four parts of the span do not all move in the condition's direction.
        """
        if len(buckets) < 2 * _QUARTERS or at - buckets[0][0] < 0.97 * self._condition.span.amount:
            return None
        values = [total / count for _, total, count in buckets]
        size = len(values) / _QUARTERS
        middles = [statistics.median(values[round(n * size) : round((n + 1) * size)]) for n in range(_QUARTERS)]
        way = 1.0 if self._condition.rises else -1.0
        if any(way * (after - before) <= 0 for before, after in pairwise(middles)):
            return None
        # The centers of the first and the last part are (n - 1) / n of the span apart, so scale the change to the full
        # span.
        moved = way * (middles[-1] - middles[0]) * _QUARTERS / (_QUARTERS - 1)
        return moved / max(abs(middles[0]), 1e-12) if self._condition.relative else moved


class _MissingJudge(Judge):
    def __init__(self, condition: kinds.Missing):
        super().__init__(condition.series)
        self._condition = condition
        self._last: float | None = None
        self._step: int | None = None

    def take(self, reading: MetricReading) -> None:
        if self.reads(reading):
            self._last, self._step, self.holds = reading.time, reading.step, False

    def add_event(self, event: str, time: float) -> None:
        # Between the end of a start and the first step of the next, no events are missing: starting takes time.
        if event in ("end", "held", "failure", "start"):
            self._last, self.holds = None, False

    def tick(self, now: float) -> None:
        if self._last is None or now - self._last < self._condition.span.amount:
            return
        self.holds, self.since = True, self._step
        self.message = f"no {self._condition.series} since {format_seconds(now - self._last)}"


class _HappenedJudge(Judge):
    def __init__(self, condition: kinds.Happened):
        super().__init__()
        self._event = condition.event

    def add_event(self, event: str, time: float) -> None:
        self.holds = event == self._event
        self.message = f"the run's event: {event}"


class _JoinedJudge(Judge):
    """Evaluator of an "all of" or "any of" condition. `holds` is computed from its parts at each access."""

    def __init__(self, parts: tuple[Condition, ...], *, every: bool):
        self._parts = [judge_of(part) for part in parts]
        self._every = every
        self.metrics = frozenset[str]()

    @property
    def holds(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # it is only read
        found = [part.holds for part in self._parts]
        return all(found) if self._every else any(found)

    @property
    def message(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # it is only read
        return "; ".join(dict.fromkeys(part.message for part in self._parts if part.holds))

    @property
    def since(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # it is only read
        return min((part.since for part in self._parts if part.holds and part.since is not None), default=None)

    def all(self) -> Iterator[Judge]:
        yield self
        for part in self._parts:
            yield from part.all()


def judge_of(condition: Condition) -> Judge:
    """Return the evaluator of a condition."""
    match condition:
        case kinds.Every() | kinds.Any_():
            return _JoinedJudge(condition.parts, every=isinstance(condition, kinds.Every))
        case kinds.Compare():
            return _CompareJudge(condition)
        case kinds.State():
            return _StateJudge(condition)
        case kinds.NoImprovement():
            return _NoImprovementJudge(condition)
        case kinds.Trend():
            return _TrendJudge(condition)
        case kinds.Missing():
            return _MissingJudge(condition)
        case kinds.Happened():
            return _HappenedJudge(condition)


#: Comparisons, all False for nan.
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def _shown(reading: MetricReading, value: float) -> str:
    unit = METRICS[reading.name].unit
    if not math.isfinite(value):
        return str(value)
    if unit.startswith("bytes"):
        return format_bytes(value) + ("/s" if unit.endswith("/s") else "")
    if unit == "s":
        return format_seconds(value)
    return f"{value:.4g}{ {'W': ' W', 'C': ' C'}.get(unit, '') }"
