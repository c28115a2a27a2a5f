"""The device of a rank that torch trains, and where it runs on the processor: beside its GPU."""

from __future__ import annotations

import os
import sys

import torch

from weft.env import RankEnv
from weft.mesh import pick_device
from weft.mesh.cores import CoreChoice, Topology, bind, choose_cores, said


def device_of_rank(kind: str, numa: bool, place: RankEnv | None) -> torch.device:
    """Return the device of this rank; with `numa` the process is bound near it if that is a GPU.

    What was done about cores goes to stderr, in a rank of `weft train` its log. kind: as of `pick_device`, whose errors
    these are. place: this process among the ranks; None: it is the only one.
    """
    device = pick_device(kind, place.local_rank if place is not None else 0)
    if device.type == "cuda" and numa:
        print(f"rank {place.rank if place is not None else 0}: {stay_near_gpu(place).text}", file=sys.stderr)
    return device


def stay_near_gpu(place: RankEnv | None) -> CoreChoice:
    """Bind this process to its share of the cores of its GPU's NUMA node, if nobody has chosen cores already.

    Returns what holds now. place: this rank among those of the machine; None: it is the only one.
    """
    if sys.platform != "linux":
        return CoreChoice(None, f"not bound to cores: {sys.platform} offers no way")
    local_rank, count = (place.local_rank, place.local_world_size) if place is not None else (0, 1)
    gpus = [_pci_id(index) for index in range(min(count, torch.cuda.device_count()))]
    apart = place is not None and place.starter == "slurm"
    choice = choose_cores(Topology(), frozenset(os.sched_getaffinity(0)), gpus, local_rank, apart=apart)
    if choice.cores is None:
        return choice
    try:
        bind(choice.cores)
    except OSError as error:
        return CoreChoice(None, f"not bound to cores: the system refuses cores {said(choice.cores)} ({error.strerror})")
    # More threads than cores only get in each other's way.
    torch.set_num_threads(min(torch.get_num_threads(), len(choice.cores)))
    return choice


def _pci_id(index: int) -> str:
    gpu = torch.cuda.get_device_properties(index)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
