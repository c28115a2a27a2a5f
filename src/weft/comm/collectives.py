"""Collectives by axis. Over an axis of size 1 each is the identity and costs nothing."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from weft.mesh import Axis

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective under way; `wait()` returns its tensor."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None):
        self._tensor = tensor
        self._work = work

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._tensor


def all_reduce(tensor: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Combine `tensor` over the axis, in place. op: "sum", "max" or "min". Returns the tensor."""
    return start_all_reduce(tensor, axis, op).wait() if axis.size > 1 else tensor


def start_all_reduce(tensor: torch.Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin `all_reduce`; the tensor must not be touched before `wait()` of what this returns."""
    if axis.size == 1:
        return Pending(tensor, None)
    start = time.perf_counter()
    work = dist.all_reduce(tensor, op=_OPS[op], group=axis.group, async_op=True)
    axis.record(axis.name, "all_reduce", tensor.nbytes, time.perf_counter() - start)
    return Pending(tensor, work)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Copy `tensor` of the axis's rank `source` to all its ranks, in place. Returns the tensor."""
    if axis.size > 1:
        start = time.perf_counter()
        dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
        axis.record(axis.name, "broadcast", tensor.nbytes, time.perf_counter() - start)
    return tensor


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis are here."""
    if axis.size > 1:
        start = time.perf_counter()
        dist.barrier(group=axis.group)
        axis.record(axis.name, "barrier", 0, time.perf_counter() - start)
