"""Seconds by phase of a step, what it trained per second, memory.

On a GPU a phase is bracketed by two CUDA events and nothing waits: the seconds are read from the events when somebody
asks for them, which by then have usually passed.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

#: Steps that the smoothed speed looks back on.
_WINDOW = 20
#: Phases kept of one step.
_MAX_SPANS = 4096


class StepClock(Protocol):
    """Marks a moment in a device's work, and later tells the seconds between two marks."""

    def mark(self) -> Any: ...

    def seconds_between(self, start: Any, end: Any) -> float: ...


class HostClock:
    """For devices whose work is done when the call returns: a mark is a reading of perf_counter."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """A mark is an event in the current stream of a CUDA device; only reading the seconds waits for it."""

    def __init__(self, device: object):
        import torch

        self._torch = torch
        self._device = torch.device(str(device))

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


class Communication(Protocol):
    """Knows how long the computation waited for other ranks; `weft.comm.Ledger` is one."""

    def mark(self) -> Any:
        """Return this moment; nothing waits."""
        ...

    def seconds_between(self, start: Any, end: Any) -> Mapping[str, float]:
        """Return seconds by axis between two marks; may wait for the device."""
        ...


class StepTimes:
    """One step's times, which are read from the clock when somebody looks, and then may wait for the device.

    Args:
        before: mark of the end of the step before; None for the first.
        start, end: marks of this one.
        spans: (phase, start, end) as marks of the clock, and the communication's marks at both, or None.
        clock: makes seconds of marks.
        communication: the same for communication.
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
        """Seconds from the step's start to its end on the device: all that the step gave it to do is in them."""
        return self._clock.seconds_between(self._start, self._end)

    @cached_property
    def gap_s(self) -> float:
        """Seconds on the device from the end of the step before to the start of this one; infinite for the first."""
        return math.inf if self._before is None else self._clock.seconds_between(self._before, self._start)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order the phases began; a phase that ran several times is summed."""
        seconds: dict[str, float] = {}
        for name, start, end, _ in self._spans:
            seconds[name] = seconds.get(name, 0.0) + self._clock.seconds_between(start, end)
        return seconds

    @cached_property
    def exposed(self) -> dict[str, dict[str, float]]:
        """Seconds that the computation waited for other ranks inside each phase, by axis."""
        found: dict[str, dict[str, float]] = {}
        for name, _, _, marks in self._spans:
            if self._communication is not None:
                inside = found.setdefault(name, {})
                for axis, seconds in self._communication.seconds_between(*marks).items():
                    inside[axis] = inside.get(axis, 0.0) + seconds
        return found

    def spans(self) -> list[tuple[str, float, float]]:
        """Return (phase, start, end) of each, in seconds from the start of the first."""
        if not self._spans:
            return []
        zero, between = self._spans[0][1], self._clock.seconds_between
        return [(name, between(zero, start), between(zero, end)) for name, start, end, _ in self._spans]


class Meter:
    """Times the steps of one rank.

    A step lasts from `begin_step` (or, without that, from the last `end_step`) to `end_step`, so that evaluation and
    saving between the two count as no step's time. On a GPU both are moments of the device.

    Args:
        device: "cpu", "cuda:0" or a torch.device.
        clock: for tests; None: the device's.
        communication: what of the waits for other ranks falls into each phase is kept apart.
    """

    def __init__(
        self,
        device: object = "cpu",
        *,
        clock: StepClock | None = None,
        communication: Communication | None = None,
    ):
        self._communication = communication
        self._clock = clock or (CudaClock(device) if str(device).startswith("cuda") else HostClock())
        # Bounded, because a step used without a loop has nobody to call end_step.
        self._spans: deque[tuple[str, Any, Any, Any]] = deque(maxlen=_MAX_SPANS)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._began = self._clock.mark()
        self._ended: Any = None

    def begin_step(self) -> None:
        """Start the step's time now, and forget phases timed since the last step."""
        self._spans.clear()
        self._began = self._clock.mark()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a part of the step. Phases may repeat within a step, and may lie inside each other."""
        known = self._communication
        before = known.mark() if known else None
        start = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((name, start, self._clock.mark(), (before, known.mark()) if known else None))

    def end_step(self) -> StepTimes:
        """End the step. Nothing waits: say with `count` later what it trained."""
        end = self._clock.mark()
        times = StepTimes(self._ended, self._began, end, list(self._spans), self._clock, self._communication)
        self._spans.clear()
        self._began = self._ended = end
        return times

    def count(self, times: StepTimes, number: int) -> None:
        """Say what a step trained: tokens or samples over all ranks, 0 for nothing. Waits for the step's end."""
        self._recent.append((number, times.total_s))

    @property
    def count_per_s(self) -> float:
        """Smoothed over the last steps: what they trained over their seconds. 0 before the first."""
        total_s = sum(seconds for _, seconds in self._recent)
        return sum(count for count, _ in self._recent) / total_s if total_s > 0 else 0.0


def memory_bytes(device: object = "cpu") -> tuple[int, int]:
    """Return (now, peak) bytes: what torch's allocator holds on a CUDA device, or this process's resident memory."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.memory_allocated(str(device)), torch.cuda.max_memory_allocated(str(device))
    import resource

    import psutil

    # Kilobytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    now = psutil.Process().memory_info().rss
    return now, max(now, peak)
