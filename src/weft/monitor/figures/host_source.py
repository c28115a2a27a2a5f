"""CPU, memory, disk and network of a rank's process and of its machine, through psutil."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Interfaces whose traffic stays on the machine.
_LOOPBACK = ("lo", "lo0")


class HostSource:
    """Reads the process, and for one rank of each machine the machine.

    Args:
        folder: whose disk's free space is told.
        with_machine: whether this rank reads the machine's figures too.
        system: in the place of psutil, for tests.
        clock: in seconds, for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        with_machine: bool,
        system: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if system is None:
            import psutil

            system = psutil
        self._system, self._folder, self._clock = system, folder, clock
        self._process = system.Process()
        self._with_machine = with_machine
        self._before: dict[str, tuple[float, float]] = {}

    def of_process(self) -> Mapping[str, float]:
        """Return the figures of this process; those that the system does not tell are left out."""
        times = self._process.cpu_times()
        found = {"process.memory_bytes": float(self._process.memory_info().rss)}
        cores = self._rate("cpu", times.user + times.system)
        return found if cores is None else {**found, "process.cpu": cores}

    def of_machine(self) -> Mapping[str, float]:
        """Return the figures of the machine; {} on ranks that do not read them."""
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
        """How fast a total grows, per second since it was last asked for; None the first time, and where it fell."""
        now = self._clock()
        before = self._before.get(name)
        self._before[name] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])


def host_name() -> str:
    """Return what tells this machine from others in figures."""
    return os.uname().nodename
