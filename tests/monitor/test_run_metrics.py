"""Figures of ranks: the report of a rank, the combined event of rank 0, and the sources of the numbers."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace

from weft.monitor.machine_metrics import GpuSource, HostSource
from weft.monitor.metrics import Collector, LocalReports, ReportJoiner, StepReport, readings


class FakeStore:
    """Reports of several ranks in one process."""

    def __init__(self, number):
        self.texts = [""] * number

    def of(self, rank):
        return SimpleNamespace(post=lambda text: self.texts.__setitem__(rank, text), read=lambda: list(self.texts))


def collectors(number, every_s=10.0, clock=lambda: 0.0, **options):
    board, told = FakeStore(number), []
    made = [
        Collector(f"host{rank // 2}", board.of(rank), every_s, clock=clock,
                  publish=told.append if rank == 0 else None, **options)
        for rank in range(number)
    ]  # fmt: skip
    return made, told, board


def put(collector, step, busy_s, **other):
    collector.put(StepReport(step, {"forward": busy_s, "total": 1.0}, {"tp": 0.1}, busy_s=busy_s, **other))


def test_rank_0_combines_reports_and_names_the_slowest():
    ranks, told, _ = collectors(4)
    for rank, one in enumerate(ranks):
        for step in (1, 2):
            put(one, step, 0.2 if rank != 2 else 0.3, data_s=0.01 * rank)
    for one in [*ranks[1:], ranks[0]]:
        one.send_report()
    (event,) = told
    metrics = event["figures"]
    assert metrics["busy_s"] == [0.2, 0.2, 0.3, "rank 0", "rank 2"]
    assert metrics["rank.lag"][2:] == [1.5, "rank 0", "rank 2"]
    assert metrics["data_wait_s"][4] == "rank 3"
    assert metrics["exposed_s{tp}"][1] == 0.1
    assert (event["step"], event["ranks"], metrics["rank.silent"]) == (2, 4, 0)
    assert event["by_rank"]["busy_s"] == [0.2, 0.2, 0.3, 0.2]
    assert json.loads(json.dumps(event)) == event
    assert {reading.name for reading in readings({**event, "time": 1.0})} >= {"busy_s", "rank.lag", "exposed_s"}


def test_rank_without_reports_is_silent_after_three_intervals():
    now = [0.0]
    ranks, told, _ = collectors(3, clock=lambda: now[0])
    for one in [*ranks[1:], ranks[0]]:
        put(one, 1, 0.1)
        one.send_report()
    for _ in range(4):
        now[0] += 10.0
        ranks[2].send_report(), ranks[0].send_report()
    silent = [event["figures"]["rank.silent"] for event in told]
    assert silent == [0, 0, 0, 1, 1]
    assert told[-1]["silent"] == [1]
    assert told[-1]["by_rank"]["busy_s"] == [0.1, None, 0.1]


def test_full_queue_drops_and_counts_without_waiting():
    ranks, told, _ = collectors(1)
    for step in range(3000):
        put(ranks[0], step + 1, 0.1)
    ranks[0].send_report()
    assert told[0]["figures"]["dropped_figures"][2] == 3000 - 2048


def test_totals_are_reported_as_gain_per_step():
    sent = {"sent_bytes{tp}": 1000.0}
    ranks, told, _ = collectors(1, totals=lambda: sent)
    put(ranks[0], 1, 0.1)
    ranks[0].send_report()
    sent["sent_bytes{tp}"] = 5000.0
    put(ranks[0], 5, 0.1)
    ranks[0].send_report()
    assert "sent_bytes{tp}" not in told[0]["figures"]
    assert told[1]["figures"]["sent_bytes{tp}"][1] == 1000.0


def test_failing_source_is_left_out_and_training_continues():
    def broken():
        raise RuntimeError("no such sensor")

    ranks, told, _ = collectors(1, of_rank=[broken, lambda: {"process.cpu": 1.0}])
    for _ in range(2):
        ranks[0].send_report()
    assert told[1]["figures"]["process.cpu"][1] == 1.0

    class Gone(LocalReports):
        def post(self, text):
            raise ConnectionError("the store is gone")

    one = Collector("here", Gone(), 10.0, publish=told.append)
    one.send_report()
    assert one.trouble == "ConnectionError: the store is gone"


def test_torn_reports_are_ignored():
    ranks, told, board = collectors(2)
    board.texts[1] = '{"number": 1, "val'
    put(ranks[0], 1, 0.1)
    ranks[0].send_report()
    assert told[0]["figures"]["busy_s"][3:] == ["rank 0", "rank 0"]


def test_thread_reports_before_it_ends():
    told = []
    one = Collector("here", LocalReports(), 60.0, publish=told.append)
    one.start()
    put(one, 7, 0.1)
    one.close()
    assert not one.is_alive()
    assert told[-1]["step"] == 7
    assert all(thread.name != "weft-figures" for thread in threading.enumerate())


# --- the GPU, with a fake driver ---


class NVMLError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that the source uses. missing: calls that this GPU does not support."""

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_ECC = 0
    NVML_CLOCK_MEM = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, NVML_SUCCESS = 138, 139, 0
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonHwThermalSlowdown, nvmlClocksEventReasonSwThermalSlowdown = 0x40, 0x20
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
    NVMLError = NVMLError

    def __init__(self, missing=(), reasons=0x4, xid=2, there=True):
        self.missing, self.reasons, self.xid, self.there, self.kilobytes = missing, reasons, xid, there, 100
        self.asked = ""

    def __getattribute__(self, name):
        if name.startswith("nvmlDevice") and name in object.__getattribute__(self, "missing"):
            raise NVMLError("not supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        if not self.there:
            raise NVMLError("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked = uuid
        return "card"

    def nvmlEventSetCreate(self):
        return "events"

    def nvmlDeviceRegisterEvents(self, handle, kinds, events):
        assert (handle, kinds, events) == ("card", 8, "events")

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        assert timeout_ms == 0
        if not self.xid:
            raise NVMLError("timeout")
        self.xid -= 1

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=93, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=7 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 412_000

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 71

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1980 if kind == 0 else 2619

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        assert (kind, counter) == (1, 0)
        return 3

    def nvmlDeviceGetPcieThroughput(self, handle, direction):
        return 500 if direction == 0 else 250  # KB/s

    def nvmlDeviceGetFieldValues(self, handle, fields):
        self.kilobytes += 1000
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=self.kilobytes)) for _ in fields]


def test_gpu_source_reports_all_metrics():
    now = [0.0]
    nvml = FakeNvml()
    gpu = GpuSource("abc", nvml=nvml, clock=lambda: now[0])
    first = gpu.read()
    now[0] = 2.0
    second = gpu.read()
    assert nvml.asked == "GPU-abc"
    assert "gpu.nvlink_bytes_per_s" not in first
    assert second == {
        "gpu.utilization": 0.93, "gpu.memory_bytes": 7 * 2**30, "gpu.power": 412.0, "gpu.temperature": 71.0,
        "gpu.sm_clock": 1.98e9, "gpu.memory_clock": 2.619e9, "gpu.throttled": 0.0, "gpu.ecc_errors": 3.0,
        "gpu.pcie_bytes_per_s": 750_000.0, "gpu.nvlink_bytes_per_s": 2 * 1000 * 1024 / 2, "gpu.xid_errors": 2.0,
    }  # fmt: skip


def test_thermal_slowdown_counts_as_throttled_and_power_cap_does_not():
    assert GpuSource("a", nvml=FakeNvml(reasons=0x4)).read()["gpu.throttled"] == 0
    assert GpuSource("a", nvml=FakeNvml(reasons=0x44)).read()["gpu.throttled"] == 1


def test_unsupported_calls_are_left_out_and_missing_driver_reports_nothing():
    found = GpuSource("a", nvml=FakeNvml(missing=("nvmlDeviceGetFieldValues", "nvmlDeviceGetTotalEccErrors"))).read()
    assert "gpu.temperature" in found
    assert "gpu.ecc_errors" not in found
    nvml = FakeNvml(there=False)
    gpu = GpuSource("a", nvml=nvml)
    assert gpu.read() == {} == gpu.read()


def test_pynvml_has_every_name_that_is_used():
    import pynvml

    names = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML_")) and name != "NVML_ECC"]
    assert not [name for name in names if not hasattr(pynvml, name)]


# --- the machine ---


def test_rates_come_from_two_readings(tmp_path):
    now, total = [0.0], [0]

    class Times(tuple):
        user, system, idle, iowait = 4.0, 1.0, 0.0, 0.0

    class System:
        def Process(self):
            return SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=total[0] * 1.5, system=0.0),
                                   memory_info=lambda: SimpleNamespace(rss=5))  # fmt: skip

        def virtual_memory(self):
            return SimpleNamespace(available=9)

        def disk_usage(self, path):
            return SimpleNamespace(free=11)

        def cpu_times(self):
            found = Times((total[0] * 1.0, 0, 0, total[0] * 3.0))
            found.idle = total[0] * 3.0
            return found

        def disk_io_counters(self):
            return SimpleNamespace(read_bytes=total[0] * 10, write_bytes=total[0] * 20)

        def net_io_counters(self, pernic):
            one = SimpleNamespace(bytes_sent=total[0] * 7, bytes_recv=total[0] * 9)
            return {"lo": SimpleNamespace(bytes_sent=1e9, bytes_recv=1e9), "eth0": one, "eth1": one}

    source = HostSource(tmp_path, with_machine=True, system=System(), clock=lambda: now[0])
    assert source.of_process() == {"process.memory_bytes": 5.0}
    assert source.of_machine() == {"host.memory_free_bytes": 9.0, "disk.free_bytes": 11.0}
    now[0], total[0] = 2.0, 4
    assert source.of_process()["process.cpu"] == 3.0
    assert source.of_machine() == {
        "host.memory_free_bytes": 9.0, "disk.free_bytes": 11.0, "host.cpu": 0.25, "disk.read_bytes_per_s": 20.0,
        "disk.write_bytes_per_s": 40.0, "net.sent_bytes_per_s": 28.0, "net.received_bytes_per_s": 36.0,
    }  # fmt: skip
    assert HostSource(tmp_path, with_machine=False, system=System()).of_machine() == {}


def test_host_source_reads_this_machine(tmp_path):
    source = HostSource(tmp_path, with_machine=True)
    assert source.of_process()["process.memory_bytes"] > 2**20
    found = source.of_machine()
    assert found["disk.free_bytes"] > 0
    assert all(math.isfinite(value) for value in found.values())


def test_energy_of_other_machines_is_summed_and_a_silent_one_keeps_its_last_value():
    events = []
    joiner = ReportJoiner(10.0, events.append, [], None, lambda: 0.0)
    first = {"number": 0, "host": "a", "of_host": {"host.energy_joules": 5.0, "host.energy_missing": 0.0}}
    other = {"host.energy_joules": 7.0, "host.energy_estimated_j": 3.0, "host.energy_missing": 1.0}
    joiner.join([first, {"number": 0, "host": "b", "of_host": other}, {"number": 0}], 1, pace_only=False)
    joiner.join([first, {}, {"number": 1, "of_host": {"host.energy_missing": 2.0}}], 2, pace_only=False)
    keys = ("energy_others", "energy_others_j", "estimated_others_j")
    assert [events[0][key] for key in keys] == [[1, 1], 7.0, 3.0]
    assert [events[1][key] for key in keys] == [[1, 3], 7.0, 3.0]
