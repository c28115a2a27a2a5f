"""What torch, its allocator and NCCL are told before a rank computes on a GPU. What the user has set stays."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft import env
from weft.errors import PlanError, WeftWarning

#: The first compute capability with TF32.
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class GpuVariable:
    """A variable that a library reads when it first uses the GPU. or_name: another that says the same."""

    name: str
    value: str
    or_name: str = ""

    def setting(self) -> str:
        """Return the variable as it is set now, or as `prepare_gpu` will set it."""
        for name in (self.name, self.or_name):
            if name and (found := env.get(name)):
                return f"{name}={found}"
        return f"{self.name}={self.value}"


VARIABLES = (
    # Segments of the allocator grow, so that less memory is lost between tensors of many sizes.
    GpuVariable("PYTORCH_ALLOC_CONF", "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF"),
    # Collectives are started before kernels that wait beside them: they are short for the device and long for others.
    GpuVariable("TORCH_NCCL_HIGH_PRIORITY", "1"),
)


def prepare_gpu() -> None:
    """Set what libraries read, before this process first uses its GPU.

    Sums inside of products of bf16 and fp16 stay in fp32, also where a kernel splits a product: by default torch lets
    them be rounded in between.
    """
    for one in VARIABLES:
        if not (one.or_name and env.get(one.or_name)):
            env.default_for_libraries(**{one.name: one.value})
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def multiply_as_planned(precision: str, device: torch.device) -> None:
    """Have torch multiply fp32 numbers on a GPU as the plan says: exactly under fp32, rounded to TF32 under tf32.

    Its flags are the process's, so the newest mesh decides; other precisions leave them. Torch by itself rounds what
    convolutions and recurrent layers read. The flags have two generations of names: both are set, since torch refuses
    to read one where they disagree, as its compiler does.

    Raises:
        PlanError: under tf32, for a device without TF32.
    """
    if precision == "tf32" and (why := _without_tf32(device)):
        raise PlanError(f"precision=tf32: {why}. Use precision=fp32.")
    if precision not in ("fp32", "tf32") or device.type != "cuda":
        return
    backends: Any = torch.backends  # torch's types know only some of the flags
    products, rounds = backends.cuda.matmul, precision == "tf32"
    if not rounds and products.fp32_precision == "tf32":
        warnings.warn(
            "precision=fp32: torch was told to round products of fp32 to TF32, by this script or an earlier plan, and "
            "multiplies exactly from here on. Use precision=tf32 to have them rounded.",
            WeftWarning,
            stacklevel=3,
        )
    products.allow_tf32 = backends.cudnn.allow_tf32 = rounds
    word = "tf32" if rounds else "ieee"
    for one in (products, backends.cudnn.conv, backends.cudnn.rnn):
        one.fp32_precision = word


def _without_tf32(device: torch.device) -> str:
    """Why a device does not round to TF32; "" where it does."""
    if device.type != "cuda":
        return f"the {device.type} has no TF32, which is a format of NVIDIA's GPUs"
    if torch.version.hip:
        return "this GPU is AMD's, and TF32 is a format of NVIDIA's"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no TF32, which came with Ampere (compute capability 8.0)"
    return ""


def library_settings() -> list[str]:
    """Return what holds for a rank on a GPU that this process starts, one line each."""
    why = _without_tf32(torch.device("cuda", 0)) if torch.cuda.is_available() else ""
    rounded = f"precision=tf32 is refused: {why}" if why else "in TF32 under precision=tf32"
    enabled = [name for name, is_on in _attention().items() if is_on]
    guesses = "measured for every shape" if torch.backends.cudnn.benchmark else "as kernels.convolutions says"
    return [
        *(one.setting() for one in VARIABLES),
        f"products of fp32 exact under precision=fp32, {rounded}",
        f"cuDNN's algorithms {guesses}",
        f"attention by {', '.join(enabled)}, in torch's order or as kernels.attention says",
    ]


def _attention() -> dict[str, bool]:
    """Which kernels torch may take for attention, by the names that `kernels.attention` has for them."""
    told = torch.backends.cuda
    return {
        "flash": told.flash_sdp_enabled(),
        "efficient": told.mem_efficient_sdp_enabled(),
        "cudnn": told.cudnn_sdp_enabled(),
        "math": told.math_sdp_enabled(),
    }


def pick_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this rank. kind: "auto" (a GPU where there is one), "cpu" or "cuda".

    Raises:
        PlanError: where the machine has no GPU, or none for this rank.
    """
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise PlanError("launch.device=cuda: torch sees no GPU here. Use launch.device=cpu, or see `weft doctor`.")
        if local_rank >= torch.cuda.device_count():
            raise PlanError(
                f"launch.device={kind}: this is local rank {local_rank}, and there are {torch.cuda.device_count()} "
                f"GPUs. Start at most {torch.cuda.device_count()} ranks on this machine."
            )
        device = torch.device("cuda", local_rank)
        prepare_gpu()
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


# What the system says of its processor: NUMA nodes and their cores, where PCI devices hang, which cores are given.

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


# Keeping a rank near its GPU: its share of the cores of the NUMA node, unless somebody has chosen cores already.


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """Where a rank shall run. cores: None: where it is. text: for people, what holds and why."""

    cores: Cores | None
    text: str


def choose_cores(
    topology: Topology, allowed: Cores, gpus: Sequence[str], local_rank: int, *, apart: bool = False
) -> CoreChoice:
    """Return the cores of a rank: its share of those of its GPU's NUMA node.

    Args:
        topology: of this machine.
        allowed: the cores that this process may use now.
        gpus: PCI ids of the GPUs of this machine's ranks, by local rank.
        local_rank: of this one.
        apart: whether each rank may have a control group of its own, as under srun: its cores were chosen for it then.
    """
    nodes, given = topology.nodes(), topology.online() if apart else topology.given()
    if len(nodes) < 2:
        return CoreChoice(None, "not bound to cores: the machine has one NUMA node")
    if allowed < given:
        return CoreChoice(None, f"on cores {said(allowed)} as they were set, not bound by Weft")
    beside = [topology.node_of(gpu) for gpu in gpus]
    node = beside[local_rank]
    if node is None or not (near := nodes.get(node, Cores()) & allowed):
        where = "the system does not say where it hangs" if node is None else f"no core of NUMA node {node} is allowed"
        return CoreChoice(None, f"not bound to cores: GPU {gpus[local_rank]}: {where}")
    sharing = [rank for rank, other in enumerate(beside) if other == node]
    cores = _share(topology, near, sharing.index(local_rank), len(sharing))
    return CoreChoice(cores, f"bound to cores {said(cores)} of NUMA node {node}, where GPU {gpus[local_rank]} hangs")


def _share(topology: Topology, cores: Cores, place: int, count: int) -> Cores:
    """The place-th of `count` parts, in whole physical cores; all of them where there are too few."""
    physical = sorted({tuple(sorted(topology.threads_of(core) & cores)) for core in cores})
    if len(physical) < count:
        return cores
    first, last = (len(physical) * at // count for at in (place, place + 1))
    return Cores(core for threads in physical[first:last] for core in threads)


def bind(cores: Cores) -> None:
    """Let this process and what it starts run on these cores only: threads that were placed elsewhere stay there.

    OSError where the system does not allow it.
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
    """Return how many cores this rank has for itself: its share of them all, or those that it alone was given.

    num_ranks: on this machine.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // num_ranks)
    own = os.sched_getaffinity(0)
    try:
        is_narrowed = own < os.sched_getaffinity(os.getppid())
    except OSError:
        is_narrowed = False
    return len(own) if is_narrowed else max(1, len(own) // num_ranks)
