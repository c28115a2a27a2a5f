"""GPUs, as NVIDIA's management library sees them; torch may see fewer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from weft.cli.doctor.line import CheckLine
from weft.units import format_bytes


def gpus() -> Iterator[CheckLine]:
    """Driver and, for each GPU: name, memory, power limit, PCIe link, NVLinks that are up."""
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if torch.version.cuda:
            remedy = "Install the NVIDIA driver, or give the container its GPUs (docker run --gpus all)."
            yield CheckLine("gpus", "driver", f"none found, though torch is built for CUDA ({error})", "warn", remedy)
        else:
            yield CheckLine("gpus", "driver", "no NVIDIA driver here; training will use the CPU")
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
        yield CheckLine("gpus", "driver", f"{driver}, up to CUDA {cuda // 1000}.{cuda % 1000 // 10}; {count} GPUs")
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        for index, handle in enumerate(handles):
            yield CheckLine("gpus", f"gpu {index}", _describe(pynvml, handle))
        try:
            pci_ids = [_pci_id(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
        except pynvml.NVMLError as error:
            yield CheckLine("gpus", "cores", f"the driver does not tell where the GPUs hang ({error})")
        else:
            yield from cores(pci_ids)
    finally:
        pynvml.nvmlShutdown()
    if count:
        yield settings()
    if count and not torch.cuda.is_available():
        cause = "CUDA_VISIBLE_DEVICES hides them" if torch.version.cuda else "this torch is built for the CPU"
        remedy = "Unset CUDA_VISIBLE_DEVICES." if torch.version.cuda else "Install a CUDA build: https://pytorch.org"
        yield CheckLine("gpus", "torch", f"sees no GPU: {cause}, or the driver is too old", "fail", remedy)


def settings() -> CheckLine:
    """What torch and NCCL are told on a GPU: by the environment, and by Weft where that says nothing."""
    from weft.mesh import library_settings

    return CheckLine("gpus", "settings", "; ".join(library_settings()))


def cores(pci_ids: list[str]) -> Iterator[CheckLine]:
    """Yield where `weft train` would run the ranks of these GPUs on the processor: one line, or one for each of them.

    pci_ids: of one GPU each, such as "0000:3b:00.0".
    """
    from weft.mesh.cores import Topology, choose_cores

    if not hasattr(os, "sched_getaffinity"):
        return
    allowed = frozenset(os.sched_getaffinity(0))
    chosen = [choose_cores(Topology(), allowed, pci_ids, rank) for rank in range(len(pci_ids))]
    for rank, choice in enumerate(chosen):
        if choice.text not in [other.text for other in chosen[:rank]]:
            name = f"cores of gpu {rank}" if len({other.text for other in chosen}) > 1 else "cores"
            yield CheckLine("gpus", name, f"a rank is {choice.text}")


def _pci_id(bus_id: str | bytes) -> str:
    """As the system's files have it: with four digits of the domain where four are enough."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _describe(nvml: Any, gpu: Any) -> str:
    def read(call: str, *args: Any) -> Any:
        try:
            return getattr(nvml, call)(gpu, *args)
        except nvml.NVMLError:
            return None  # not every GPU, driver or virtual machine answers every question

    parts = [str(read("nvmlDeviceGetName") or "unnamed")]
    memory = read("nvmlDeviceGetMemoryInfo")
    if memory is not None:
        parts.append(f"{format_bytes(memory.free)} free of {format_bytes(memory.total)}")
    power = read("nvmlDeviceGetPowerManagementLimit")
    if power is not None:
        parts.append(f"power limit {power // 1000} W")
    width, most = read("nvmlDeviceGetCurrPcieLinkWidth"), read("nvmlDeviceGetMaxPcieLinkWidth")
    if width is not None:
        parts.append(f"PCIe {read('nvmlDeviceGetCurrPcieLinkGeneration')}.0 x{width} of x{most}")
    links = [read("nvmlDeviceGetNvLinkState", link) for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))]
    parts.append(f"NVLink {sum(1 for link in links if link)} up")
    if read("nvmlDeviceGetMigMode") not in (None, [0, 0], (0, 0)):
        parts.append("MIG on")
    return ", ".join(parts)
