"""Limits of power and clocks: of GPUs through NVML, of CPUs through cpufreq. Their first state can be restored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.energy.meters import Unmeasured, load_nvml
from weft.errors import ConfigError

#: Maximum number of values between the lowest limit and the current one, and the smallest difference of power (W).
_MOST_VALUES, _LEAST_WATTS = 20, 5


class NoRights(Exception):
    """Raised if this user may not set a limit."""


class DeviceLimit(Protocol):
    """One limit of all devices of a run on this machine.

    Attributes:
        name: name with unit, such as "power limit (W)".
        values: possible values in ascending order. The last one is the current state.
        state: JSON values from which `restore` sets the current state again.
    """

    name: str
    values: tuple[int, ...]
    state: Mapping[str, Any]

    def check_rights(self) -> None:
        """Raise NoRights if this user may not set the limit. Nothing is set."""
        ...

    def set(self, value: int) -> None:
        """Set the limit of each device to `value`, or to its first limit if that is lower.

        Raises:
            NoRights: if this user may not set it.
            OSError: if a device refuses the value.
        """
        ...

    def command(self, value: int) -> str:
        """Return the command with which an administrator sets this value for good."""
        ...


def _values(lowest: int, current: int, least: int) -> tuple[int, ...]:
    step = max(least, -(-(current - lowest) // _MOST_VALUES // least) * least) if current > lowest else least
    return tuple(sorted({*range(current, lowest - 1, -step)}))


def is_administrator() -> bool:
    """Return True if this process is of the root user, whom NVML allows to set limits."""
    return os.geteuid() == 0


class _Gpus:
    """Access to GPUs by UUID, with errors of NVML as OSError, or NoRights."""

    def __init__(self, nvml: Any, uuids: Sequence[str]):
        self.nvml, self.uuids = nvml, tuple(uuids)

    def call(self, name: str, uuid: str, *args: Any) -> Any:
        nvml = self.nvml
        try:
            return getattr(nvml, name)(nvml.nvmlDeviceGetHandleByUUID(uuid), *args)
        except nvml.NVMLError as error:
            if "ermission" in str(error):
                raise NoRights(f"{uuid}: {error}") from None
            raise OSError(f"{uuid}: {name}: {error}") from None


class PowerLimit:
    """Power limit of GPUs in watts."""

    name = "power limit (W)"

    def __init__(self, nvml: Any, uuids: Sequence[str], may_set: Callable[[], bool] = is_administrator):
        self._gpus, self._may_set = _Gpus(nvml, uuids), may_set
        first = {uuid: int(self._gpus.call("nvmlDeviceGetPowerManagementLimit", uuid)) for uuid in uuids}
        ranges = [self._gpus.call("nvmlDeviceGetPowerManagementLimitConstraints", uuid) for uuid in uuids]
        self._first = first
        self.state: Mapping[str, Any] = {"kind": "gpu_power", "first": first}
        lowest = -(-max(low for low, _ in ranges) // 1000)
        self.values = _values(lowest, max(first.values()) // 1000, _LEAST_WATTS)

    def check_rights(self) -> None:
        """Raise NoRights unless this is the root user."""
        if not self._may_set():
            raise NoRights("only the root user may set power limits of GPUs")

    def set(self, value: int) -> None:
        """Set the limit of all GPUs, in watts."""
        for uuid, first in self._first.items():
            self._gpus.call("nvmlDeviceSetPowerManagementLimit", uuid, min(1000 * value, first))

    def command(self, value: int) -> str:
        """Return the command of nvidia-smi."""
        return f"sudo nvidia-smi -i {','.join(self._first)} -pl {value}"


class ClockLimit:
    """Maximum graphics clock of GPUs in MHz. NVML does not report an earlier lock, so restoring removes any lock."""

    name = "locked clock (MHz)"

    def __init__(self, nvml: Any, uuids: Sequence[str], may_set: Callable[[], bool] = is_administrator):
        self._gpus, self._may_set = _Gpus(nvml, uuids), may_set
        clocks: set[int] | None = None
        for uuid in uuids:
            memory = max(self._gpus.call("nvmlDeviceGetSupportedMemoryClocks", uuid))
            found = {int(one) for one in self._gpus.call("nvmlDeviceGetSupportedGraphicsClocks", uuid, memory)}
            clocks = found if clocks is None else clocks & found
        ordered = sorted(clocks or ())
        if len(ordered) < 2:
            raise OSError("the GPUs have no two clocks in common")
        stride = max(1, len(ordered) // _MOST_VALUES)
        self._lowest = ordered[0]
        self.values = tuple(sorted(ordered[::-1][::stride]))
        self.state: Mapping[str, Any] = {"kind": "gpu_clock", "first": dict.fromkeys(uuids, 0)}

    def check_rights(self) -> None:
        """Raise NoRights unless this is the root user."""
        if not self._may_set():
            raise NoRights("only the root user may lock clocks of GPUs")

    def set(self, value: int) -> None:
        """Lock the clocks of all GPUs up to `value`. The highest value removes the lock."""
        for uuid in self._gpus.uuids:
            if value == self.values[-1]:
                self._gpus.call("nvmlDeviceResetGpuLockedClocks", uuid)
            else:
                self._gpus.call("nvmlDeviceSetGpuLockedClocks", uuid, self._lowest, value)

    def command(self, value: int) -> str:
        """Return the command of nvidia-smi."""
        return f"sudo nvidia-smi -i {','.join(self._gpus.uuids)} -lgc {self._lowest},{value}"


class CpuFrequency:
    """Maximum frequency of all CPU cores in MHz, through cpufreq."""

    name = "CPU frequency (MHz)"

    def __init__(self, sysfs: Path):
        folders = sorted((sysfs / "devices" / "system" / "cpu" / "cpufreq").glob("policy*"))
        if not folders:
            raise OSError(f"this machine has no cpufreq policy ({sysfs}/devices/system/cpu/cpufreq)")
        self._first = {str(folder / "scaling_max_freq"): _number(folder / "scaling_max_freq") for folder in folders}
        lowest = -(-max(_number(folder / "cpuinfo_min_freq") for folder in folders) // 1000)
        self.values = _values(lowest, max(self._first.values()) // 1000, 50)
        self.state: Mapping[str, Any] = {"kind": "cpu_frequency", "first": self._first}

    def check_rights(self) -> None:
        """Raise NoRights if a policy is not writable."""
        for file in self._first:
            if not os.access(file, os.W_OK):
                raise NoRights(f"this user may not write {file}")

    def set(self, value: int) -> None:
        """Set the maximum frequency of all cores, in MHz."""
        for file, first in self._first.items():
            _write(Path(file), min(1000 * value, first))

    def command(self, value: int) -> str:
        """Return a shell command."""
        return f"echo {1000 * value} | sudo tee {' '.join(self._first)}"


def _number(file: Path) -> int:
    text = file.read_text(errors="replace").strip()
    if not text.isdecimal() or len(text) > 18:
        raise OSError(f"{file}: {text[:40]!r} is no frequency")
    return int(text)


def _write(file: Path, value: int) -> None:
    try:
        file.write_text(f"{value}\n")
    except PermissionError as error:
        raise NoRights(f"{file}: {error.strerror}") from None


def limit_of(kind: str, gpus: Sequence[str], sysfs: Path, nvml: Any = None) -> DeviceLimit:
    """Return the limit to tune: "power" or "clock" of GPUs, "cpu", or "auto": power with GPUs, else cpu.

    Raises:
        ConfigError: if the devices do not have it.
    """
    wanted = ("power" if gpus else "cpu") if kind == "auto" else kind
    try:
        if wanted == "cpu":
            return CpuFrequency(sysfs)
        if not gpus:
            raise OSError("the run uses no GPU on this machine")
        nvml = load_nvml() if nvml is None else nvml
        return PowerLimit(nvml, gpus) if wanted == "power" else ClockLimit(nvml, gpus)
    except (OSError, Unmeasured, NoRights) as error:
        raise ConfigError(
            f"--by={wanted}: it cannot be limited here: {error}. Use another of power, clock and cpu, or another "
            "machine."
        ) from None


# Restoring, also by the guard process, from the state in a file.


def restore(state: Mapping[str, Any], sysfs: Path, nvml: Any = None) -> None:
    """Set all devices to their first limits. All are tried, even if one fails.

    Raises:
        OSError: if a device could not be restored.
        NoRights: if this user may not restore it.
        ValueError: if the state is damaged.
    """
    kind, first = state.get("kind"), state.get("first")
    if kind not in ("gpu_power", "gpu_clock", "cpu_frequency") or not isinstance(first, dict):
        raise ValueError("the state names no limit")
    errors: list[Exception] = []
    for name, value in first.items():
        try:
            _restore_one(str(kind), str(name), int(value), sysfs, nvml)
        except (OSError, NoRights, ValueError, Unmeasured) as error:
            errors.append(error)
    if errors:
        raise errors[0] if not isinstance(errors[0], Unmeasured) else OSError(str(errors[0]))


def _restore_one(kind: str, name: str, value: int, sysfs: Path, nvml: Any) -> None:
    if kind == "cpu_frequency":
        file, root = Path(name), sysfs / "devices" / "system" / "cpu" / "cpufreq"
        if file.parent.parent != root or file.name != "scaling_max_freq" or ".." in file.parts:
            raise ValueError(f"{name} is no file of cpufreq")
        _write(file, value)
        return
    gpus = _Gpus(load_nvml() if nvml is None else nvml, (name,))
    if kind == "gpu_power":
        gpus.call("nvmlDeviceSetPowerManagementLimit", name, value)
    else:
        gpus.call("nvmlDeviceResetGpuLockedClocks", name)


def read_state(file: Path) -> Mapping[str, Any] | None:
    """Return the state of an unfinished tuning, or None without one.

    Raises:
        ValueError: if the file is damaged.
    """
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is no table")
    return found
