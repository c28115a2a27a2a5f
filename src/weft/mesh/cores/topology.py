"""What the system says of its processor: NUMA nodes and their cores, where PCI devices hang, which cores are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Cores = frozenset[int]


@dataclass(frozen=True, slots=True)
class Topology:
    """Read from the system's files, anew at each call. sys, proc: where those are."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")

    def nodes(self) -> dict[int, Cores]:
        """Return the NUMA nodes that have cores; empty where the system does not tell."""
        found: dict[int, Cores] = {}
        for folder in (self.sys / "devices/system/node").glob("node[0-9]*"):
            if cores := self._cores(folder / "cpulist"):
                found[int(folder.name.removeprefix("node"))] = cores
        return dict(sorted(found.items()))

    def node_of(self, pci: str) -> int | None:
        """Return the NUMA node of a PCI device such as "0000:3b:00.0"; None where the system does not tell."""
        try:
            node = int((self.sys / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def threads_of(self, core: int) -> Cores:
        """Return the logical cores that share a physical one with this, itself among them."""
        return self._cores(self.sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list") or Cores({core})

    def given(self) -> Cores:
        """Return the cores that this machine or its container gives to processes; empty where that is not told.

        The nearest control group that limits cores, or all that are online.
        """
        for folder in self._groups():
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
                if cores := self._cores(folder / name):
                    return cores
        return self.online()

    def online(self) -> Cores:
        """Return the cores of the whole machine; empty where that is not told."""
        return self._cores(self.sys / "devices/system/cpu/online")

    def _groups(self) -> list[Path]:
        """Folders of this process's control groups and of those around them, nearest first."""
        found: list[Path] = []
        try:
            lines = (self.proc / "self/cgroup").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if controllers and "cpuset" not in controllers.split(","):
                continue
            base = self.sys / "fs/cgroup" / ("cpuset" if controllers else "")
            inner = Path(path.lstrip("/"))
            found += [base / folder for folder in (inner, *inner.parents)]
        return found

    def _cores(self, file: Path) -> Cores:
        try:
            return read_cores(file.read_text())
        except (OSError, ValueError):
            return Cores()


def read_cores(text: str) -> Cores:
    """Return the cores of a list as the system writes them, such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return Cores(found)


def said(cores: Cores) -> str:
    """Return cores as the system writes them: "0-3,8"."""
    ordered = sorted(cores)
    starts = [core for core in ordered if core - 1 not in cores]
    ends = [core for core in ordered if core + 1 not in cores]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
