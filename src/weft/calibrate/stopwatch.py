"""Seconds of one call, measured in windows of many, with the other ranks at work at the same time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.comm import all_reduce, barrier
from weft.mesh import Axis

Call = Callable[[], object]
#: Windows of one measurement. The median counts: steps, too, pay for what usually disturbs a machine.
WINDOWS = 4
_MOST_CALLS = 10_000


@dataclass(frozen=True, slots=True)
class Timing:
    """seconds: of one call, in the median window. spread: how much longer that took than the fastest, relative."""

    seconds: float
    spread: float


class ColdCalls:
    """The same work on so many pieces of memory, made when they are asked for: making them takes longer than calling.

    most: how many there are.
    """

    def __init__(self, make: Callable[[], Call], most: int):
        self._make, self._most = make, most
        self._made: list[Call] = []

    def first(self, count: int) -> Sequence[Call]:
        """Return the first of them, all where there are fewer."""
        self._made += [self._make() for _ in range(min(count, self._most) - len(self._made))]
        return self._made[:count]


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls on this rank. axis: the ranks that do the same at the same time. window_s: of one window."""

    axis: Axis
    device: torch.device
    window_s: float

    def time(self, calls: ColdCalls) -> Timing:
        """Call each of `calls` in turn, again and again: on other memory, so that caches stay cold."""
        for call in calls.first(2):
            call()
        count = self._count(calls.first(1)[0])
        # Windows are short, so the next one goes on where the last one ended.
        turns = itertools.cycle(calls.first(WINDOWS * count))
        return _median([self._window(turns, count) for _ in range(WINDOWS)])

    def time_after(self, work: Call, call: Call) -> Timing:
        """Seconds of `call` where it follows `work`, as a collective follows compute: waiting for others counts."""
        work()
        call()
        count = self._count(lambda: (work(), call()))
        return _median([self._windows_after(work, call, count) for _ in range(WINDOWS)])

    def _window(self, turns: Iterator[Call], count: int) -> float:
        """Seconds of a call on the slowest rank: where ranks share cores, a faster one took them from the others."""
        self._settle()
        barrier(self.axis)
        start = time.perf_counter()
        for call in itertools.islice(turns, count):
            call()
        self._settle()
        return self._joined((time.perf_counter() - start) / count, "max")

    def _windows_after(self, work: Call, call: Call, count: int) -> float:
        """Seconds of a call, the ranks' mean: what one waits for another, the other does not."""
        self._settle()
        barrier(self.axis)
        spent = 0.0
        for _ in range(count):
            work()
            self._settle()
            start = time.perf_counter()
            call()
            self._settle()
            spent += time.perf_counter() - start
        return self._joined(spent / count, "sum") / self.axis.size

    def _joined(self, seconds: float, op: str) -> float:
        return float(all_reduce(torch.tensor([seconds], dtype=torch.float64), self.axis, op))

    def _count(self, call: Call) -> int:
        """How many calls fill a window; on all ranks as many, since those of a collective must meet."""
        self._settle()
        start = time.perf_counter()
        call()
        self._settle()
        calls = min(self.window_s / max(time.perf_counter() - start, 1e-7), _MOST_CALLS)
        return max(1, round(self._joined(calls, "max")))

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _median(windows: Sequence[float]) -> Timing:
    middle = statistics.median(windows)
    return Timing(middle, middle / min(windows) - 1)
