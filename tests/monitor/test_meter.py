from __future__ import annotations

import math
import mmap
import subprocess
import sys
import time

import pytest

from weft.monitor.step_times import Meter, memory_bytes


class Ticks:
    """A device clock with numbered marks. Reading the seconds between two marks counts as a wait."""

    def __init__(self) -> None:
        self.marks = 0
        self.waits = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds_between(self, start: int, end: int) -> float:
        self.waits += 1
        return float(end - start)


def test_phases_are_summed_by_name_and_may_nest():
    meter = Meter(clock=Ticks())
    for _ in range(2):
        with meter.phase("forward"):
            pass
    with meter.phase("backward"), meter.phase("reduce"):
        pass
    assert meter.end_step().phases == {"forward": 2.0, "reduce": 1.0, "backward": 3.0}
    assert meter.end_step().phases == {}


def test_device_clock_is_read_lazily_and_once():
    clock = Ticks()
    meter = Meter(clock=clock)
    for _ in range(3):
        with meter.phase("forward"):
            pass
        times = meter.end_step()
    assert clock.waits == 0
    assert times.phases == {"forward": 1.0}
    assert times.phases is times.phases
    assert clock.waits == 1
    meter.count(times, 10)
    assert (times.total_s, clock.waits) == (3.0, 2)


def test_failing_phase_is_timed_and_reraises():
    meter = Meter(clock=Ticks())
    with pytest.raises(ValueError, match="x"), meter.phase("forward"):
        raise ValueError("x")
    assert meter.end_step().phases == {"forward": 1.0}


def test_cpu_times_are_wall_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter("cpu")
    now[0] += 7.0  # Before the first step: compiling, loading.
    meter.begin_step()
    with meter.phase("forward"):
        now[0] += 2.0
    now[0] += 0.5
    times = meter.end_step()
    meter.count(times, 1000)
    assert (times.total_s, times.phases, meter.count_per_s) == (2.5, {"forward": 2.0}, 400.0)
    now[0] += 1.5
    later = meter.end_step()  # Without begin_step, a step starts at the end of the previous one.
    meter.count(later, 600)
    assert (later.total_s, later.gap_s, meter.count_per_s) == (1.5, 0.0, 400.0)
    now[0] += 50.0  # An evaluation.
    meter.begin_step()
    now[0] += 1.0
    last = meter.end_step()
    meter.count(last, 0)
    assert last.gap_s == 50.0
    assert meter.count_per_s == pytest.approx(1600 / 5.0)


class LateDevice:
    """A device clock with a queue: the host enqueues seconds of work and continues immediately."""

    def __init__(self) -> None:
        self.host = self.free = 0.0

    def work(self, seconds: float) -> None:
        self.free = max(self.free, self.host) + seconds

    def mark(self) -> float:
        return max(self.free, self.host)

    def seconds_between(self, start: float, end: float) -> float:
        self.host = max(self.host, end)
        return end - start


def test_step_lasts_until_the_device_has_finished():
    """The host is ahead: it launches a step of 8 s in one second, and reads it when the next one is launched."""
    clock = LateDevice()
    meter, unread, seen = Meter(clock=clock), None, []
    for _ in range(4):
        meter.begin_step()
        for name, seconds in (("forward", 2.0), ("backward", 5.0), ("optimizer", 1.0)):
            with meter.phase(name):
                clock.work(seconds)
        clock.host += 1.0
        unread, before = meter.end_step(), unread
        if before is not None:
            meter.count(before, 80)
            seen.append((before.total_s, before.gap_s, sum(before.phases.values())))
    assert seen == [(8.0, math.inf, 8.0), (8.0, 0.0, 8.0), (8.0, 0.0, 8.0)]
    assert meter.count_per_s == 10.0
    assert (clock.host, clock.free) == (24.0, 32.0)  # the third step's end, when the fourth has work for 8 s


def test_smoothed_speed_forgets_old_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter()
    assert meter.count_per_s == 0
    for step in range(100):
        now[0] += 10.0 if step < 50 else 1.0
        meter.count(meter.end_step(), 100)
    assert meter.count_per_s == pytest.approx(100.0)


def test_meter_without_end_step_is_bounded():
    meter = Meter(clock=Ticks())
    for _ in range(20_000):
        with meter.phase("forward"):
            pass
    assert sum(meter.end_step().phases.values()) <= 5000


def test_memory_of_this_process():
    now, peak = memory_bytes("cpu")
    assert 10_000_000 < now <= peak < 2**46
    with mmap.mmap(-1, 64_000_000) as ballast:  # separate pages: the heap may have free ones that are counted already
        for page in range(0, len(ballast), mmap.PAGESIZE):
            ballast[page] = 1
        assert memory_bytes("cpu")[1] >= now + 50_000_000


def test_importing_monitor_loads_no_heavy_library():
    code = "import sys, weft.monitor; print([m for m in ('torch', 'matplotlib', 'rich', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
