"""Energy meters of one device: RAPL packages, NVML counters, sums of power samples, and estimates.

A meter never returns 0 for an unknown energy: a device without any reading raises `Unmeasured`, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from weft.config.cluster import device_by_torch_name
from weft.config.energy import drawn_watts

Label = Literal["measured", "estimated", "unmeasured"]
Clock = Callable[[], float]

#: Maximum plausible power (W) of a CPU package and of a GPU. A counter that grows faster was reset.
_MOST_PACKAGE_W, _MOST_GPU_W = 2000.0, 5000.0
#: Longest gap (s) between two power samples that is still integrated.
_LONGEST_GAP_S = 30.0


class Unmeasured(Exception):
    """Raised if a device's energy cannot be read. The message has the reason."""


class DeviceMeter(Protocol):
    """Energy of one device.

    Attributes:
        name: the device, such as "package-0" or a GPU's UUID.
        label: "measured" or "estimated".
        basis: source of the readings, or the formula of an estimate.
        notes: messages about readings that are missing, since the last time that the list was cleared.
    """

    name: str
    label: Label
    basis: str
    notes: list[str]

    def read(self) -> float:
        """Return the joules since the first call.

        Raises:
            Unmeasured: if the device cannot be read now.
        """
        ...


class _Counter:
    """Sums the differences of a hardware counter, in joules. Resets, wraps and gaps are handled and noted."""

    label: Label = "measured"

    def __init__(self, name: str, basis: str, read: Callable[[], float], most_w: float, range_j: float, clock: Clock):
        self.name, self.basis, self.notes = name, basis, list[str]()
        self._read_counter, self._most_w, self._range_j, self._clock = read, most_w, range_j, clock
        self._last: tuple[float, float] | None = None  # time and counter of the last reading
        self._joules = 0.0

    def read(self) -> float:
        now, value = self._clock(), self._read_counter()
        before, self._last = self._last, (now, value)
        if before is None:
            return self._joules
        elapsed, grown = now - before[0], value - before[1]
        most = self._most_w * (elapsed + 1.0)  # counters are updated up to a second late
        if self._range_j and most > self._range_j:
            self.notes.append(
                f"{self.name}: no reading for {elapsed:.0f} s, in which its counter may have wrapped; the energy "
                "between is unmeasured"
            )
            return self._joules
        if grown < 0 and self._range_j:
            grown += self._range_j
        if not 0 <= grown <= most:
            self.notes.append(
                f"{self.name}: its counter was reset or jumped; the energy of {elapsed:.0f} s is unmeasured"
            )
            return self._joules
        self._joules += grown
        return self._joules


class _PowerSum:
    """Integrates power over time: samples by the trapezoidal rule, or means since the last call (`are_means`)."""

    def __init__(
        self, name: str, label: Label, basis: str, watts: Callable[[], float], clock: Clock, *, are_means: bool = False
    ):
        self.label: Label = label
        self.name, self.basis, self.notes = name, basis, list[str]()
        self._watts, self._clock, self._are_means = watts, clock, are_means
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    def read(self) -> float:
        now, watts = self._clock(), self._watts()
        before, self._last = self._last, (now, watts)
        if before is None:
            return self._joules
        elapsed = now - before[0]
        if elapsed > _LONGEST_GAP_S:
            self.notes.append(f"{self.name}: no power sample for {elapsed:.0f} s; the energy between is unmeasured")
        else:
            self._joules += elapsed * (watts if self._are_means else (watts + before[1]) / 2)
        return self._joules


# CPU packages through RAPL.


def package_meters(sysfs: Path, clock: Clock = time.monotonic) -> list[DeviceMeter]:
    """Return a meter for each CPU package of the machine.

    Only the domains "package-N" are read: their subdomains (core, uncore) are parts of them, "psys" contains them, and
    the control type intel-rapl-mmio repeats them. DRAM is not included.

    Args:
        sysfs: the folder /sys, or another one in tests.
        clock: seconds, for tests.

    Raises:
        Unmeasured: if there is no package, or one may not be read.
    """
    found: dict[str, DeviceMeter] = {}
    for folder in sorted((sysfs / "class" / "powercap").glob("intel-rapl:*")):
        if folder.name.count(":") != 1:
            continue
        name = _read_text(folder / "name")
        if name.startswith("package-") and name not in found:
            range_j = _read_joules(folder / "max_energy_range_uj")
            found[name] = _rapl(name, folder / "energy_uj", range_j, clock)
    if not found:
        raise Unmeasured(f"this machine has no RAPL counter of a CPU package ({sysfs}/class/powercap)")
    return list(found.values())


def _rapl(name: str, file: Path, range_j: float, clock: Clock) -> DeviceMeter:
    _read_joules(file)  # raises the reason if it is unreadable
    return _Counter(name, "RAPL counter", lambda: _read_joules(file), _MOST_PACKAGE_W, range_j, clock)


#: Decimal digits of a 64-bit counter.
_MOST_DIGITS = 20


def _read_joules(file: Path) -> float:
    text = _read_text(file)
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise Unmeasured(f"{file}: {text[:40]!r} is no number of microjoules")
    return int(text) / 1e6


def _read_text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except PermissionError:
        raise Unmeasured(f"{file}: permission denied (an administrator can allow it: chmod a+r {file})") from None
    except OSError as error:
        raise Unmeasured(f"{file}: {error.strerror}") from None


def package_estimate(watts: float, utilization: Callable[[], float], clock: Clock = time.monotonic) -> DeviceMeter:
    """Return an estimate of all CPU packages of a machine.

    Args:
        watts: power of all packages at full load.
        utilization: returns the share of CPU time in use since the last call, 0 to 1.
        clock: seconds, for tests.
    """
    basis = f"estimate: {watts:g} W x (0.3 + 0.7 x CPU utilization)"
    return _PowerSum("packages", "estimated", basis, lambda: drawn_watts(watts, utilization()), clock, are_means=True)


# GPUs through NVML.


def gpu_meter(nvml: Any, uuid: str, rated_watts: float | None, clock: Clock = time.monotonic) -> DeviceMeter:
    """Return a meter of one GPU: its energy counter, else a sum of power samples, else an estimate.

    Args:
        nvml: the module pynvml, initialized, or a replacement in tests.
        uuid: the GPU's UUID, with or without "GPU-".
        rated_watts: power at full load for an estimate; None takes it from the data sheet.
        clock: seconds, for tests.

    Raises:
        Unmeasured: if neither can be read.
    """
    name = _full_name(uuid)
    handle = _call(nvml, name, nvml.nvmlDeviceGetHandleByUUID, name)

    def millijoules() -> float:
        return _call(nvml, name, nvml.nvmlDeviceGetTotalEnergyConsumption, handle) / 1e3

    def watts() -> float:
        return _call(nvml, name, nvml.nvmlDeviceGetPowerUsage, handle) / 1e3

    def busy() -> float:
        return _call(nvml, name, nvml.nvmlDeviceGetUtilizationRates, handle).gpu / 100

    if _works(millijoules):
        return _Counter(name, "NVML energy counter", millijoules, _MOST_GPU_W, 0.0, clock)
    if _works(watts):
        return _PowerSum(name, "measured", "sum of NVML power samples", watts, clock)
    busy()
    if rated_watts is None:
        title = _call(nvml, name, nvml.nvmlDeviceGetName, handle)
        known = device_by_torch_name(title if isinstance(title, str) else title.decode())
        if known is None or known.watts is None:
            raise Unmeasured(f"{name}: no energy or power counter, and its rated power is unknown (energy.gpu_watts)")
        rated_watts = known.watts
    rated = rated_watts
    basis = f"estimate: {rated:g} W x (0.3 + 0.7 x GPU utilization)"
    return _PowerSum(name, "estimated", basis, lambda: drawn_watts(rated, busy()), clock)


def _full_name(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _works(read: Callable[[], float]) -> bool:
    try:
        read()
    except Unmeasured:
        return False
    return True


def _call(nvml: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except nvml.NVMLError as error:
        raise Unmeasured(f"{name}: {error}") from None


def load_nvml() -> Any:
    """Return the module pynvml, initialized.

    Raises:
        Unmeasured: if it is missing, or there is no driver.
    """
    try:
        import pynvml
    except ImportError:
        raise Unmeasured("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    _call(pynvml, "NVML", pynvml.nvmlInit)
    return pynvml


def gpu_meters(
    nvml: Any, uuids: Sequence[str], rated_watts: float | None, clock: Clock = time.monotonic
) -> tuple[list[DeviceMeter], dict[str, str]]:
    """Return a meter for each distinct GPU, and the reasons of GPUs without one, by UUID."""
    found, reasons = list[DeviceMeter](), dict[str, str]()
    for uuid in dict.fromkeys(map(_full_name, uuids)):
        try:
            found.append(gpu_meter(nvml if nvml is not None else load_nvml(), uuid, rated_watts, clock))
        except Unmeasured as reason:
            reasons[uuid] = str(reason)
    return found, reasons
