"""Times of a step by phase, throughput, memory, and a run's time by kind.

On a GPU, CUDA events are recorded at the start and the end of a phase, without synchronization. The times are read from
the events later, when these have usually completed.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from weft.planner.report.pictures import Bar, draw_bars, fits

#: Number of steps over which the throughput is averaged.
_WINDOW = 20
#: Maximum number of phases of one step.
_MAX_SPANS = 4096


class StepClock(Protocol):
    """Clock of a device. `mark` records a point in its work; `seconds_between` returns the time between two."""

    def mark(self) -> Any: ...

    def seconds_between(self, start: Any, end: Any) -> float: ...


class HostClock:
    """Clock for devices whose calls are synchronous. A mark is the value of perf_counter."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


class StreamClock:
    """Clock of a device with streams. A mark is an event in its current stream; reading seconds waits for it."""

    def __init__(self, device: object):
        import torch

        from weft.devices import access

        self._access, self._device = access, torch.device(str(device))

    def mark(self) -> Any:
        return self._access.record_event(self._device, timed=True)

    def seconds_between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


def clock_of(device: object) -> StepClock:
    """Return the clock of a device: "cpu", "cuda:0" or a torch.device."""
    if str(device) == "cpu":
        return HostClock()
    import torch

    from weft.devices import access

    here = torch.device(str(device))
    return StreamClock(here) if access.has_streams(here) else HostClock()


class Communication(Protocol):
    """Measures how long computation waited for other ranks, such as `weft.comm.ledger.Ledger`."""

    def mark(self) -> Any:
        """Return a mark of the current time without waiting."""
        ...

    def seconds_between(self, start: Any, end: Any) -> Mapping[str, float]:
        """Return the seconds by axis between two marks. May wait for the device."""
        ...


class StepTimes:
    """Times of one step. They are read from the clock on first access, which may wait for the device.

    Args:
        before: mark of the end of the previous step; None for the first.
        start, end: marks of this step.
        spans: phase, start and end as marks of the clock, and the marks of `communication` at start and end, or None.
        clock: converts marks to seconds.
        communication: converts its marks to seconds of waiting for other ranks.
    """

    def __init__(
        self,
        before: Any,
        start: Any,
        end: Any,
        spans: list[tuple[str, Any, Any, Any]],
        clock: StepClock,
        communication: Communication | None = None,
    ):
        self._before, self._start, self._end = before, start, end
        self._spans = spans
        self._clock = clock
        self._communication = communication

    @cached_property
    def total_s(self) -> float:
        """Seconds from the step's start to its end on the device, including all work that the step queued."""
        return self._clock.seconds_between(self._start, self._end)

    @cached_property
    def gap_s(self) -> float:
        """Seconds on the device from the end of the previous step to the start of this one; infinite for the first."""
        return math.inf if self._before is None else self._clock.seconds_between(self._before, self._start)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order in which phases began. Repeated phases are summed."""
        seconds: dict[str, float] = {}
        for name, start, end, _ in self._spans:
            seconds[name] = seconds.get(name, 0.0) + self._clock.seconds_between(start, end)
        return seconds

    @cached_property
    def exposed(self) -> dict[str, dict[str, float]]:
        """Seconds that computation waited for other ranks (exposed communication), by phase and axis."""
        found: dict[str, dict[str, float]] = {}
        for name, _, _, marks in self._spans:
            if self._communication is not None:
                inside = found.setdefault(name, {})
                for axis, seconds in self._communication.seconds_between(*marks).items():
                    inside[axis] = inside.get(axis, 0.0) + seconds
        return found

    def spans(self) -> list[tuple[str, float, float]]:
        """Return (phase, start, end) of each measured span, in seconds from the start of the first."""
        if not self._spans:
            return []
        zero, between = self._spans[0][1], self._clock.seconds_between
        return [(name, between(zero, start), between(zero, end)) for name, start, end, _ in self._spans]


class Meter:
    """Measures the times of one rank's steps.

    A step lasts from `begin_step` (or the previous `end_step`, if it was not called) to `end_step`, so evaluation and
    saving before `begin_step` do not count. On a GPU, times are measured on the device.

    Args:
        device: "cpu", "cuda:0" or a torch.device.
        clock: for tests; None uses the device's clock.
        communication: measures the waits for other ranks in each phase separately.
    """

    def __init__(
        self, device: object = "cpu", *, clock: StepClock | None = None, communication: Communication | None = None
    ):
        self._communication = communication
        self._clock = clock or clock_of(device)
        # Bounded, because end_step is not called if a user calls the step without a loop.
        self._spans: deque[tuple[str, Any, Any, Any]] = deque(maxlen=_MAX_SPANS)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._began = self._clock.mark()
        self._ended: Any = None

    def begin_step(self) -> None:
        """Start the step's time now, and drop phases measured since the last step."""
        self._spans.clear()
        self._began = self._clock.mark()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a part of the step. Phases may repeat and may be nested."""
        known = self._communication
        before = known.mark() if known else None
        start = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((name, start, self._clock.mark(), (before, known.mark()) if known else None))

    def end_step(self) -> StepTimes:
        """End the step without waiting. Call `count` later with the number of trained items."""
        end = self._clock.mark()
        times = StepTimes(self._ended, self._began, end, list(self._spans), self._clock, self._communication)
        self._spans.clear()
        self._began = self._ended = end
        return times

    def count(self, times: StepTimes, number: int) -> None:
        """Record the number of tokens or samples that a step trained, over all ranks. Waits for the step's end."""
        self._recent.append((number, times.total_s))

    @property
    def count_per_s(self) -> float:
        """Throughput: tokens or samples per second over the last steps; 0 before the first step."""
        total_s = sum(seconds for _, seconds in self._recent)
        return sum(count for count, _ in self._recent) / total_s if total_s > 0 else 0.0


def memory_bytes(device: object = "cpu") -> tuple[int, int]:
    """Return (current, peak) bytes of torch's allocator on an accelerator, or of this process's resident memory."""
    if str(device) != "cpu":
        import torch

        from weft.devices import access

        if (found := access.allocated_bytes(torch.device(str(device)))) is not None:
            return found
    import resource

    import psutil

    # Kilobytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    now = psutil.Process().memory_info().rss
    return now, max(now, peak)


# A run's time by kind of work: seconds of each rank, as text, as a chart, and as a trace.

#: Number of last steps that `TimeBook.typical` averages.
_TYPICAL = 200
#: Kind of work of each phase of a step, for its time without communication.
_KINDS = {
    "forward": "compute", "backward": "compute", "forward and backward": "compute", "weight gradients": "compute",
    "wait": "stages",
    "data": "data", "reduce": "optimizer", "optimizer": "optimizer",
}  # fmt: skip
_WORDS = {"stages": "bubble (waiting for other stages)", "host": "host"}
_COLOURS = {
    "compute": "#3f74c7", "stages": "#d9d9d9", "data": "#d1495b", "optimizer": "#3a9d6f",
    "checkpoint": "#8a6fb0", "evaluation": "#7aa6e8", "tracing": "#c06fa0", "host": "#7a7a7a",
}  # fmt: skip
_COMMUNICATION = ("#d39a2f", "#f2c879", "#b9770e", "#e8a87c")
#: Advice by kind, with the share of the time from which it is given.
_ADVICE = {
    "stages": (0.1, "use more microbatches, or a zero-bubble schedule (zb_h1, zb_v) if the plan has none yet"),
    "data": (0.05, "loading data is too slow: check the storage of the token cache"),
    "checkpoint": (0.1, "checkpoints take {share:.0%} of the time; raise checkpoint.every"),
    "host": (0.25, "Python takes longer than the computation: use a larger microbatch, or compile=on"),
}
#: Minimum seconds of a kind for advice, so that runs of a minute get none.
_WORTH_ADVICE_S = 10.0
#: The slowest rank is named if it computes this much more than the mean. Smaller differences are noise.
_SLOWER = 0.05


class TimeBook:
    """Sums one rank's seconds by kind of work, from `start` to `stop`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self._total: float | None = None
        self.num_steps = 0
        self.last: StepTimes | None = None
        self._steps: deque[dict[str, float]] = deque(maxlen=_TYPICAL)

    def start(self) -> None:
        """Begin the run's time now, and reset all sums."""
        self._seconds, self.num_steps, self._total = {}, 0, None
        self._steps.clear()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """End the run's time now."""
        self._total = time.perf_counter() - self._began

    @contextlib.contextmanager
    def spend(self, kind: str) -> Iterator[None]:
        """Count the time of the block under a kind."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - start)

    def add(self, kind: str, seconds: float) -> None:
        """Count seconds under a kind."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def add_step(self, times: StepTimes, data_s: float = 0.0) -> None:
        """Count a step's phases, with communication separate.

        Args:
            times: the step's times.
            data_s: seconds that the host waited for the step's data. Time in which the device was still busy with the
                previous step is not counted.
        """
        if data_s:
            self.add("data", min(data_s, times.gap_s))
        self.num_steps += 1
        self.last = times
        before = dict(self._seconds)
        for phase, seconds in times.phases.items():
            kind = _KINDS.get(phase, "host")
            # A wait for a pipeline stage is also a wait for its message, so only one of the two is counted.
            inside = {axis: s for axis, s in times.exposed.get(phase, {}).items() if kind != "stages" and s > 0}
            for axis, spent in inside.items():
                self.add(f"over {axis}", spent)
            self.add(kind, max(0.0, seconds - sum(inside.values())))
        spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in self._seconds.items() if kind != "host"}
        # Time outside all phases is spent in Python code.
        spent["host"] = max(0.0, times.total_s - sum(spent.values()))
        self._steps.append({kind: seconds for kind, seconds in spent.items() if seconds > 0})

    def typical(self) -> dict[str, float]:
        """Return the seconds of a step by kind: the mean over the last 200 steps, except the run's first step."""
        steps = [*self._steps]
        if self.num_steps == len(steps) and len(steps) > 1:
            steps = steps[1:]
        kinds = dict.fromkeys(kind for step in steps for kind in step)
        return {kind: sum(step.get(kind, 0.0) for step in steps) / len(steps) for kind in kinds}

    def seconds(self) -> dict[str, float]:
        """Return the seconds by kind. "total" is the time from `start` to `stop`, or until now.

        "host" is the time that belongs to no other kind.
        """
        total = self._total if self._total is not None else time.perf_counter() - self._began
        known = sum(seconds for kind, seconds in self._seconds.items() if kind != "host")
        return {**self._seconds, "host": max(0.0, total - known), "total": total}


def busy_seconds(times: StepTimes) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step in which its rank computed without waiting, and its waits by axis."""
    waits: dict[str, float] = {}
    for phase in times.phases:
        for axis, spent in times.exposed.get(phase, {}).items():
            waits[axis] = waits.get(axis, 0.0) + spent
    return own_seconds(times)["compute"], {axis: spent for axis, spent in waits.items() if spent > 0}


def own_seconds(times: StepTimes, data_s: float = 0.0) -> dict[str, float]:
    """Return the seconds that a rank spent on its own work in a step, by kind, without waits for other ranks."""
    found = {"compute": 0.0, "data": min(data_s, times.gap_s), "optimizer": 0.0, "host": 0.0}
    for phase, seconds in times.phases.items():
        kind = _KINDS.get(phase, "host")
        if kind != "stages":
            found[kind] += max(0.0, seconds - sum(times.exposed.get(phase, {}).values()))
    found["host"] += max(0.0, times.total_s - sum(times.phases.values()))
    return found


def time_lines(
    ranks: Sequence[Mapping[str, float]], num_steps: int, sizes: Mapping[str, int] | None = None, start_step: int = 0
) -> list[str]:
    """Return the time report as lines of text.

    Args:
        ranks: `TimeBook.seconds()` of each rank.
        num_steps: number of steps in these times.
        sizes: sizes of the mesh's axes. Axes of size 1 are omitted from the names of joined axes.
        start_step: steps done by earlier starts.
    """
    ranks = [_over_wide(one, sizes) for one in ranks]
    total = max(one["total"] for one in ranks)
    means = {kind: sum(one.get(kind, 0.0) for one in ranks) / len(ranks) for kind in _kinds(ranks)}
    shares = sorted(((seconds / total, kind) for kind, seconds in means.items()), reverse=True)
    told = ", ".join(f"{_label(kind)} {share:.0%}" for share, kind in shares if share >= 0.005)
    of = f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
    since = f" since step {start_step}" if start_step else ""
    lines = [f"time    {num_steps} steps{since} in {total:.1f} s{of}: {told}"]
    if len(ranks) > 1:
        busy = [one.get("compute", 0.0) for one in ranks]
        slowest = busy.index(max(busy))
        more = busy[slowest] / max(sum(busy) / len(busy), 1e-9) - 1
        if more >= _SLOWER:
            lines.append(f"        slowest: rank {slowest}, {more:.0%} more compute than the mean")
    for share, kind in shares:
        least, advice = _ADVICE.get(kind, (2.0, ""))
        if share >= least and share * total >= _WORTH_ADVICE_S:
            told = advice.format(share=share) if "{share" in advice else f"{_label(kind)}: {advice}"
            lines.append(f"        {told}")
    return lines


def draw_times(
    ranks: Sequence[Mapping[str, float]], num_steps: int, sizes: Mapping[str, int] | None = None, start_step: int = 0
) -> str:
    """Return the time report as an SVG chart with one row per rank (at most 64 evenly chosen ranks).

    Args:
        ranks, num_steps, sizes, start_step: as in `time_lines`.
    """
    ranks = [_over_wide(one, sizes) for one in ranks]
    kinds = _kinds(ranks)
    axes = [kind for kind in kinds if kind.startswith("over ")]
    colour = _COLOURS | {kind: _COMMUNICATION[place % len(_COMMUNICATION)] for place, kind in enumerate(axes)}
    chosen = [rank * len(ranks) // min(len(ranks), 64) for rank in range(min(len(ranks), 64))]
    longest = max(one["total"] for one in ranks)
    rows: list[tuple[str, list[Bar]]] = []
    for rank in chosen:
        at, bars = 0.0, list[Bar]()
        for kind in kinds:
            seconds = ranks[rank].get(kind, 0.0)
            share = seconds / max(ranks[rank]["total"], 1e-9)
            title = f"rank {rank}: {_label(kind)} {seconds:.2f} s, {share:.1%}"
            label = f"{_short(seconds)} · {share:.0%}"
            label = label if fits(label, seconds / longest) else f"{share:.0%}"
            bars.append(Bar(at, at + seconds, colour[kind], label, title))
            at += seconds
        rows.append((f"rank {rank}", bars))
    since = f" since step {start_step}" if start_step else ""
    title = f"Where the time of {num_steps} steps{since} went: {longest:.1f} s"
    means = {kind: sum(one.get(kind, 0.0) for one in ranks) / len(ranks) for kind in kinds}
    # Bars may be too narrow for numbers; the legend shows all of them.
    legend = [(f"{_label(kind)} {_short(mean)}, {mean / longest:.0%}", colour[kind]) for kind, mean in means.items()]
    return draw_bars(rows, title, legend).svg()


def chrome_trace(tracks: Sequence[tuple[str, str, Sequence[tuple[str, float, float]]]]) -> str:
    """Return the spans as a JSON trace for chrome://tracing or Perfetto.

    Args:
        tracks: (process, thread, spans); a span is (name, start, end) in seconds.
    """
    events: list[dict[str, object]] = []
    processes = list(dict.fromkeys(process for process, _, _ in tracks))
    for number, (process, thread, spans) in enumerate(tracks):
        place = {"pid": processes.index(process), "tid": number}
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": process}})
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": thread}})
        events += [
            {"ph": "X", "name": name, **place, "ts": round(start * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
            for name, start, end in spans
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _kinds(ranks: Sequence[Mapping[str, float]]) -> list[str]:
    found = {kind for one in ranks for kind in one if kind != "total"}
    axes = sorted(kind for kind in found if kind.startswith("over "))
    order = ["compute", "stages", *axes, "data", "optimizer", "checkpoint", "evaluation", "tracing", "host"]
    return [kind for kind in order if kind in found]


def _over_wide(rank: Mapping[str, float], sizes: Mapping[str, int] | None) -> dict[str, float]:
    """Omit axes of size 1 from names of joined axes, and sum the seconds of kinds that get the same name."""
    sizes, found = sizes or {}, dict[str, float]()
    for kind, seconds in rank.items():
        if kind.startswith("over "):
            axes = kind.removeprefix("over ").split("*")
            wide = [axis for axis in axes if sizes.get(axis.partition("/")[0], 2) > 1]
            kind = f"over {'*'.join(wide or axes)}"
        found[kind] = found.get(kind, 0.0) + seconds
    return found


def _label(kind: str) -> str:
    return f"communication {kind}" if kind.startswith("over ") else _WORDS.get(kind, kind)


def _short(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
