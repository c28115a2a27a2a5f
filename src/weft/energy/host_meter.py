"""The energy of one machine: all meters of a run's devices there, read together, by one rank of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.energy.meters import DeviceMeter, Unmeasured, gpu_meters, package_estimate, package_meters

#: Seconds between two readings of the thread: often enough for sums of power samples and for counters that wrap.
_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class HostReading:
    """Joules of a machine since its meter was made, and the part of them that is estimated."""

    joules: float
    estimated_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterSettings:
    """Rated power (W) of all CPU packages of a machine and of one GPU, for estimates; None if unknown."""

    cpu_watts: float | None = None
    gpu_watts: float | None = None


class HostMeter:
    """Reads all meters of a machine. Safe to call from several threads.

    A meter that cannot be read keeps its last value, with a note when it fails and when it works again.

    Args:
        meters: one meter for each device.
        unmeasured: reasons of devices without a meter, by device.
    """

    def __init__(self, meters: Sequence[DeviceMeter], unmeasured: dict[str, str]):
        self.meters, self.unmeasured = tuple(meters), dict(unmeasured)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._values = dict.fromkeys((meter.name for meter in self.meters), 0.0)
        self._failing: set[str] = set()
        self._notes: list[str] = []
        self._thread: threading.Thread | None = None
        self.read()

    @property
    def works(self) -> bool:
        """True if at least one device is measured or estimated."""
        return bool(self.meters)

    def read(self) -> HostReading:
        """Read all meters and return their sum."""
        with self._lock:
            for meter in self.meters:
                self._read(meter)
            estimated = sum(self._values[meter.name] for meter in self.meters if meter.label == "estimated")
            return HostReading(sum(self._values.values()), estimated)

    def _read(self, meter: DeviceMeter) -> None:
        try:
            self._values[meter.name] = meter.read()
        except Unmeasured as reason:
            if meter.name not in self._failing:
                self._failing.add(meter.name)
                self._notes.append(f"{meter.name} cannot be read: {reason}; its energy is missing until it can")
        else:
            if meter.name in self._failing:
                self._failing.discard(meter.name)
                self._notes.append(f"{meter.name} can be read again")
        self._notes += meter.notes
        meter.notes.clear()

    def take_notes(self) -> list[str]:
        """Return the notes about missing readings since the last call."""
        with self._lock:
            found, self._notes = self._notes, []
            return found

    def describe(self) -> list[dict[str, str]]:
        """Return name, label and basis of each device, for events. The basis of an unmeasured one is the reason."""
        found = [{"name": one.name, "label": one.label, "basis": one.basis} for one in self.meters]
        return found + [{"name": name, "label": "unmeasured", "basis": why} for name, why in self.unmeasured.items()]

    def start(self) -> None:
        """Read every second in a thread until `close`."""
        self._thread = threading.Thread(target=self._keep_reading, name="weft-energy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be called more than once."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None

    def _keep_reading(self) -> None:
        while not self._end.wait(_EVERY_S):
            self.read()


def host_meter(
    gpus: Sequence[str],
    settings: MeterSettings = MeterSettings(),
    *,
    sysfs: Path = Path("/sys"),
    nvml: Any = None,
    no_packages: str = "",
    utilization: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> HostMeter:
    """Return the meter of this machine.

    Args:
        gpus: UUIDs of the run's GPUs on this machine. Each distinct one is read once.
        settings: rated powers for estimates.
        sysfs: the folder /sys, or another one in tests.
        nvml: replaces pynvml in tests.
        no_packages: reason not to read the CPU packages, or "".
        utilization: returns the share of CPU time in use since the last call; by default from psutil.
        clock: seconds, for tests.
    """
    meters, unmeasured = gpu_meters(nvml, gpus, settings.gpu_watts, clock)
    if no_packages:
        return HostMeter(meters, {**unmeasured, "packages": no_packages})
    try:
        meters += package_meters(sysfs, clock)
    except Unmeasured as reason:
        if settings.cpu_watts is None:
            unmeasured["packages"] = f"{reason}. energy.cpu_watts makes an estimate"
        else:
            meters.append(package_estimate(settings.cpu_watts, utilization or _cpu_share(), clock))
    return HostMeter(meters, unmeasured)


def _cpu_share() -> Callable[[], float]:
    import psutil

    psutil.cpu_percent()  # starts the interval of the next call
    return lambda: psutil.cpu_percent() / 100
