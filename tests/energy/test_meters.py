"""Meters on fake trees of /sys and a fake NVML: wraps, resets, missing and unreadable counters, labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.energy.fakes import RANGE_UJ, Clock, FakeGpu, FakeNvml, rapl
from weft.energy.host_meter import MeterSettings, host_meter
from weft.energy.meters import Unmeasured, gpu_meter, package_meters


def grow(counter, microjoules: int) -> None:
    counter.write_text(f"{(int(counter.read_text()) + microjoules) % RANGE_UJ}\n")


def test_packages_are_read_once_without_subdomains_psys_and_mmio(tmp_path):
    first = rapl(tmp_path, "intel-rapl:0", "package-0")
    second = rapl(tmp_path, "intel-rapl:1", "package-1")
    for name, title in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0")):
        grow(rapl(tmp_path, name, title), 0)
    clock = Clock()
    meter = host_meter([], sysfs=tmp_path, clock=clock)
    clock.now += 1
    grow(first, 100_000_000)
    grow(second, 50_000_000)
    assert meter.read().joules == pytest.approx(150.0)
    assert meter.describe() == [
        {"name": f"package-{n}", "label": "measured", "basis": "RAPL counter"} for n in range(2)
    ]


def test_wrapped_counter_counts_on(tmp_path):
    counter, clock = rapl(tmp_path, microjoules=RANGE_UJ - 40_000_000), Clock()
    meter = host_meter([], sysfs=tmp_path, clock=clock)
    clock.now += 1
    counter.write_text("60000000\n")
    assert meter.read().joules == pytest.approx(100.0)
    assert meter.take_notes() == []


def test_reset_of_rapl_is_noted_and_not_counted_as_a_wrap(tmp_path):
    counter, clock = rapl(tmp_path, microjoules=90_000_000_000), Clock()
    meter = host_meter([], sysfs=tmp_path, clock=clock)
    clock.now += 1
    counter.write_text("0\n")
    assert meter.read().joules == 0
    assert meter.take_notes() == ["package-0: its counter was reset or jumped; the energy of 1 s is unmeasured"]
    clock.now += 1
    grow(counter, 30_000_000)
    assert meter.read().joules == pytest.approx(30.0)


def test_long_gap_in_which_a_counter_may_have_wrapped_is_unmeasured(tmp_path):
    counter, clock = rapl(tmp_path), Clock()
    meter = host_meter([], sysfs=tmp_path, clock=clock)
    clock.now += 3600
    grow(counter, 30_000_000)
    assert meter.read().joules == 0
    assert "may have wrapped" in meter.take_notes()[0]


def test_counter_that_disappears_is_named_and_continues_when_it_returns(tmp_path):
    counter, clock = rapl(tmp_path), Clock()
    meter = host_meter([], sysfs=tmp_path, clock=clock)
    moved = counter.rename(counter.with_name("away"))
    for _ in range(3):
        clock.now += 1
        assert meter.read().joules == 0
    assert meter.take_notes() == [
        f"package-0 cannot be read: {counter}: No such file or directory; its energy is missing until it can"
    ]
    moved.rename(counter)
    grow(counter, 70_000_000)
    clock.now += 1
    assert meter.read().joules == pytest.approx(70.0)
    assert meter.take_notes() == ["package-0 can be read again"]


@pytest.mark.parametrize("found", [b"garbage\n", b"\xff\xfe\n", b"9" * 10_000], ids=["text", "bytes", "long"])
def test_damaged_counter_is_unmeasured(found, tmp_path):
    counter, clock = rapl(tmp_path), Clock()
    meter = host_meter([], sysfs=tmp_path, clock=clock)
    counter.write_bytes(found)
    clock.now += 1
    assert meter.read().joules == 0
    assert "is no number" in meter.take_notes()[0]


def test_permission_denied_is_the_reason(tmp_path, monkeypatch):
    counter, read = rapl(tmp_path), Path.read_text

    def denied(path, *args, **options):
        if path == counter:  # root may read everything
            raise PermissionError(13, "Permission denied")
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(Unmeasured, match=r"permission denied \(an administrator can allow it: chmod a\+r"):
        package_meters(tmp_path)


def test_machine_without_counters_is_unmeasured_or_estimated(tmp_path):
    meter = host_meter([], sysfs=tmp_path)
    assert not meter.works
    assert meter.describe() == [
        {
            "name": "packages",
            "label": "unmeasured",
            "basis": f"this machine has no RAPL counter of a CPU package ({tmp_path}/class/powercap). "
            "energy.cpu_watts makes an estimate",
        }
    ]
    clock = Clock()
    shares = iter([0.0, 1.0, 0.5])
    settings = MeterSettings(cpu_watts=100.0)
    meter = host_meter([], settings, sysfs=tmp_path, clock=clock, utilization=lambda: next(shares))
    clock.now += 2
    assert meter.read().joules == pytest.approx(200.0)
    clock.now += 2
    found = meter.read()
    assert found.joules == found.estimated_j == pytest.approx(200.0 + 2 * (30 + 35))


def test_gpu_counter_is_preferred_and_shared_gpus_count_once(tmp_path):
    gpu, clock = FakeGpu(millijoules=5e9), Clock()
    meter = host_meter(["a", "GPU-a", "a"], sysfs=tmp_path, nvml=FakeNvml(a=gpu), clock=clock)
    gpu.millijoules += 1_200_000
    clock.now += 2
    found = [one for one in meter.describe() if one["label"] == "measured"]
    assert meter.read().joules == pytest.approx(1200.0)
    assert [one["basis"] for one in found] == ["NVML energy counter"]


def test_gpu_without_counter_sums_power_samples():
    gpu, clock = FakeGpu(millijoules=None, milliwatts=300_000), Clock()
    meter = gpu_meter(FakeNvml(a=gpu), "a", None, clock)
    assert (meter.label, meter.basis) == ("measured", "sum of NVML power samples")
    assert meter.read() == 0
    clock.now, gpu.milliwatts = clock.now + 2, 500_000
    assert meter.read() == pytest.approx(800.0)
    clock.now += 100
    assert meter.read() == pytest.approx(800.0)
    assert "no power sample for 100 s" in meter.notes[0]


def test_gpu_without_power_is_estimated_from_its_data_sheet():
    clock = Clock()
    meter = gpu_meter(FakeNvml(a=FakeGpu(None, None, 50)), "a", None, clock)
    meter.read()
    clock.now += 1
    assert (meter.label, meter.basis) == ("estimated", "estimate: 700 W x (0.3 + 0.7 x GPU utilization)")
    assert meter.read() == pytest.approx(700 * 0.65)


def test_gpu_without_anything_is_unmeasured():
    with pytest.raises(Unmeasured, match="GPU-a: Not Supported"):
        gpu_meter(FakeNvml(a=FakeGpu(None, None, None)), "a", 300.0)
    with pytest.raises(Unmeasured, match="its rated power is unknown"):
        gpu_meter(FakeNvml(a=FakeGpu(None, None, 50, name="Unknown")), "a", None)
    with pytest.raises(Unmeasured, match="GPU-b: Not Found"):
        gpu_meter(FakeNvml(), "b", None)


def test_gpu_reset_and_lost_gpu_in_the_middle_of_a_run(tmp_path):
    gpu, clock = FakeGpu(millijoules=5e9), Clock()
    meter = host_meter(["a"], sysfs=tmp_path, nvml=FakeNvml(a=gpu), clock=clock)
    clock.now, gpu.millijoules = clock.now + 1, 0.0
    assert meter.read().joules == 0
    assert "was reset" in meter.take_notes()[0]
    clock.now, gpu.millijoules = clock.now + 1, None
    assert meter.read().joules == 0
    assert meter.take_notes() == ["GPU-a cannot be read: GPU-a: Not Supported; its energy is missing until it can"]
    clock.now, gpu.millijoules = clock.now + 1, 600_000.0
    assert meter.read().joules == pytest.approx(600.0)


def test_replicas_do_not_count_packages_twice(tmp_path):
    rapl(tmp_path)
    meter = host_meter([], sysfs=tmp_path, no_packages="replica 0 counts them")
    assert meter.describe() == [{"name": "packages", "label": "unmeasured", "basis": "replica 0 counts them"}]
