"""Private names of torch that comm uses, each with its purpose, and torch's collectives with complete types.

Checked against torch 2.11 and 2.13.
"""

# This file is where private names are used.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, Store
from torch.distributed import ProcessGroup, ReduceOp, Work

#: Copies many tensors, with few kernels on a GPU.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch.ops.aten._foreach_copy_

#: Returns the number of active dispatch modes.
num_modes = torch._C._len_torch_dispatch_stack


class _Combine(Protocol):
    def __call__(
        self, tensor: torch.Tensor, /, *, op: ReduceOp.RedOpType, group: ProcessGroup, async_op: Literal[True]
    ) -> Work: ...


class _Gather(Protocol):
    def __call__(
        self, out: torch.Tensor, source: torch.Tensor, /, *, group: ProcessGroup, async_op: Literal[True]
    ) -> Work: ...


class _Scatter(Protocol):
    def __call__(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        /,
        *,
        op: ReduceOp.RedOpType,
        group: ProcessGroup,
        async_op: Literal[True],
    ) -> Work: ...


class _Send(Protocol):
    def __call__(self, tensor: torch.Tensor, /, *, src: int, group: ProcessGroup, async_op: Literal[True]) -> Work: ...


class _Exchange(Protocol):
    def __call__(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        receive: list[int] | None,
        send: list[int] | None,
        /,
        *,
        group: ProcessGroup,
        async_op: Literal[True],
    ) -> Work: ...


class _GatherList(Protocol):
    def __call__(
        self, parts: list[torch.Tensor], own: torch.Tensor, /, *, group: ProcessGroup, async_op: Literal[True]
    ) -> Work: ...


class _Rendezvous(Protocol):
    def __call__(self, *, group: ProcessGroup, async_op: Literal[True]) -> Work: ...


_untyped: Any = dist
#: Asynchronous collectives. torch 2.13 renamed two; the old names warn there.
all_reduce: _Combine = _untyped.all_reduce
all_gather_single: _Gather = getattr(dist, "all_gather_single", _untyped.all_gather_into_tensor)
reduce_scatter_single: _Scatter = getattr(dist, "reduce_scatter_single", _untyped.reduce_scatter_tensor)
broadcast: _Send = _untyped.broadcast
all_to_all_single: _Exchange = _untyped.all_to_all_single
barrier: _Rendezvous = _untyped.barrier
all_gather: _GatherList = _untyped.all_gather


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the contents of a flat uint8 tensor as bytes."""
    values: Any = tensor
    return bytes(values.tolist())  # whose result has no type


def connect_store(timeout: timedelta) -> Store:
    """Return a new connection to the ranks' rendezvous store. `timeout` applies to each request."""
    store: Any = default_store()
    own: Store = store.clone()  # which torch's stubs leave out
    own.set_timeout(timeout)
    return own


def default_store() -> Store:
    """Return the ranks' rendezvous store, in which the hang watch stores its messages. torch exposes no other."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: ProcessGroup, device: torch.device) -> Backend:
    """Return the group's backend for a device. `dist.get_backend` returns one name for all devices."""
    return group._get_backend(device)


def timeout_s(backend: Backend) -> float:
    """Return the timeout (s) of gloo's collectives, so that the shared-memory transport can use the same one."""
    return backend.options._timeout.total_seconds()


def nccl_trace() -> Callable[[bool, bool], bytes] | None:
    """Return the function that dumps NCCL's flight recorder as JSON, or None if torch was built without NCCL."""
    return getattr(c10d, "_dump_nccl_trace_json", None)
