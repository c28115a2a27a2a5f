"""Accounting of a run: its time by cause, goodput, the best checkpoint interval, and the price of devices."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import ConfigError
from weft.monitor.energy_ledger import EnergyLedger, EnergySummary
from weft.monitor.events import number, step_of
from weft.units import counted, format_seconds, parse_price

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Price:
    """Price of one device for one second. `currency` is three capital letters."""

    per_s: float
    currency: str

    @classmethod
    def parse(cls, text: str) -> Price:
        """Parse a price such as "2.5usd/h" or "$30/d".

        Raises:
            ConfigError: if the text is not a price.
        """
        parsed = parse_price(text)
        if parsed is None or parsed[2] not in _SECONDS:
            raise ConfigError(
                f"price={text}: a price is a number, a currency and a time, for one device. Use such as 2.5usd/h."
            )
        amount, currency, time = parsed
        return cls(amount / _SECONDS[time], currency)

    def of(self, device_s: float) -> float:
        """Return the cost of `device_s` seconds of one device."""
        return self.per_s * device_s

    def text(self, device_s: float) -> str:
        """Return the cost as text, such as "12.50 USD"."""
        return f"{self.of(device_s):,.2f} {self.currency}"


# Ledger of a run: each second of all its starts is attributed to one cause.

PRODUCTIVE = "productive"
#: Causes of unproductive time, in the order in which they occur in a run.
CAUSES = ("start", "compile", "data", "evaluation", "tracing", "checkpoint", "lost work", "held", "restart", "other")
#: Events that the training loop writes after an operation. Other events are written by threads at any time.
_OF_THE_LOOP = frozenset({"start", "step", "eval", "trace", "end"})


@dataclass
class TimeLedger:
    """Attributes a run's time to causes, from its events in order. Results can be read after any event.

    Attributes:
        first, last: Unix times (s) of the first start and of the latest event after it; nan before the first start.
        failures, starts: numbers so far.
        device_s: attributed seconds times number of devices, which may differ between starts.
        energy: energy by the same causes; `joules` has the result.
    """

    first: float = math.nan
    last: float = math.nan
    failures: int = 0
    starts: int = 0
    _seconds: dict[str, float] = field(default_factory=dict)
    _devices: int = 1
    device_s: float = 0.0
    energy: EnergyLedger = field(default_factory=EnergyLedger)
    _step: array[int] = field(default_factory=lambda: array("q"))
    _work: array[float] = field(default_factory=lambda: array("d"))
    _data: array[float] = field(default_factory=lambda: array("d"))
    _kept: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _first_steps: list[tuple[float, bool]] = field(default_factory=list)
    _looped: float = math.nan
    _compiles: bool = False
    _waits_for_first: bool = False
    _state: str = ""
    _typical: tuple[int, float] = (0, 0.0)
    _config: object = None

    def feed(self, event: Mapping[str, Any]) -> None:
        """Add one event. Events before the first "start", events without a finite time, and "resume" are ignored."""
        kind, when = event.get("event"), number(event.get("time"))
        if not math.isfinite(when) or kind == "resume":
            return
        if kind == "start":
            self._begin(event, when)
        elif self.starts:
            self._go_on(str(kind), event, when)
        if self.starts:
            self.last = when if math.isnan(self.last) else max(self.last, when)

    def feed_all(self, events: Iterable[Mapping[str, Any]]) -> TimeLedger:
        """Add many events and return this ledger."""
        for event in events:
            self.feed(event)
        return self

    def seconds(self) -> dict[str, float]:
        """Return the seconds by cause, "productive" first, including causes with 0."""
        found = {PRODUCTIVE: self._kept[0], **dict.fromkeys(CAUSES, 0.0)}
        for cause, seconds in self._seconds.items():
            found[cause] += seconds
        found["data"] += self._kept[1]
        # A wait for a save that is not in a gap between steps happened inside a step.
        found[PRODUCTIVE], found["other"] = found[PRODUCTIVE] + min(0.0, found["other"]), max(0.0, found["other"])
        for cause, more in self._first_step_extra():
            more = min(more, found[PRODUCTIVE])
            found[PRODUCTIVE] -= more
            found[cause] += more
        return found

    def joules(self) -> dict[str, float]:
        """Return the joules by cause, {} if no energy was measured or estimated."""
        extra = zip(self._first_step_extra(), self._first_steps, strict=True)
        return self.energy.joules((cause, more / took if took > 0 else 0.0) for (cause, more), (took, _) in extra)

    def energy_summary(self) -> EnergySummary:
        """Return energy, cost and CO2 under the settings of the last start."""
        return EnergySummary.of(self.energy, self.joules(), self._config)

    def _first_step_extra(self) -> list[tuple[str, float]]:
        """Return the cause of each start's slow first step, and its seconds beyond a typical step."""
        typical = self._typical_step()
        return [
            ("compile" if compiles else "start", max(0.0, took - typical) if typical else 0.0)
            for took, compiles in self._first_steps
        ]

    @property
    def wall_s(self) -> float:
        """Sum of all attributed seconds."""
        return sum(self._seconds.values()) + sum(self._kept)

    @property
    def share(self) -> float:
        """Productive share of `wall_s`, 0 to 1."""
        return self.seconds()[PRODUCTIVE] / self.wall_s if self.wall_s > 0 else 0.0

    def _begin(self, event: Mapping[str, Any], when: float) -> None:
        # The launcher's failure event may be missing, because the launcher was killed too.
        self.failures += self._state == "runs"
        if self._state in ("runs", "failed", "held", "request to continue"):
            self._spend("held" if self._state == "held" else "restart", when - self._looped)
        if math.isnan(self.first):
            self.first = when
        devices = event.get("world_size")
        self._forget_beyond(step_of(event) or 0)
        self._devices = devices if type(devices) is int and 0 < devices < 2**31 else 1
        self.energy.begin()
        self._config = event.get("config")
        self._compiles = "compile" in str(event.get("plan", ""))
        self._state, self._looped, self._waits_for_first = "runs", when, True
        self.starts += 1

    def _go_on(self, kind: str, event: Mapping[str, Any], when: float) -> None:
        if kind in _OF_THE_LOOP:
            took = max(0.0, when - self._looped)
            self._looped = max(self._looped, when)
            if kind == "step":
                self._add_step(event, took)
            else:
                self._spend({"eval": "evaluation", "trace": "tracing"}.get(kind, "other"), took)
            if kind == "end":
                self._state = "held" if self._state == "will be held" else "ended"
        elif kind == "failure":
            self.failures += 1
            self._state = "failed"
        elif kind == "held":
            self._spend("other" if self._state in ("ended", "held") else "restart", when - self._looped)
            self._looped, self._state = when, "held"
        elif kind == "go_on":
            self._spend("held", when - self._looped)
            self._looped, self._state = when, "request to continue"
        elif kind == "action" and event.get("action") == "hold":
            self._state = "will be held"
        elif kind in ("checkpoint", "copy"):
            stall = number(event.get("stall_s", 0.0))
            # The wait belongs to the time between the loop's last event and its next one.
            if math.isfinite(stall) and stall > 0:
                self._seconds["checkpoint"] = self._seconds.get("checkpoint", 0.0) + stall
                self._seconds["other"] = self._seconds.get("other", 0.0) - stall
                self.energy.spend("checkpoint", stall)
                self.energy.spend("other", -stall)
        elif kind in ("energy", "figures"):
            self.energy.feed(event)

    def _add_step(self, event: Mapping[str, Any], took: float) -> None:
        # This runs for each step of logs with millions of steps, so it is optimized for speed.
        parts = event.get("seconds")
        total = data = 0.0
        if isinstance(parts, dict):
            total, data = parts.get("total", 0.0), parts.get("data", 0.0)
            total = total if type(total) is float else number(total)
            data = data if type(data) is float else number(data)
        if not 0 < total < took:  # nan too
            total = took
        data = min(data, total) if 0 < data < math.inf else 0.0
        if took > total:
            self._spend("start" if self._waits_for_first else "other", took - total)
        self.device_s += total * self._devices
        is_first = self._waits_for_first
        if self._waits_for_first:
            self._first_steps.append((total - data, self._compiles))
            self._waits_for_first = False
        step = step_of(event)
        if event.get("skipped") or step is None:
            self._seconds["lost work"] = self._seconds.get("lost work", 0.0) + total
            self.energy.add_skipped_step(total, is_first=is_first)
            return
        if self._step and self._step[-1] >= step:
            self._forget_beyond(step - 1)
        self._step.append(step)
        self._work.append(total - data)
        self._data.append(data)
        self._kept[0] += total - data
        self._kept[1] += data
        self.energy.add_step(total - data, data, event, is_first=is_first)

    def _forget_beyond(self, step: int) -> None:
        while self._step and self._step[-1] > step:
            self._step.pop()
            work, data = self._work.pop(), self._data.pop()
            self._kept[0] -= work
            self._kept[1] -= data
            self._seconds["lost work"] = self._seconds.get("lost work", 0.0) + work + data
        self.energy.forget_beyond(len(self._step))

    def _spend(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
            self.device_s += seconds * self._devices
            self.energy.spend(cause, seconds)

    def _typical_step(self) -> float:
        """Return the median time of a step without its wait for data, over the last 10,000 steps; 0 below three steps.

        The median is computed again if the number of steps has grown by a tenth or has decreased.
        """
        count = len(self._work)
        if count < 3:
            return 0.0
        if not self._typical[0] or count >= self._typical[0] * 1.1 or count < self._typical[0]:
            self._typical = (count, float(statistics.median(self._work[-10_000:])))
        return self._typical[1]


# Goodput: the productive share of a run's time, the losses, and the best save interval.


@dataclass(frozen=True, slots=True)
class Goodput:
    """Productive and lost seconds of a run, over all its starts.

    Attributes:
        wall_s: time from the first start to the last event, without pauses and without the time between an orderly stop
            and the next start.
        steps_s: productive time, as in `TimeLedger`: steps that were not discarded, without their waits for data.
        redone_s: time of steps that were done again or discarded.
        stalls_s: time that training waited for saves and copies in memory.
        away_s: time from the last event of a failed start to the next start.
        failures: number of failed starts that were followed by another start.
        stall_s, step_s: median wait for a save, and median time of a step; 0 if there was none.
    """

    wall_s: float = 0.0
    steps_s: float = 0.0
    redone_s: float = 0.0
    stalls_s: float = 0.0
    away_s: float = 0.0
    failures: int = 0
    stall_s: float = 0.0
    step_s: float = 0.0

    @property
    def share(self) -> float:
        """Productive share of `wall_s`, 0 to 1."""
        return self.steps_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def between_failures_s(self) -> float:
        """Mean time (s) between failures; infinite without failures."""
        return self.wall_s / self.failures if self.failures else math.inf

    def best_every(self) -> int | None:
        """Return the number of steps between saves that loses the least time.

        Return None without failures, if saves did not stall training, or without steps.
        """
        if not self.failures or self.stall_s <= 0 or self.step_s <= 0:
            return None
        return max(1, round(best_interval(self.stall_s, self.between_failures_s) / self.step_s))

    def lines(self, every: int) -> list[str]:
        """Return the lines that report the goodput at the end of a run, or [] without failures.

        every: number of steps between the run's saves.
        """
        if not self.failures:
            return []
        lost = {"steps done again": self.redone_s, "starting again": self.away_s, "waiting for saves": self.stalls_s}
        parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in lost.items() if seconds > 0)
        head = f"goodput {self.share:.0%} of {format_seconds(self.wall_s)} made steps that count"
        lines = [f"{head}; {counted(self.failures, 'failure')}: {parts}"]
        if (best := self.best_every()) is not None:
            lines.append(
                f"        checkpoint.every={best} would have cost least (now {every}): a save stalls training for "
                f"{format_seconds(self.stall_s)}, and a failure came every {format_seconds(self.between_failures_s)}"
            )
        return lines


def best_interval(stall_s: float, between_failures_s: float) -> float:
    """Return the interval (s) between saves that minimizes the time lost to saves and repeated steps.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, equation 37. Its
    first term is Young's sqrt(2 stall M) of 1974. `stall_s` is the cost of one save.
    """
    if stall_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = stall_s / (2 * between_failures_s)
    return math.sqrt(2 * stall_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def goodput(events: Iterable[Mapping[str, Any]]) -> Goodput:
    """Compute the goodput of a run from the events of its events.jsonl.

    A start has failed if it has no "end" event, or a "failure" event after it. So a failure counts even if the launcher
    was killed before it could record it, but only once another start follows.
    """
    ledger = TimeLedger()
    kept: dict[int, float] = {}
    all_steps, stalls = [0.0], [0.0]
    wall = away = last = copies = 0.0
    failures, in_order, begun = 0, True, False
    for event in events:
        ledger.feed(event)
        kind, when = event.get("event"), number(event.get("time"))
        if kind == "resume" or not math.isfinite(when):
            continue  # the next start writes "resume" just before its "start"
        if kind == "go_on":
            last = when  # the time of a pause is not lost time
            continue
        if kind == "start":
            if begun and not in_order:
                failures += 1
                gap = max(0.0, when - last)
                away, wall = away + gap, wall + gap
            kept = {step: seconds for step, seconds in kept.items() if step <= int(event["step"])}
            begun, in_order = True, False
        elif begun:
            wall += max(0.0, when - last)
            in_order = kind == "end" or (in_order and kind != "failure")
        if kind == "step":
            seconds = number(event.get("seconds", {}).get("total", 0.0))
            kept[int(event["step"])] = seconds
            all_steps.append(seconds)
        elif kind == "checkpoint":
            stalls.append(number(event.get("stall_s", 0.0)))
        elif kind == "copy":
            copies += number(event.get("stall_s", 0.0))
        last = when
    saves, steps = stalls[1:] or [0.0], all_steps[1:] or [0.0]
    return Goodput(
        wall_s=wall,
        steps_s=ledger.seconds()[PRODUCTIVE],
        redone_s=sum(all_steps) - sum(kept.values()),
        stalls_s=sum(stalls) + copies,
        away_s=away,
        failures=failures,
        stall_s=statistics.median(saves),
        step_s=statistics.median(steps),
    )
