"""Settings of torch, its allocator and NCCL for a GPU rank, and the CPU cores of a rank. The user's values are kept."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft import env
from weft.devices import access
from weft.errors import PlanError, WeftWarning

#: The lowest compute capability with TF32.
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class GpuVariable:
    """An environment variable that a library reads when it first uses the GPU. `or_name` is an alias of it."""

    name: str
    value: str
    or_name: str = ""

    def setting(self) -> str:
        """Return the variable's current setting, or the default that `prepare_gpu` will set."""
        for name in (self.name, self.or_name):
            if name and (found := env.get(name)):
                return f"{name}={found}"
        return f"{self.name}={self.value}"


VARIABLES = (
    # Growing allocator segments reduce fragmentation between tensors of many sizes.
    GpuVariable("PYTORCH_ALLOC_CONF", "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF"),
    # Collectives start before kernels that are queued in parallel. They are short for this device, and other ranks
    # wait for them.
    GpuVariable("TORCH_NCCL_HIGH_PRIORITY", "1"),
)


def prepare_gpu() -> None:
    """Set the environment variables VARIABLES, and make matmuls of bf16 and fp16 accumulate in fp32.

    torch's default allows lower precision if a kernel splits a matmul. Call this before the process first uses its GPU.
    """
    for one in VARIABLES:
        if not (one.or_name and env.get(one.or_name)):
            env.default_for_libraries(**{one.name: one.value})
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def multiply_as_planned(precision: str, device: torch.device) -> None:
    """Set how torch multiplies fp32 on a GPU: exactly with precision=fp32, rounded to TF32 with precision=tf32.

    The flags are global to the process, so the newest mesh decides. Other precisions leave them unchanged. By default
    torch rounds the inputs of convolutions and recurrent layers to TF32. The flags have two generations of names. Both
    are set, because torch and its compiler raise an error if the two disagree.

    Warns if precision=fp32 makes matmuls exact that were rounded to TF32 before. Raises PlanError for precision=tf32 on
    a device without TF32.
    """
    if precision == "tf32" and (why := _without_tf32(device)):
        raise PlanError(f"precision=tf32: {why}. Use precision=fp32.")
    if precision not in ("fp32", "tf32") or not access.has_cuda_kernels(device):
        return
    backends: Any = torch.backends  # torch's types know only some of the flags
    products, rounds = backends.cuda.matmul, precision == "tf32"
    if not rounds and products.fp32_precision == "tf32":
        warnings.warn(
            "precision=fp32: torch was set to round products of fp32 to TF32, by this script or an earlier plan. "
            "From here on they are exact. Use precision=tf32 to have them rounded.",
            WeftWarning,
            stacklevel=3,
        )
    products.allow_tf32 = backends.cudnn.allow_tf32 = rounds
    word = "tf32" if rounds else "ieee"
    for one in (products, backends.cudnn.conv, backends.cudnn.rnn):
        one.fp32_precision = word


def _without_tf32(device: torch.device) -> str:
    """Return the reason why a device does not support TF32, or "" if it does."""
    if not access.has_cuda_kernels(device):
        return f"the {device.type} has no TF32, which is a format of NVIDIA's GPUs"
    if torch.version.hip:
        return "this GPU is AMD's, and TF32 is a format of NVIDIA's"
    if access.capability(device) < _LEAST_CAPABILITY:
        return f"{access.device_name(device)} has no TF32, which came with Ampere (compute capability 8.0)"
    return ""


def library_settings() -> list[str]:
    """Return the library settings of a GPU rank that this process starts, as text lines."""
    device = access.find_device("auto", 0)
    why = _without_tf32(device) if access.is_accelerator(device) else ""
    rounded = f"precision=tf32 is refused: {why}" if why else "in TF32 under precision=tf32"
    enabled = [name for name, is_on in _attention().items() if is_on]
    guesses = "measured for every shape" if torch.backends.cudnn.benchmark else "as kernels.convolutions says"
    return [
        *(one.setting() for one in VARIABLES),
        f"products of fp32 exact under precision=fp32, {rounded}",
        f"cuDNN's algorithms {guesses}",
        f"attention by {', '.join(enabled)}, in torch's order or from kernels.attention",
    ]


def _attention() -> dict[str, bool]:
    """Return which attention kernels torch may use, by their names in `kernels.attention`."""
    told = torch.backends.cuda
    return {
        "flash": told.flash_sdp_enabled(),
        "efficient": told.mem_efficient_sdp_enabled(),
        "cudnn": told.cudnn_sdp_enabled(),
        "math": told.math_sdp_enabled(),
    }


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device of this rank. An accelerator becomes torch's current device, prepared by `prepare_gpu`.

    name: a value of `launch.device`. Raises PlanError as `weft.devices.access.find_device` does.
    """
    device = access.find_device(name, local_rank)
    if access.has_cuda_kernels(device):
        prepare_gpu()
    if access.is_accelerator(device):
        access.select(device)
    return device


# CPU topology as the system reports it: NUMA nodes and their cores, nodes of PCI devices, allowed cores.

Cores = frozenset[int]


@dataclass(frozen=True, slots=True)
class Topology:
    """CPU topology, read from the system's files at each call. `sys` and `proc` are the roots of those files."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")

    def nodes(self) -> dict[int, Cores]:
        """Return the cores of each NUMA node that has any. Empty if the system does not report them."""
        found: dict[int, Cores] = {}
        for folder in (self.sys / "devices/system/node").glob("node[0-9]*"):
            if cores := self._cores(folder / "cpulist"):
                found[int(folder.name.removeprefix("node"))] = cores
        return dict(sorted(found.items()))

    def node_of(self, pci: str) -> int | None:
        """Return the NUMA node of a PCI device such as "0000:3b:00.0", or None if the system does not report it."""
        try:
            node = int((self.sys / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def threads_of(self, core: int) -> Cores:
        """Return the logical cores that share a physical core with `core`, including `core`."""
        return self._cores(self.sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list") or Cores({core})

    def allowed_cores(self) -> Cores:
        """Return the cores that the machine or its container allows. Empty if the system does not report them.

        These are the cores of the nearest control group that limits cores, or all online cores.
        """
        for folder in self._groups():
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
                if cores := self._cores(folder / name):
                    return cores
        return self.online()

    def online(self) -> Cores:
        """Return the online cores of the machine. Empty if the system does not report them."""
        return self._cores(self.sys / "devices/system/cpu/online")

    def _groups(self) -> list[Path]:
        """Return the folders of this process's control groups and their parents, nearest first."""
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
    """Parse a core list of the system, such as "0-3,8". Raises ValueError for other text."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return Cores(found)


def format_cores(cores: Cores) -> str:
    """Return cores in the system's list format, such as "0-3,8"."""
    ordered = sorted(cores)
    starts = [core for core in ordered if core - 1 not in cores]
    ends = [core for core in ordered if core + 1 not in cores]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


# Binding a rank near its GPU: its share of the NUMA node's cores, unless cores were already chosen.


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """The cores of a rank, or None to keep the current ones. `text` is the reason, for the user."""

    cores: Cores | None
    text: str


def choose_cores(
    topology: Topology, allowed: Cores, gpus: Sequence[str], local_rank: int, *, apart: bool = False
) -> CoreChoice:
    """Return the cores of a rank: its share of the cores of its GPU's NUMA node.

    `cores` is None if there is only one NUMA node, if the cores of this process were limited before, or if the GPU's
    node is unknown or has no allowed core. If the node has fewer cores than ranks, each rank gets all of them.

    Args:
        topology: CPU topology of this machine.
        allowed: cores on which this process may run.
        gpus: PCI ids of the GPUs of this machine's ranks, by local rank.
        local_rank: index of the rank on this machine.
        apart: True if each rank may have a separate control group, as under srun. `allowed` is then compared with the
            machine's online cores, not with the control group's.
    """
    nodes, given = topology.nodes(), topology.online() if apart else topology.allowed_cores()
    if len(nodes) < 2:
        return CoreChoice(None, "not bound to cores: the machine has one NUMA node")
    if allowed < given:
        return CoreChoice(None, f"on cores {format_cores(allowed)} as they were set, not bound by Weft")
    beside = [topology.node_of(gpu) for gpu in gpus]
    node = beside[local_rank]
    if node is None or not (near := nodes.get(node, Cores()) & allowed):
        where = (
            "the system does not report its NUMA node" if node is None else f"no core of NUMA node {node} is allowed"
        )
        return CoreChoice(None, f"not bound to cores: GPU {gpus[local_rank]}: {where}")
    sharing = [rank for rank, other in enumerate(beside) if other == node]
    cores = _share(topology, near, sharing.index(local_rank), len(sharing))
    return CoreChoice(
        cores, f"bound to cores {format_cores(cores)} of NUMA node {node}, where GPU {gpus[local_rank]} hangs"
    )


def _share(topology: Topology, cores: Cores, place: int, count: int) -> Cores:
    """Return share `place` of `count` equal shares of the cores, in physical cores; all cores if there are too few."""
    physical = sorted({tuple(sorted(topology.threads_of(core) & cores)) for core in cores})
    if len(physical) < count:
        return cores
    first, last = (len(physical) * at // count for at in (place, place + 1))
    return Cores(core for threads in physical[first:last] for core in threads)


def bind(cores: Cores) -> None:
    """Run this process and its children on these cores only. Threads with another affinity keep it.

    Raises OSError if the system does not allow it.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    for task in Path("/proc/self/task").iterdir():
        try:
            if os.sched_getaffinity(int(task.name)) == before:
                os.sched_setaffinity(int(task.name), cores)
        except OSError:
            continue  # it has ended meanwhile


def cores_of_rank(num_ranks: int) -> int:
    """Return how many cores this rank may use: all cores of this process if its parent has more, else an equal share.

    num_ranks: ranks on this machine.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // num_ranks)
    own = os.sched_getaffinity(0)
    try:
        is_narrowed = own < os.sched_getaffinity(os.getppid())
    except OSError:
        is_narrowed = False
    return len(own) if is_narrowed else max(1, len(own) // num_ranks)
