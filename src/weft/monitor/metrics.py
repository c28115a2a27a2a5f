"""Metrics of a run: collection from all ranks, reduction over ranks (folding), and reading from events."""

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

from weft.config.metrics import METRICS, series, split_series
from weft.monitor.events import number
from weft.monitor.stragglers import Advisor, StragglerWatch, median_without


@dataclass(frozen=True, slots=True)
class Fold:
    """Minimum, median and maximum of a metric over ranks or machines.

    `at_min` and `at_max` name the ranks or machines with the extremes, such as "rank 3".
    """

    min: float
    median: float
    max: float
    at_min: str
    at_max: str

    def as_json(self) -> list[object]:
        """Return the form in events: [minimum, median, maximum, owner of the minimum, owner of the maximum]."""
        return [*(_short(value) for value in (self.min, self.median, self.max)), self.at_min, self.at_max]


def fold(values: Mapping[str, float]) -> Fold | None:
    """Combine a metric's values by owner (rank or machine) into one `Fold`. Return None if no value is a number.

    If several owners have the same extreme, the first one is named.
    """
    known = {owner: value for owner, value in values.items() if not math.isnan(value)}
    if not known:
        return None
    low = min(known, key=lambda owner: known[owner])
    high = max(known, key=lambda owner: known[owner])
    return Fold(known[low], statistics.median(known.values()), known[high], low, high)


def _short(value: float) -> float | int:
    """Round to six significant digits, and return integral values as int, because users read the log too."""
    if not math.isfinite(value):
        return value
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")


# Metrics in events, for all readers of events.jsonl (sinks, alerts, the dashboard).

#: Fields of an evaluation event that are not metrics.
_OF_EVALUATION = frozenset({"event", "time", "step", "loss"})


@dataclass(frozen=True, slots=True)
class MetricReading:
    """Value of a metric at one time. `label` distinguishes values of the same metric, such as the phases of "phase_s".

    Attributes:
        value: the number, or the median over ranks.
        low, high: minimum and maximum over ranks, else equal to the value.
        at_low, at_high: ranks or machines with these extremes, such as "rank 3", or "" for a metric of the run.
        step: the event's step, or None.
        time: in seconds since 1970.
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
        """Name of the metric with the label, such as "phase_s{forward}"."""
        return series(self.name, self.label)


def readings(event: Mapping[str, Any]) -> Iterator[MetricReading]:
    """Yield the metrics of an event. Unknown metrics are ignored."""
    step, time = event.get("step"), number(event.get("time"))
    at = (step if type(step) is int else None, time)
    for text, value in _values(event):
        try:
            name, label = split_series(text)
        except ValueError:
            continue
        if name not in METRICS:
            continue
        if isinstance(value, list):
            if len(parts := cast(list[Any], value)) == 5:
                low, middle, high = (number(one) for one in parts[:3])
                yield MetricReading(name, label, middle, low, high, str(parts[3]), str(parts[4]), *at)
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            found = number(value)
            if not math.isnan(found) or value == "nan":
                yield MetricReading(name, label, found, found, found, "", "", *at)


def _values(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = event.get("event")
    if kind == "step":
        yield from _of_step(event)
    elif kind == "eval":
        yield "eval.loss", event.get("loss")
        yield from (
            (series("eval.metric", key), value)
            for key, value in event.items()
            if key not in _OF_EVALUATION and (isinstance(value, float) or value in ("nan", "inf", "-inf"))
        )
    elif kind in ("figures", "energy"):
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
    # Counts are named by their unit: tokens_per_s, points_per_s.
    speed = next((key for key in event if key.endswith("_per_s") and key != "samples_per_s"), "samples_per_s")
    yield "tokens_per_s", event.get(speed)
    yield "step_s", seconds.get("total")


def _table(value: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


# A rank's own work per step, without its waits for others. Rank 0 compares it between ranks.

#: Steps per report: enough to compare, while reports stay small.
_MOST = 8
_MICRO = 1e6


class PaceWriter:
    """Collects this rank's times of at most 8 steps for the next report.

    If there are more steps, only multiples of a power of two are kept. So if some ranks have done more steps, the steps
    of one rank are still a subset of another's, and can be compared.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Mapping[str, float]] = {}
        self._stride = 1

    def add(self, step: int, own: Mapping[str, float]) -> None:
        """Add the seconds that this rank spent on its own work in a step, by part."""
        if step % self._stride:
            return
        self._steps[step] = own
        while len(self._steps) > _MOST:
            self._stride *= 2
            self._steps = {one: parts for one, parts in self._steps.items() if one % self._stride == 0}

    def take(self) -> dict[str, object]:
        """Return the report of the steps and reset, or return {} if there were no steps.

        "steps" holds the microseconds of each step, "parts" the mean seconds per step by part.
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


# A thread on each rank that reads and reports metrics. On rank 0 it combines the reports of all ranks.

#: Maximum number of queued steps. It suffices for more than a second of steps of 1 ms.
_MOST_QUEUED = 2048
#: Poll interval (s) of the thread.
_TICK_S = 0.25
#: A rank is silent after this many intervals without a new report.
_SILENT_AFTER = 3
#: Maximum interval (s) between two pace reports of a rank, so that a slow rank is named within half a minute.
_PACE_S = 5.0


class ReportChannel(Protocol):
    """Channel for the ranks' reports, which only rank 0 reads."""

    def post(self, text: str) -> None:
        """Replace this rank's report."""
        ...

    def read(self) -> Sequence[str]:
        """Return the newest report of every rank, or "" for a rank without one."""
        ...


class LocalReports:
    """The report channel of a single rank."""

    def __init__(self) -> None:
        self._text = ""

    def post(self, text: str) -> None:
        """Replace the report."""
        self._text = text

    def read(self) -> Sequence[str]:
        """Return the report."""
        return [self._text]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics that training queues after a step: seconds by phase, and waits for other ranks by axis.

    `own` has the seconds of the rank's own work by part, without its waits for others.
    """

    step: int
    seconds: Mapping[str, float]
    exposed: Mapping[str, float] = field(default_factory=dict)
    busy_s: float = 0.0
    data_s: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)


#: Function that returns metrics of a rank or machine, by name with label.
Reader = Callable[[], Mapping[str, float]]


class StepMeans:
    """Means of the metrics of a rank's steps since the last report."""

    def __init__(self, totals: Reader | None):
        self.step = 0
        self._totals = totals
        self._num_steps = 0
        self._sums: dict[str, float] = {}
        self._totals_before: tuple[int, Mapping[str, float]] = (0, {})
        self._last: dict[str, float] = {}

    def add(self, one: StepReport) -> None:
        """Add a step."""
        self.step, self._num_steps = one.step, self._num_steps + 1
        values = {"busy_s": one.busy_s, "data_wait_s": one.data_s}
        values |= {series("phase_s", phase): spent for phase, spent in one.seconds.items() if phase != "total"}
        values |= {series("exposed_s", axis): spent for axis, spent in one.exposed.items()}
        for name, seconds in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the means and reset, or the last means if no step has ended since."""
        if self._num_steps:
            self._last = {name: total / self._num_steps for name, total in self._sums.items()} | self._gained()
            self._sums, self._num_steps = {}, 0
        return dict(self._last)

    def _gained(self) -> dict[str, float]:
        """Return the increase of the totals per step since the last report, or {} in the first report."""
        if self._totals is None:
            return {}
        (before_step, before), now = self._totals_before, dict(self._totals())
        self._totals_before = (self.step, now)
        num_steps = self.step - before_step
        if num_steps <= 0 or not before_step:
            return {}
        return {name: (total - before.get(name, 0.0)) / num_steps for name, total in now.items()}


class ReportJoiner:
    """Combines the reports of all ranks into events, on rank 0.

    Args:
        every_s: seconds between reports.
        publish: called with the combined event.
        groups, on_slow, clock, advisor: as in `Collector`.
    """

    def __init__(
        self,
        every_s: float,
        publish: Callable[[Mapping[str, object]], None],
        groups: Sequence[int],
        on_slow: Callable[[Mapping[str, object]], None] | None,
        clock: Callable[[], float],
        advisor: Advisor | None = None,
    ):
        self._advisor = advisor
        self._silent_s, self._publish, self._groups, self._on_slow = _SILENT_AFTER * every_s, publish, groups, on_slow
        self._clock, self._published = clock, clock()
        self._stragglers: StragglerWatch | None = None
        self._received: dict[int, tuple[int, float]] = {}  # by rank: number of the newest report, and its time
        self._energy: dict[int, tuple[float, float]] = {}  # by rank that reads a machine's meters: all and estimated J
        self._num_missing: dict[int, float] = {}  # by these ranks: number of devices without a meter

    def join(self, reports: Sequence[Mapping[str, Any]], step: int, pace_only: bool) -> None:
        """Publish the combined event, and events about slow ranks. If `pace_only`, publish only the latter."""
        now, silent = self._clock(), list[int]()
        for rank, report in enumerate(reports):
            number, since = self._received.get(rank, (-1, now))
            is_new = report.get("number", -1) != number
            self._received[rank] = (report.get("number", -1), now) if is_new else (number, since)
            if not is_new and now - since >= self._silent_s:
                silent.append(rank)
        present = [{} if rank in silent else report for rank, report in enumerate(reports)]
        if len(reports) > 1 and self._on_slow is not None:
            if self._stragglers is None:
                self._stragglers = StragglerWatch(self._groups or [0] * len(reports), self._advisor)
            for event in self._stragglers.observe(present):
                self._on_slow(event)
        if not pace_only:
            self._publish(self._event(present, silent, step, now))
            self._published = now

    def _event(
        self, reports: Sequence[Mapping[str, Any]], silent: list[int], step: int, now: float
    ) -> dict[str, object]:
        """Return one event from the reports of all ranks. The report of a silent rank is {}."""
        by_metric: dict[str, dict[str, float]] = {}
        for rank, report in enumerate(reports):
            for owner, values in ((f"rank {rank}", "values"), (str(report.get("host")), "of_host")):
                for name, value in report.get(values, {}).items():
                    by_metric.setdefault(name, {})[owner] = value
        busy = by_metric.get("busy_s", {})
        if lags := self._lags(busy, len(reports)):
            by_metric["rank.lag"] = lags
        folded = {name: found.as_json() for name, values in by_metric.items() if (found := fold(values))}
        event: dict[str, object] = {"event": "figures", "step": step, "ranks": len(reports)}
        event |= {"over_s": round(now - self._published, 3), "figures": {**folded, "rank.silent": len(silent)}}
        if len(reports) > 1:
            by_rank = [busy.get(f"rank {rank}") for rank in range(len(reports))]
            event["by_rank"] = {"busy_s": [None if one is None else float(f"{one:.4g}") for one in by_rank]}
        if silent:
            event["silent"] = silent[:64]
        return event | self._others_energy(reports)

    def _others_energy(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, object]:
        """Return joules, metered machines and unmeasured devices of all machines except rank 0's, {} without a report.

        A machine that is silent keeps its last values.
        """
        for rank, report in enumerate(reports):
            values = report.get("of_host", {})
            if rank and "host.energy_missing" in values:
                self._num_missing[rank] = values["host.energy_missing"]
            if rank and "host.energy_joules" in values:
                self._energy[rank] = (values["host.energy_joules"], values.get("host.energy_estimated_j", 0.0))
        if not self._num_missing:
            return {}
        found: dict[str, object] = {"energy_others": [len(self._energy), int(sum(self._num_missing.values()))]}
        if not self._energy:
            return found
        total, estimated = (sum(parts) for parts in zip(*self._energy.values(), strict=True))
        return {**found, "energy_others_j": round(total, 3), "estimated_others_j": round(estimated, 3)}

    def _lags(self, busy: Mapping[str, float], number: int) -> dict[str, float]:
        """Return each rank's busy seconds divided by the median of the other ranks that do the same work."""
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


class Collector(threading.Thread):
    """Thread that reads and reports the metrics of one rank.

    Args:
        host: name of the rank's machine.
        board: channel for the reports.
        every_s: seconds between events. Ranks report at this interval, and the times of single steps (`PaceWriter`) at
            least every 5 s.
        of_rank: readers of metrics of this rank. A reader that fails is not called again.
        of_host: readers of metrics of its machine, likewise.
        totals: returns cumulative metrics. Their increase per step is reported.
        publish: on rank 0, called with the event of all ranks.
        groups: a number for each rank that is equal for ranks that do the same work; () if all do.
        on_slow: on rank 0, called with an event when a rank becomes slow or recovers.
        clock: seconds since 1970, for tests.
        advisor: on rank 0, proposes what to do about a slow rank.
    """

    def __init__(
        self,
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
        advisor: Advisor | None = None,
    ):
        super().__init__(name="weft-figures", daemon=True)
        self._host, self._board, self._every_s = host, board, every_s
        self._of_rank, self._of_host = [*of_rank], [*of_host]
        self._joiner = None if publish is None else ReportJoiner(every_s, publish, groups, on_slow, clock, advisor)
        self._means, self._pace, self._newest = StepMeans(totals), PaceWriter(), dict[str, object]()
        self._queue: deque[StepReport] = deque()
        self._num_dropped = self._number = 0
        self._end = threading.Event()
        #: The last error. Errors here do not stop training.
        self.trouble = ""

    def put(self, metrics: StepReport) -> None:
        """Add a step's metrics to the queue, or drop them if it is full. Never waits."""
        if len(self._queue) >= _MOST_QUEUED:
            self._num_dropped += 1
        else:
            self._queue.append(metrics)

    def close(self) -> None:
        """Send a last report and end the thread, which is waited for at most 5 s."""
        self._end.set()
        if self.is_alive():
            self.join(5.0)

    def run(self) -> None:
        """Send reports until `close`. This is the thread's main function."""
        due = pace_due = time.monotonic()
        while not self._end.wait(min(_TICK_S, self._every_s)):
            self._drain()
            now = time.monotonic()
            if now >= due + self._every_s:
                due = pace_due = now
                self.send_report()
            elif now >= pace_due + _PACE_S:
                pace_due = now
                self.send_report(pace_only=True)
        self.send_report()

    def send_report(self, *, pace_only: bool = False) -> None:
        """Send this rank's report. On rank 0, publish the reports of all ranks.

        Args:
            pace_only: send the last report again with new times of single steps, and publish only events about slow
                ranks.
        """
        try:
            self._drain()
            if not pace_only or not self._newest:
                values = self._means.take() | {"dropped_figures": self._num_dropped} | _read_all(self._of_rank)
                host = _read_all(self._of_host)
                report = {"step": self._means.step, "values": values, "host": self._host}
                self._newest = {**report, "of_host": host} if host else report
            self._number += 1
            pace = self._pace.take()
            self._board.post(json.dumps({**self._newest, "number": self._number, **({"pace": pace} if pace else {})}))
            if self._joiner is not None:
                self._joiner.join([_parsed(text) for text in self._board.read()], self._means.step, pace_only)
        except Exception as error:  # If the store is gone or the disk is full, training reports it.
            self.trouble = f"{type(error).__name__}: {error}"

    def _drain(self) -> None:
        for _ in range(len(self._queue)):
            one = self._queue.popleft()
            self._means.add(one)
            self._pace.add(one.step, one.own)


def _read_all(readers: list[Reader]) -> dict[str, float]:
    """Return the metrics of all readers. A reader that fails is removed, and training continues without it."""
    found: dict[str, float] = {}
    for reader in [*readers]:
        try:
            found.update(reader())
        except Exception:
            readers.remove(reader)
    return found


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        report = json.loads(text) if text else {}
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
