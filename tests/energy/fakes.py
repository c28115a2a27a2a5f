"""Fake trees of /sys and a fake NVML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

RANGE_UJ = 262_143_328_850


def rapl(sysfs: Path, name: str = "intel-rapl:0", title: str = "package-0", microjoules: int = 0) -> Path:
    """Write one RAPL domain and return its counter file."""
    folder = sysfs / "class" / "powercap" / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{title}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class NvmlError(Exception):
    pass


@dataclass
class FakeGpu:
    """State of a fake GPU. A value of None is not supported."""

    millijoules: float | None = 0.0
    milliwatts: float | None = 300_000.0
    utilization: int | None = 50
    name: str = "NVIDIA H100 80GB HBM3"
    limit: int = 700_000
    constraints: tuple[int, int] = (200_000, 700_000)


class FakeNvml:
    """The part of pynvml that meters and limits use."""

    NVMLError = NvmlError

    def __init__(self, may_write: bool = True, **gpus: FakeGpu):
        self.gpus = {f"GPU-{name}": gpu for name, gpu in gpus.items()}
        self.may_write, self.limits_set = may_write, list[tuple[str, int]]()

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.gpus:
            raise NvmlError("Not Found")
        return uuid

    def _value(self, handle, field):
        value = getattr(self.gpus[handle], field)
        if value is None:
            raise NvmlError("Not Supported")
        return value

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._value(handle, "millijoules")

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._value(handle, "milliwatts")

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._value(handle, "utilization"))

    def nvmlDeviceGetName(self, handle):
        return self._value(handle, "name")

    def nvmlDeviceGetPowerManagementLimit(self, handle):
        return self._value(handle, "limit")

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle):
        return self._value(handle, "constraints")

    def nvmlDeviceSetPowerManagementLimit(self, handle, milliwatts):
        if not self.may_write:
            raise NvmlError("Insufficient Permissions")
        self.limits_set.append((handle, milliwatts))
        self.gpus[handle].limit = milliwatts
