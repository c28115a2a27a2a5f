"""The same figure of many ranks as five numbers: least, median, greatest, and whose the two ends are."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from weft.config.metrics import FIGURES, series, split_series
from weft.monitor.events import number
from weft.monitor.stragglers import StragglerWatch, median_without


@dataclass(frozen=True, slots=True)
class Fold:
    """One figure over ranks or machines. at_min, at_max: who has the two ends, such as "rank 3"."""

    min: float
    median: float
    max: float
    at_min: str
    at_max: str

    def as_json(self) -> list[object]:
        """Return it as an event holds it: [least, median, greatest, who has the least, who has the greatest]."""
        return [*(_short(value) for value in (self.min, self.median, self.max)), self.at_min, self.at_max]


def fold(values: Mapping[str, float]) -> Fold | None:
    """Return a figure's values by owner as one `Fold`; None where none is a number. Of equals the first is named."""
    known = {owner: value for owner, value in values.items() if not math.isnan(value)}
    if not known:
        return None
    low = min(known, key=lambda owner: known[owner])
    high = max(known, key=lambda owner: known[owner])
    return Fold(known[low], statistics.median(known.values()), known[high], low, high)


def _short(value: float) -> float | int:
    """Six digits say enough, and whole numbers stay whole: a line of an event is read by people too."""
    if not math.isfinite(value):
        return value
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")


# What an event says in figures: every reader of events.jsonl (sinks, alerts, the page) asks here.

#: What an evaluation says beside its loss and metrics.
_OF_EVALUATION = frozenset({"event", "time", "step", "loss"})


@dataclass(frozen=True, slots=True)
class FigureReading:
    """A figure at a moment.

    name, label: which series. value: the number; over ranks the median. low, high: over ranks the least and greatest,
    else the value too. at_low, at_high: whose these are, such as "rank 3"; "" for a figure of the run. step: of the
    event, None where it has none. time: seconds since 1970.
    """

    name: str
    label: str
    value: float
    low: float
    high: float
    at_low: str = ""
    at_high: str = ""
    step: int | None = None
    time: float = 0.0

    @property
    def series(self) -> str:
        """The text that names its series."""
        return series(self.name, self.label)


def readings(event: Mapping[str, Any]) -> Iterator[FigureReading]:
    """Yield what an event says in figures; nothing for events without any. Unknown figures are left out."""
    step, time = event.get("step"), number(event.get("time"))
    at = (step if type(step) is int else None, time)
    for text, value in _values(event):
        try:
            name, label = split_series(text)
        except ValueError:
            continue
        if name not in FIGURES:
            continue
        if isinstance(value, list):
            if len(parts := cast(list[Any], value)) == 5:
                low, middle, high = (number(one) for one in parts[:3])
                yield FigureReading(name, label, middle, low, high, str(parts[3]), str(parts[4]), *at)
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            found = number(value)
            if not math.isnan(found) or value == "nan":
                yield FigureReading(name, label, found, found, found, "", "", *at)


def _values(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of (series, value)."""
    kind = event.get("event")
    if kind == "step":
        yield from _of_step(event)
    elif kind == "eval":
        yield "eval.loss", event.get("loss")
        yield from ((series("eval.metric", key), value) for key, value in event.items() if _is_metric(key, value))
    elif kind == "figures":
        yield from _table(event.get("figures")).items()
    elif kind == "checkpoint":
        yield "checkpoint.stall_s", event.get("stall_s")
        yield "checkpoint.durable_s", event.get("durable_s")
    elif kind == "failure":
        yield "failures", event.get("count", 1)
    elif kind == "plan":
        yield from ((series("planned", key), value) for key, value in _table(event.get("figures")).items())
    elif kind == "actual":
        yield from ((series("plan.drift", key), value) for key, value in _table(event.get("ratios")).items())


def _of_step(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    seconds = _table(event.get("seconds"))
    yield "step", event.get("step")
    for name in ("loss", "lr", "grad_norm", "update_ratio", "loss_scale", "mfu", "samples_per_s"):
        yield name, event.get(name)
    # Counts are called by their unit: tokens_per_s, points_per_s.
    speed = next((key for key in event if key.endswith("_per_s") and key != "samples_per_s"), "samples_per_s")
    yield "tokens_per_s", event.get(speed)
    yield "step_s", seconds.get("total")


def _table(value: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _is_metric(key: str, value: object) -> bool:
    # A whole number is what was counted, called by its unit.
    return key not in _OF_EVALUATION and (isinstance(value, float) or value in ("nan", "inf", "-inf"))


# A rank's own work, step by step and without its waits for others, for the first rank to compare.

#: Steps of one report: so many are enough to compare, and reports stay small.
_MOST = 8
_MICRO = 1e6


class PaceWriter:
    """Picks some of the steps since the last report: the same ones on every rank, however many each has done.

    They are multiples of a power of two, so that a rank that reports more steps picks a part of what another picks.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Mapping[str, float]] = {}
        self._stride = 1

    def add(self, step: int, own: Mapping[str, float]) -> None:
        """Take a step's own seconds by part."""
        if step % self._stride:
            return
        self._steps[step] = own
        while len(self._steps) > _MOST:
            self._stride *= 2
            self._steps = {one: parts for one, parts in self._steps.items() if one % self._stride == 0}

    def take(self) -> dict[str, object]:
        """Return what a report says of the steps, and begin again; {} where there were none.

        steps: microseconds of each. parts: mean seconds of a step by part.
        """
        steps, self._steps, self._stride = self._steps, {}, 1
        if not steps:
            return {}
        parts = dict.fromkeys(part for own in steps.values() for part in own)
        return {
            "steps": {str(step): round(sum(own.values()) * _MICRO) for step, own in steps.items()},
            "parts": {
                part: float(f"{sum(own.get(part, 0.0) for own in steps.values()) / len(steps):.4g}") for part in parts
            },
        }


# The thread of each rank that reads figures and reports them; on the first rank it folds what all have reported.

#: Steps that may wait in the queue; at 1 kHz more than a second.
_MOST_QUEUED = 2048
#: How often (s) the thread looks whether there is something to do.
_TICK_S = 0.25
#: A rank is silent after so many intervals without a new report.
_SILENT_AFTER = 3
#: How often (s) at least a rank tells its pace, so that a slow one is named within half a minute.
_PACE_S = 5.0


class ReportChannel(Protocol):
    """Where ranks leave reports. The first rank alone reads them."""

    def post(self, text: str) -> None:
        """Leave this rank's report in the place of the one before."""
        ...

    def read(self) -> Sequence[str]:
        """Return the newest report of every rank, "" for one that left none."""
        ...


class LocalReports:
    """The board of a single rank."""

    def __init__(self) -> None:
        self._text = ""

    def post(self, text: str) -> None:
        """Leave the report."""
        self._text = text

    def read(self) -> Sequence[str]:
        """Return it."""
        return [self._text]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What training puts into the queue after a step: seconds by phase and, of waits for others, by axis.

    own: seconds of the rank's own work by part, without its waits for others.
    """

    step: int
    seconds: Mapping[str, float]
    exposed: Mapping[str, float] = field(default_factory=dict)
    busy_s: float = 0.0
    data_s: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)


#: Reads figures of ranks or machines, by series.
Reader = Callable[[], Mapping[str, float]]


class Collector(threading.Thread):
    """Reads and reports the figures of one rank.

    Args:
        rank: this one.
        host: name of its machine.
        board: where the reports go.
        every_s: seconds between events; ranks report as often, and their pace every 5 s at least.
        of_rank: give figures of this rank; one that fails is left out from then on.
        of_host: the same of its machine.
        totals: figures that grow; what they gained per step is told.
        publish: on the first rank, takes the event of all ranks.
        groups: of each rank, a number that is equal for ranks that do the same work; (): all do.
        on_slow: on the first rank, takes an event of a rank that became slow, or is no longer.
        clock: seconds since 1970, for tests.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        board: ReportChannel,
        every_s: float,
        *,
        of_rank: Sequence[Reader] = (),
        of_host: Sequence[Reader] = (),
        totals: Reader | None = None,
        publish: Callable[[Mapping[str, object]], None] | None = None,
        groups: Sequence[int] = (),
        on_slow: Callable[[Mapping[str, object]], None] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        super().__init__(name="weft-figures", daemon=True)
        self._rank, self._host, self._board, self._every_s = rank, host, board, every_s
        self._of_rank, self._of_host, self._totals = [*of_rank], [*of_host], totals
        self._publish, self._clock, self._on_slow = publish, clock, on_slow
        self._groups = groups
        self._stragglers: StragglerWatch | None = None
        self._pace, self._newest = PaceWriter(), dict[str, object]()
        self._queue: deque[StepFigures] = deque()
        self._sums: dict[str, float] = {}
        self._num_steps = self._num_dropped = self._number = self._step = 0
        self._totals_before: tuple[int, Mapping[str, float]] = (0, {})
        self._last: dict[str, float] = {}
        self._heard: dict[int, tuple[int, float]] = {}
        self._end = threading.Event()
        self._in_one_sentence = clock()
        #: Whatever went wrong last; nothing of it stops training.
        self.trouble = ""

    def put(self, figures: StepFigures) -> None:
        """Take a step's numbers, or drop them where the queue is full. Never waits."""
        if len(self._queue) >= _MOST_QUEUED:
            self._num_dropped += 1
        else:
            self._queue.append(figures)

    def close(self) -> None:
        """Tell what is left, and end the thread."""
        self._end.set()
        if self.is_alive():
            self.join(5.0)

    def run(self) -> None:
        """Tell every few seconds until `close`: the thread's own function."""
        due = pace_due = time.monotonic()
        while not self._end.wait(min(_TICK_S, self._every_s)):
            self._drain()
            now = time.monotonic()
            if now >= due + self._every_s:
                due = pace_due = now
                self.tell()
            elif now >= pace_due + _PACE_S:
                pace_due = now
                self.tell(pace_only=True)
        self.tell()

    def tell(self, *, pace_only: bool = False) -> None:
        """Make this rank's report; on the first rank, publish what all have reported.

        pace_only: tell the last report once more with a newer pace, and publish only who is slow.
        """
        try:
            self._drain()
            if not pace_only or not self._newest:
                self._newest = self._report()
            self._number += 1
            pace = self._pace.take()
            self._board.post(json.dumps({**self._newest, "number": self._number, **({"pace": pace} if pace else {})}))
            if self._publish is not None:
                self._look([_parsed(text) for text in self._board.read()], pace_only)
        except Exception as error:  # A store that is gone, a full disk: training says so itself.
            self.trouble = f"{type(error).__name__}: {error}"

    def _look(self, reports: Sequence[Mapping[str, Any]], pace_only: bool) -> None:
        """On the first rank: make events of what all have reported."""
        now = self._clock()
        silent = [rank for rank, report in enumerate(reports) if self._is_silent(rank, report, now)]
        heard = [{} if rank in silent else report for rank, report in enumerate(reports)]
        if len(reports) > 1 and self._on_slow is not None:
            if self._stragglers is None:
                self._stragglers = StragglerWatch(self._groups or [0] * len(reports))
            for event in self._stragglers.observe(heard):
                self._on_slow(event)
        if not pace_only and self._publish is not None:
            self._publish(self._event(heard, silent, now))

    def _drain(self) -> None:
        """Add up what training has put into the queue."""
        for _ in range(len(self._queue)):
            one = self._queue.popleft()
            self._step, self._num_steps = one.step, self._num_steps + 1
            self._pace.add(one.step, one.own)
            values = {"busy_s": one.busy_s, "data_wait_s": one.data_s}
            values |= {series("phase_s", phase): spent for phase, spent in one.seconds.items() if phase != "total"}
            values |= {series("exposed_s", axis): spent for axis, spent in one.exposed.items()}
            for name, seconds in values.items():
                self._sums[name] = self._sums.get(name, 0.0) + seconds

    def _report(self) -> dict[str, object]:
        values = self._of_steps()
        values["dropped_figures"] = self._num_dropped
        values |= _read_all(self._of_rank)
        host = _read_all(self._of_host)
        report = {"step": self._step, "values": values, "host": self._host}
        return {**report, "of_host": host} if host else report

    def _of_steps(self) -> dict[str, float]:
        """Means over the steps since the last report."""
        if not self._num_steps:
            return dict(self._last)  # steps that take longer than an interval
        means = {name: total / self._num_steps for name, total in self._sums.items()}
        self._sums, self._num_steps = {}, 0
        self._last = means | self._gained(self._step)
        return dict(self._last)

    def _gained(self, step: int) -> dict[str, float]:
        """What the totals gained per step since the last report."""
        if self._totals is None:
            return {}
        (before_step, before), now = self._totals_before, dict(self._totals())
        self._totals_before = (step, now)
        num_steps = step - before_step
        if num_steps <= 0 or not before_step:
            return {}
        return {name: (total - before.get(name, 0.0)) / num_steps for name, total in now.items()}

    def _event(self, reports: Sequence[Mapping[str, Any]], silent: list[int], now: float) -> dict[str, object]:
        """One event of what all ranks have reported; {} is the report of a silent one."""
        by_figure: dict[str, dict[str, float]] = {}
        for rank, report in enumerate(reports):
            for owner, values in ((f"rank {rank}", "values"), (str(report.get("host")), "of_host")):
                for name, value in report.get(values, {}).items():
                    by_figure.setdefault(name, {})[owner] = value
        busy = by_figure.get("busy_s", {})
        if lags := self._lags(busy, len(reports)):
            by_figure["rank.lag"] = lags
        folded = {name: found.as_json() for name, values in by_figure.items() if (found := fold(values))}
        event: dict[str, object] = {"event": "figures", "step": self._step, "ranks": len(reports)}
        event["over_s"], self._in_one_sentence = round(now - self._in_one_sentence, 3), now
        event["figures"] = {**folded, "rank.silent": len(silent)}
        if len(reports) > 1:
            by_rank = [busy.get(f"rank {rank}") for rank in range(len(reports))]
            event["by_rank"] = {"busy_s": [None if one is None else float(f"{one:.4g}") for one in by_rank]}
        if silent:
            event["silent"] = silent[:64]
        return event

    def _lags(self, busy: Mapping[str, float], number: int) -> dict[str, float]:
        """Each rank's busy seconds over the median of the other ranks that do the same work."""
        found: dict[str, float] = {}
        groups = self._groups or [0] * number
        for group in dict.fromkeys(groups):
            owners = [f"rank {rank}" for rank in range(number) if groups[rank] == group and f"rank {rank}" in busy]
            ordered = sorted(busy[owner] for owner in owners)
            for owner in owners if len(owners) > 1 else ():
                others = median_without(ordered, busy[owner])
                if others > 0:
                    found[owner] = busy[owner] / others
        return found

    def _is_silent(self, rank: int, report: Mapping[str, Any], now: float) -> bool:
        number, since = self._heard.get(rank, (-1, now))
        if report.get("number", -1) != number:
            self._heard[rank] = (report.get("number", -1), now)
            return False
        self._heard.setdefault(rank, (number, now))
        return now - since >= _SILENT_AFTER * self._every_s


def _read_all(readers: list[Reader]) -> dict[str, float]:
    """What all readers give. One that fails is asked no more: a figure is missing, and training goes on."""
    found: dict[str, float] = {}
    for reader in [*readers]:
        try:
            found.update(reader())
        except Exception:
            readers.remove(reader)
    return found


def _parsed(text: str) -> Mapping[str, Any]:
    """A report; {} where a rank left none, or one that is torn."""
    try:
        report = json.loads(text) if text else {}
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
