"""This machine as a profile names it: its processor, or its GPUs as torch sees them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.cuda import nccl

from weft.planner.measured import Machine, here


def this_machine(kind: str = "auto") -> Machine:
    """What is here now. kind: "cpu", "cuda", or "auto": GPUs where torch sees any."""
    host = here.this_host()
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return host
    found = torch.cuda.get_device_properties(0)
    release = ".".join(map(str, nccl.version()))
    return replace(
        host,
        kind="cuda",
        device=found.name,
        count=torch.cuda.device_count(),
        memory_bytes=found.total_memory,
        transports=(f"nccl {release}",),
    )
