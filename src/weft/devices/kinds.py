"""The table of device kinds. It does not import torch, so configs and the planner can read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Backend of collectives whose tensors are copied through host memory.
HOST_BACKEND = "gloo"
#: Runs of Weft on a kind. here: its tests; others: runs that users reported; never: no run was reported.
Evidence = Literal["here", "others", "never"]

_HALVES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device, as `launch.device` names it.

    Attributes:
        name: value of `launch.device`.
        torch_type: type of its `torch.device`.
        hardware: the devices, for users.
        backend: backend of torch.distributed. With gloo, collectives copy through host memory.
        package: distribution that has the device; "torch" if a build of torch does.
        install: shell command that installs it, or a page.
        modules: modules whose import registers the device and its backend with torch.
        files: device files of its driver on Linux, as patterns.
        precisions: values of the plan's `precision`. Empty if unknown: all are tried.
        streams: True if work is asynchronous, in streams with events.
        graphs: True if Weft records its steps as graphs.
        compiles: True if torch.compile's default backend generates code for it.
        pins: True if copies from pinned host memory are asynchronous.
        evidence: runs of Weft on it.
        note: one sentence for the table of devices, or "".
    """

    name: str
    torch_type: str
    hardware: str
    backend: str
    package: str
    install: str
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    streams: bool = True
    graphs: bool = False
    compiles: bool = False
    pins: bool = False
    evidence: Evidence = "never"
    note: str = ""

    @property
    def through_host(self) -> bool:
        """True if collectives copy through host memory, because no backend moves the device's memory."""
        return self.backend == HOST_BACKEND and self.name != "cpu"


_KINDS = (
    DeviceKind(
        "cpu", "cpu", "any CPU", HOST_BACKEND, "torch", "pip install torch",
        precisions=("fp64", *_HALVES, "fp8"), streams=False, compiles=True, evidence="here",
    ),
    DeviceKind(
        "cuda", "cuda", "NVIDIA GPUs", "nccl", "torch", "pip install torch",
        files=("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/dxg"),
        precisions=("fp64", "fp32", "tf32", "bf16", "fp16", "fp8"), graphs=True, compiles=True, pins=True,
        note="Tests run plans on a simulated GPU.",
    ),
    DeviceKind(
        "rocm", "cuda", "AMD Instinct and Radeon GPUs", "nccl", "torch", "https://pytorch.org (build for ROCm)",
        files=("/dev/kfd",), precisions=("fp64", *_HALVES, "fp8"), graphs=True, compiles=True, pins=True,
        note="torch names these devices and their backend (RCCL) `cuda` and `nccl`.",
    ),
    DeviceKind(
        "xpu", "xpu", "Intel GPUs", "xccl", "torch",
        "pip install torch --index-url https://download.pytorch.org/whl/xpu",
        files=("/dev/dri/renderD*",), precisions=("fp64", *_HALVES), compiles=True, pins=True,
        note="Arc GPUs have no fp64.",
    ),
    DeviceKind(
        "npu", "npu", "Huawei Ascend", "hccl", "torch-npu", "pip install torch-npu", modules=("torch_npu",),
        files=("/dev/davinci*",), precisions=_HALVES, pins=True,
    ),
    DeviceKind(
        "hpu", "hpu", "Intel Gaudi", "hccl", "habana-torch-plugin", "https://docs.habana.ai",
        modules=("habana_frameworks.torch", "habana_frameworks.torch.distributed.hccl"), files=("/dev/accel/accel*",),
        precisions=_HALVES,
    ),
    DeviceKind(
        "mps", "mps", "Apple GPUs", HOST_BACKEND, "torch", "pip install torch", precisions=_HALVES, streams=False,
        note="One device for each machine.",
    ),
    DeviceKind(
        "tpu", "tpu", "Google TPUs", "tpu_dist", "torch-tpu", "pip install torch-tpu", modules=("torch_tpu",),
        files=("/dev/accel*", "/dev/vfio/[0-9]*"), precisions=("fp32", "bf16"),
        note="`launch.engine=jax` compiles the step for TPUs instead.",
    ),
    DeviceKind(
        "neuron", "neuron", "AWS Trainium", "neuron", "torch-neuronx",
        "pip install torch-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com",
        modules=("torch_neuronx",), files=("/dev/neuron*",), precisions=_HALVES,
    ),
)  # fmt: skip

#: The table of kinds by name.
KINDS = {kind.name: kind for kind in _KINDS}


def other_kind(torch_type: str, backend: str, streams: bool) -> DeviceKind:
    """Return the kind of a device that is not in the table, which a package registered as torch's PrivateUse1.

    Args:
        torch_type: the name that the package gave the device.
        backend: backend of torch.distributed for it, or gloo if the package registers none.
        streams: True if its module in torch has streams and events.
    """
    hardware = f"the device of the package that registers {torch_type!r}"
    return DeviceKind(torch_type, torch_type, hardware, backend, torch_type, "", streams=streams)


def noun(name: str) -> str:
    """Return the name of one device that a value of `launch.device` selects, such as "GPU"."""
    if name == "auto" or (name in KINDS and KINDS[name].torch_type == "cuda"):
        return "GPU"
    return f"{name} device"


def driver_files(name: str) -> tuple[str, ...] | None:
    """Return the patterns of device files without which torch has no device that `launch.device` selects.

    None if there are no such files, or if the kind's package should be imported to report that it is missing.
    """
    kind = KINDS.get(name)
    if name != "auto" and (kind is None or kind.package != "torch" or not kind.files):
        return None
    same = (one for one in KINDS.values() if kind is None or one.torch_type == kind.torch_type)
    return tuple(pattern for one in same for pattern in one.files)


def with_property(name: str) -> str:
    """Return the names of the kinds for which a property is true, such as "cuda and rocm"."""
    found = [kind.name for kind in _KINDS if getattr(kind, name)]
    return " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def obstacle(kind: DeviceKind, precision: str, *, graphs: bool, compiled: bool) -> str:
    """Return the reason why a kind of device cannot run a plan, or "" if it can.

    Args:
        kind: kind of device.
        precision, graphs, compiled: fields of the plan.
    """
    if kind.precisions and precision not in kind.precisions and precision != "tf32":  # tf32 depends on the GPU's model
        known = ", ".join(kind.precisions)
        return f"the plan has precision={precision}, and this kind computes in {known}. Use precision=fp32."
    if graphs and not kind.graphs:
        known = with_property("graphs")
        return f"the plan has graphs=on, and graphs are recorded on {known} only. Use graphs=off."
    if compiled and not kind.compiles:
        known = with_property("compiles")
        return f"the plan has compile=on, and torch.compile generates code for {known} only. Use compile=off."
    return ""
