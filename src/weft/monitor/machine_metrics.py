"""Metrics of a GPU through nvidia-ml-py, and of the process and the machine through psutil.

Metrics that a GPU or system does not report are omitted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Reasons for a low GPU clock that indicate a problem: heat, a power brake, a failing supply. A power cap is no
#: problem.
_TROUBLE = (
    "nvmlClocksEventReasonHwThermalSlowdown",
    "nvmlClocksEventReasonSwThermalSlowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown",
)
_XID_EVENTS = 64  # maximum number at each reading


class GpuSource:
    """Reads one GPU.

    Args:
        uuid: the GPU's UUID, as torch reports it, with or without "GPU-"; or its NVML index.
        nvml: replaces pynvml in tests.
        clock: returns the current time (s); replaced in tests.
    """

    def __init__(self, uuid: str | int, *, nvml: Any = None, clock: Callable[[], float] = time.monotonic):
        self._uuid, self._clock = uuid, clock
        self._nvml = nvml
        self._handle: Any = None
        self._is_lost = False
        self._events: Any = None
        self._num_xid = 0
        self._nvlink: tuple[float, float] | None = None

    def read(self) -> Mapping[str, float]:
        """Return the current metrics that the GPU reports; {} if pynvml is missing or could not open the GPU."""
        if self._is_lost or not self._open():
            return {}
        nvml: Any = self._nvml
        gpu = self._handle
        readers: dict[str, Callable[[], float | None]] = {
            "gpu.utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "gpu.memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "gpu.power": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "gpu.temperature": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "gpu.sm_clock": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6,
            "gpu.memory_clock": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1e6,
            "gpu.throttled": lambda: bool(
                nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & sum(getattr(nvml, name, 0) for name in _TROUBLE)
            ),
            "gpu.ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "gpu.pcie_bytes_per_s": lambda: (
                1000
                * sum(
                    nvml.nvmlDeviceGetPcieThroughput(gpu, way)
                    for way in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
                )
            ),
            "gpu.nvlink_bytes_per_s": self._nvlink_rate,
            "gpu.xid_errors": self._xid_errors,
        }
        found: dict[str, float] = {}
        for name, read in readers.items():
            # Read each metric separately: a GPU without NVLink still has a temperature.
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                if (value := read()) is not None:
                    found[name] = float(value)
        return found

    def _open(self) -> bool:
        if self._handle is not None:
            return True
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self._is_lost = True
                return False
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            if isinstance(self._uuid, int):
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(self._uuid)
            else:
                name = self._uuid if self._uuid.startswith(("GPU-", "MIG-")) else f"GPU-{self._uuid}"
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError:
            self._is_lost = True
            return False
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            self._events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        return True

    def _nvlink_rate(self) -> float | None:
        """Return the NVLink bytes per second since the last call, over all links and both directions.

        Return None in the first call, if the driver does not report the counters, or if they have decreased.
        """
        nvml, total = self._nvml, 0.0
        fields = [nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX]
        for value in nvml.nvmlDeviceGetFieldValues(self._handle, fields):
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                return None
            total += value.value.ullVal * 1024
        now, before = self._clock(), self._nvlink
        self._nvlink = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])

    def _xid_errors(self) -> float | None:
        if self._events is None:
            return None
        for _ in range(_XID_EVENTS):
            try:
                self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # a timeout: no report is left
                break
            self._num_xid += 1
        return self._num_xid


# CPU, memory, disk and network of a rank's process and of its machine, through psutil.

#: Interfaces whose traffic stays on the machine.
_LOOPBACK = ("lo", "lo0")


class HostSource:
    """Reads metrics of the process, and on one rank of each machine, metrics of the machine.

    Args:
        folder: folder on the disk whose free space is reported.
        with_machine: whether this rank reads the machine's metrics too.
        system: replaces psutil in tests.
        clock: returns the current time (s); replaced in tests.
    """

    def __init__(
        self, folder: Path, *, with_machine: bool, system: Any = None, clock: Callable[[], float] = time.monotonic
    ):
        if system is None:
            import psutil

            system = psutil
        self._system, self._folder, self._clock = system, folder, clock
        self._process = system.Process()
        self._with_machine = with_machine
        self._before: dict[str, tuple[float, float]] = {}

    def of_process(self) -> Mapping[str, float]:
        """Return the process's resident memory, and the number of CPU cores that it used since the last call.

        The first call returns no number of cores.
        """
        times = self._process.cpu_times()
        found = {"process.memory_bytes": float(self._process.memory_info().rss)}
        cores = self._rate("cpu", times.user + times.system)
        return found if cores is None else {**found, "process.cpu": cores}

    def of_machine(self) -> Mapping[str, float]:
        """Return the metrics of the machine that the system reports; {} if not `with_machine`.

        Rates are means since the last call, and are missing in the first one.
        """
        if not self._with_machine:
            return {}
        system, found = self._system, dict[str, float]()
        found["host.memory_free_bytes"] = float(system.virtual_memory().available)
        found["disk.free_bytes"] = float(system.disk_usage(str(self._folder)).free)
        times = system.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        spent, free = self._rate("all", sum(times[:8])), self._rate("idle", idle)
        if spent:
            found["host.cpu"] = min(1.0, max(0.0, 1.0 - (free or 0.0) / spent))
        disks = system.disk_io_counters()
        if disks is not None:  # a container may hide them
            self._add_rate(found, "disk.read_bytes_per_s", disks.read_bytes)
            self._add_rate(found, "disk.write_bytes_per_s", disks.write_bytes)
        nets = [one for name, one in system.net_io_counters(pernic=True).items() if name not in _LOOPBACK]
        self._add_rate(found, "net.sent_bytes_per_s", sum(one.bytes_sent for one in nets))
        self._add_rate(found, "net.received_bytes_per_s", sum(one.bytes_recv for one in nets))
        return found

    def _add_rate(self, found: dict[str, float], name: str, total: float) -> None:
        rate = self._rate(name, total)
        if rate is not None:
            found[name] = rate

    def _rate(self, name: str, total: float) -> float | None:
        """Return the growth of a total per second since the last call, or None the first time or if it decreased."""
        now = self._clock()
        before = self._before.get(name)
        self._before[name] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])
