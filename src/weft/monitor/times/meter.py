"""Seconds by phase of a step, what it trained per second, memory.

On a GPU a phase is bracketed by two CUDA events and nothing waits: the seconds are read from the events when somebody
asks for them, which by then have usually passed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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


class StepTimes:
    """The times of one step. count_per_s: of this step alone.

    Args:
        total_s: seconds by the host's clock, all included.
        count: tokens or samples of the step.
        spans: (phase, start, end), as marks of the clock.
        clock: makes seconds of marks.
        exposed: host seconds of communication by phase and axis.
    """

    def __init__(
        self,
        total_s: float,
        count: int,
        spans: list[tuple[str, Any, Any]],
        clock: StepClock,
        exposed: Mapping[str, Mapping[str, float]] | None = None,
    ):
        self.total_s = total_s
        #: Host seconds of communication inside each phase, by axis.
        self.exposed = exposed or {}
        self.count_per_s = count / total_s if total_s > 0 else 0.0
        self._spans = spans
        self._clock = clock

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order the phases began; a phase that ran several times is summed.

        The first look reads the device's events, and waits where the device has not come that far.
        """
        seconds: dict[str, float] = {}
        for name, start, end in self._spans:
            seconds[name] = seconds.get(name, 0.0) + self._clock.seconds_between(start, end)
        return seconds

    def spans(self) -> list[tuple[str, float, float]]:
        """Return (phase, start, end) of each, in seconds from the start of the first."""
        if not self._spans:
            return []
        zero, between = self._spans[0][1], self._clock.seconds_between
        return [(name, between(zero, start), between(zero, end)) for name, start, end in self._spans]


class Meter:
    """Times the steps of one rank.

    A step lasts from `begin_step` (or, without that, from the last `end_step`) to `end_step`, so that evaluation and
    saving between the two count as no step's time.

    Args:
        device: "cpu", "cuda:0" or a torch.device.
        clock: for tests; None: the device's.
        communication: host seconds by axis so far; what of them falls into each phase is kept apart.
    """

    def __init__(
        self,
        device: object = "cpu",
        *,
        clock: StepClock | None = None,
        communication: Callable[[], Mapping[str, float]] | None = None,
    ):
        self._communication = communication
        self._exposed: dict[str, dict[str, float]] = {}
        self._clock = clock or (CudaClock(device) if str(device).startswith("cuda") else HostClock())
        # Bounded, because a step used without a loop has nobody to call end_step.
        self._spans: deque[tuple[str, Any, Any]] = deque(maxlen=_MAX_SPANS)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._began = time.perf_counter()

    def begin_step(self) -> None:
        """Start the step's time now, and forget phases timed since the last step."""
        self._spans.clear()
        self._exposed = {}
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a part of the step. Phases may repeat within a step, and may lie inside each other."""
        before = self._communication() if self._communication else {}
        start = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((name, start, self._clock.mark()))
            if self._communication:
                inside = self._exposed.setdefault(name, {})
                for axis, seconds in self._communication().items():
                    inside[axis] = inside.get(axis, 0.0) + seconds - before.get(axis, 0.0)

    def end_step(self, count: int) -> StepTimes:
        """End the step. count: tokens or samples trained in it over all ranks; 0 for a step that trained nothing."""
        now = time.perf_counter()
        times = StepTimes(now - self._began, count, list(self._spans), self._clock, self._exposed)
        self._exposed = {}
        self._recent.append((count, times.total_s))
        self._spans.clear()
        self._began = now
        return times

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
