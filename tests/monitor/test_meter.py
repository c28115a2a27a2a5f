from __future__ import annotations

import mmap
import subprocess
import sys
import time

import pytest

from weft.monitor.times import Meter, memory_bytes


class Ticks:
    """A device's clock: marks are numbered, and reading the seconds between two is counted as a wait."""

    def __init__(self) -> None:
        self.marks = 0
        self.waits = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds_between(self, start: int, end: int) -> float:
        self.waits += 1
        return float(end - start)


def test_phases_are_summed_by_name_and_may_lie_inside_each_other():
    meter = Meter(clock=Ticks())
    for _ in range(2):
        with meter.phase("forward"):
            pass
    with meter.phase("backward"), meter.phase("reduce"):
        pass
    assert meter.end_step(10).phases == {"forward": 2.0, "reduce": 1.0, "backward": 3.0}
    assert meter.end_step(10).phases == {}


def test_a_devices_clock_is_read_only_when_somebody_looks_and_once():
    clock = Ticks()
    meter = Meter(clock=clock)
    for _ in range(3):
        with meter.phase("forward"):
            pass
        times = meter.end_step(10)
    assert clock.waits == 0
    assert times.phases == {"forward": 1.0}
    assert times.phases is times.phases
    assert clock.waits == 1


def test_a_phase_that_fails_is_timed_and_lets_the_error_pass():
    meter = Meter(clock=Ticks())
    with pytest.raises(ValueError, match="x"), meter.phase("forward"):
        raise ValueError("x")
    assert meter.end_step(1).phases == {"forward": 1.0}


def test_seconds_are_those_of_the_wall(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter("cpu")
    now[0] += 7.0  # Before the first step: compiling, loading.
    meter.begin_step()
    with meter.phase("forward"):
        now[0] += 2.0
    now[0] += 0.5
    times = meter.end_step(1000)
    assert (times.total_s, times.count_per_s, times.phases) == (2.5, 400.0, {"forward": 2.0})
    now[0] += 1.5
    assert meter.end_step(600).count_per_s == 400.0  # Without begin_step a step lasts from the last one's end.
    now[0] += 50.0  # An evaluation.
    meter.begin_step()
    now[0] += 1.0
    meter.end_step(0)
    assert meter.count_per_s == pytest.approx(1600 / 5.0)


def test_the_smoothed_speed_forgets_old_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter()
    assert meter.count_per_s == 0
    for step in range(100):
        now[0] += 10.0 if step < 50 else 1.0
        meter.end_step(100)
    assert meter.count_per_s == pytest.approx(100.0)


def test_a_meter_that_nobody_ends_does_not_grow():
    meter = Meter(clock=Ticks())
    for _ in range(20_000):
        with meter.phase("forward"):
            pass
    assert sum(meter.end_step(1).phases.values()) <= 5000


def test_memory_of_this_process():
    now, peak = memory_bytes("cpu")
    assert 10_000_000 < now <= peak < 2**46
    with mmap.mmap(-1, 64_000_000) as ballast:  # pages of its own: the heap may hold free ones that count already
        for page in range(0, len(ballast), mmap.PAGESIZE):
            ballast[page] = 1
        assert memory_bytes("cpu")[1] >= now + 50_000_000


def test_importing_the_monitor_costs_no_heavy_library():
    code = "import sys, weft.monitor; print([m for m in ('torch', 'matplotlib', 'rich', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
