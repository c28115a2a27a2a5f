"""Private names of torch in comm/, each with what it is for; and its collectives, with the types that torch leaves out.

Read in torch 2.11 and 2.13.
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

#: Copies of many tensors, on a GPU by few kernels.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch.ops.aten._foreach_copy_

#: How many modes see operations now.
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
#: The collectives, begun and not waited for. torch 2.13 renamed two; the old names warn there.
all_reduce: _Combine = _untyped.all_reduce
all_gather_single: _Gather = getattr(dist, "all_gather_single", _untyped.all_gather_into_tensor)
reduce_scatter_single: _Scatter = getattr(dist, "reduce_scatter_single", _untyped.reduce_scatter_tensor)
broadcast: _Send = _untyped.broadcast
all_to_all_single: _Exchange = _untyped.all_to_all_single
barrier: _Rendezvous = _untyped.barrier
all_gather: _GatherList = _untyped.all_gather


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes that a flat uint8 tensor holds."""
    values: Any = tensor
    return bytes(values.tolist())  # whose result has no type


def connect_store(timeout: timedelta) -> Store:
    """A connection of the caller's own to the store that the ranks met at. timeout: of each question."""
    store: Any = default_store()
    own: Store = store.clone()  # which torch's stubs leave out
    own.set_timeout(timeout)
    return own


def default_store() -> Store:
    """The store that the ranks met at: the hang watch leaves its words there. torch hands out no other."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: ProcessGroup, device: torch.device) -> Backend:
    """What carries a group's traffic of a device. `dist.get_backend` gives a name for all devices together."""
    return group._get_backend(device)


def timeout_s(backend: Backend) -> float:
    """After how many seconds a collective of gloo gives up, so that shared memory gives up as soon."""
    return backend.options._timeout.total_seconds()


def nccl_trace() -> Callable[[bool, bool], bytes] | None:
    """NCCL's flight record of collectives as JSON, for hangs; None where torch was built without NCCL."""
    return getattr(c10d, "_dump_nccl_trace_json", None)
