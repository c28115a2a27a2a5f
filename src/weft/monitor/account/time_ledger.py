"""The ledger of a run: each second of its life under one cause, event by event, over all its starts.

| cause | seconds |
|---|---|
| productive | of steps whose work is in the weights, without what stands below |
| start | from the first event of a start to its first step; its slow first step, where nothing is compiled |
| compile | by which the first step is slower than the others, where the plan compiles |
| data | steps waited for their batches |
| evaluation | evaluations |
| tracing | looking where a step went wrong |
| checkpoint | training waited for saves and for copies in memory |
| lost work | steps that a later start did again, and steps whose update was left out |
| held | from a hold to the next start |
| restart | from the last step of a start that failed to the next start |
| other | the rest: Python between steps, samples, pictures |

The time between an orderly stop and the next command belongs to no cause: the devices were free.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.monitor.events import number

PRODUCTIVE = "productive"
#: In the order of a run's life; "productive" is none of them.
CAUSES = ("start", "compile", "data", "evaluation", "tracing", "checkpoint", "lost work", "held", "restart", "other")
#: Events that the loop writes when it has done something; others come from threads, at any moment.
_OF_THE_LOOP = frozenset({"start", "step", "eval", "trace", "end"})


@dataclass
class TimeLedger:
    """Adds up events in their order; may be asked at any time. first, last: times of its first and last event (s)."""

    first: float = math.nan
    last: float = math.nan
    failures: int = 0
    starts: int = 0
    _seconds: dict[str, float] = field(default_factory=dict)
    _devices: int = 1
    _device_s: float = 0.0
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

    def feed(self, event: Mapping[str, Any]) -> None:
        """Add one event."""
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
        """Add many, and return this ledger."""
        for event in events:
            self.feed(event)
        return self

    def seconds(self) -> dict[str, float]:
        """Return seconds by cause, "productive" first; all causes are there."""
        found = {PRODUCTIVE: self._kept[0], **dict.fromkeys(CAUSES, 0.0)}
        for cause, seconds in self._seconds.items():
            found[cause] += seconds
        found["data"] += self._kept[1]
        # A wait for a save that no gap between two steps holds was inside of a step.
        found[PRODUCTIVE], found["other"] = found[PRODUCTIVE] + min(0.0, found["other"]), max(0.0, found["other"])
        typical = self._typical_step()
        for took, compiles in self._first_steps:
            more = min(max(0.0, took - typical), found[PRODUCTIVE]) if typical else 0.0
            found[PRODUCTIVE] -= more
            found["compile" if compiles else "start"] += more
        return found

    @property
    def wall_s(self) -> float:
        """All seconds that have a cause."""
        return sum(self._seconds.values()) + sum(self._kept)

    @property
    def share(self) -> float:
        """Of the time, what made steps that count; 0 to 1."""
        return self.seconds()[PRODUCTIVE] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def device_s(self) -> float:
        """Seconds times devices, over starts that may have had different numbers of them."""
        return self._device_s

    def _begin(self, event: Mapping[str, Any], when: float) -> None:
        if self._state in ("runs", "failed"):
            # The launcher's word of a failure may be missing: it was killed itself.
            self.failures += self._state == "runs"
            self._spend("restart", when - self._looped)
        elif self._state == "held":
            self._spend("held", when - self._looped)
        elif self._state == "told to go on":
            self._spend("restart", when - self._looped)
        if math.isnan(self.first):
            self.first = when
        devices = event.get("world_size")
        self._forget_beyond(_step_of(event) or 0)
        self._devices = devices if type(devices) is int and 0 < devices < 2**31 else 1
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
            self._looped, self._state = when, "told to go on"
        elif kind == "action" and event.get("action") == "hold":
            self._state = "will be held"
        elif kind in ("checkpoint", "copy"):
            stall = number(event.get("stall_s", 0.0))
            # The wait came between two events of the loop, or comes before the next one.
            if math.isfinite(stall) and stall > 0:
                self._seconds["checkpoint"] = self._seconds.get("checkpoint", 0.0) + stall
                self._seconds["other"] = self._seconds.get("other", 0.0) - stall

    def _add_step(self, event: Mapping[str, Any], took: float) -> None:
        # Called for each step of logs with millions of them: nothing here is more general than it must be.
        parts = event.get("seconds")
        total = data = 0.0
        if isinstance(parts, dict):
            total, data = parts.get("total", 0.0), parts.get("data", 0.0)
            total = total if type(total) is float else number(total)
            data = data if type(data) is float else number(data)
        if not 0 < total < took:  # nan too
            total = took
        if not data > 0:
            data = 0.0
        elif data > total:
            data = total if data < math.inf else 0.0
        if took > total:
            self._spend("start" if self._waits_for_first else "other", took - total)
        self._device_s += total * self._devices
        if self._waits_for_first:
            self._first_steps.append((total - data, self._compiles))
            self._waits_for_first = False
        step = _step_of(event)
        if event.get("skipped") or step is None:
            self._seconds["lost work"] = self._seconds.get("lost work", 0.0) + total
            return
        if self._step and self._step[-1] >= step:
            self._forget_beyond(step - 1)
        self._step.append(step)
        self._work.append(total - data)
        self._data.append(data)
        self._kept[0] += total - data
        self._kept[1] += data

    def _forget_beyond(self, step: int) -> None:
        """What was done beyond this step is done again."""
        while self._step and self._step[-1] > step:
            self._step.pop()
            work, data = self._work.pop(), self._data.pop()
            self._kept[0] -= work
            self._kept[1] -= data
            self._seconds["lost work"] = self._seconds.get("lost work", 0.0) + work + data

    def _spend(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
            self._device_s += seconds * self._devices

    def _typical_step(self) -> float:
        """The median of a step's work; of the last thousands of a long run."""
        count = len(self._work)
        if count < 3:
            return 0.0
        if not self._typical[0] or count >= self._typical[0] * 1.1 or count < self._typical[0]:
            self._typical = (count, float(statistics.median(self._work[-10_000:])))
        return self._typical[1]


def _step_of(event: Mapping[str, Any]) -> int | None:
    step = event.get("step")
    return step if type(step) is int and abs(step) < 2**62 else None
