"""Private names of torch in comm/, each with what it is for. Read in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

#: How many modes see operations now.
num_modes = torch._C._len_torch_dispatch_stack


def default_store() -> Any:
    """The store that the ranks met at: the hang watch leaves its words there. torch hands out no other."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What carries a group's traffic of a device. `dist.get_backend` gives a name for all devices together."""
    return group._get_backend(device)


def timeout_s(backend: Any) -> float:
    """After how many seconds a collective of gloo gives up, so that shared memory gives up as soon."""
    return backend.options._timeout.total_seconds()


def nccl_trace() -> Callable[[bool, bool], str] | None:
    """NCCL's flight record of collectives as JSON, for hangs; None where torch was built without NCCL."""
    return getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
