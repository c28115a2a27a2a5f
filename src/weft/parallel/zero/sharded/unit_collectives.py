"""How fully_shard communicates under Weft: through `weft.comm`, and only when all ranks mean the same unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from weft.comm import all_gather, reduce_scatter
from weft.comm.links import StreamWait
from weft.comm.wire import Coder, Coders
from weft.errors import CommError
from weft.mesh import Axis
from weft.parallel.private_torch import GatherBase, ReduceBase, wrap_waits
from weft.parallel.zero.sharded.gather_order import Act, Order
from weft.spec.plan import Plan


class _Buffers:
    """Buffers of fully_shard's collectives."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(_Buffers, GatherBase):
    """all_gather of one unit's parameters."""

    def __init__(self, unit: int, axis: Axis, order: Order):
        self._unit = unit
        self._axis = axis
        self._order = order
        self._there: tuple[torch.cuda.Event, torch.device] | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor`; complete when it returns (on CUDA: in the order of the current stream)."""
        self._order.meet(Act.GATHER, self._unit, input_tensor.numel())
        try:
            all_gather(input_tensor, self._axis, out=output_tensor)
        except CommError as error:
            raise self._order.explain(error) from error
        if output_tensor.is_cuda:
            self._there = torch.cuda.Event(enable_timing=True), output_tensor.device
            self._there[0].record()

    def until_there(self, wait: Callable[[], None]) -> None:
        """Wait for the last gather, and tell the ledger how long the compute stream had to.

        fully_shard's wait copies out of the buffer too, which is no waiting: what counts is when the gather was there.
        """
        there, self._there = self._there, None
        stream_wait = None if there is None else StreamWait.begin(there[1])
        wait()
        if there is not None and stream_wait is not None:
            self._axis.record(self._axis.name, "unshard", 0, stream_wait.end(there[0]), 0, 0)


class UnitReduce(_Buffers, ReduceBase):
    """reduce_scatter of one unit's gradients. wire: what travels in place of them."""

    def __init__(self, unit: int, axis: Axis, order: Order, wire: Coder):
        self._unit = unit
        self._axis = axis
        self._order = order
        self._wire = wire

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum `input_tensor` over the ranks and leave this rank's part in `output_tensor`."""
        if op != dist.ReduceOp.SUM:
            raise CommError(
                f"fully_shard reduces the gradients of a unit by {op}, and Weft can only sum them. Use "
                "torch 2.11 or later."
            )
        self._order.meet(Act.REDUCE, self._unit, input_tensor.numel())
        try:
            reduce_scatter(input_tensor, self._axis, out=output_tensor, wire=self._wire)
        except CommError as error:
            raise self._order.explain(error) from error


def unit_wires(coders: Coders, unit: int, plan: Plan) -> tuple[Coder, Coder]:
    """Return what a unit's gradients travel as to the ranks that divide it, and over replicas.

    Over the outermost data axis, dp_replicate if there is one, it is what the plan's `compress` names.

    Args:
        coders: of the engine.
        unit: its number.
        plan: of the mesh.
    """
    shard, replicas = f"unit {unit} shard", f"unit {unit} replicas"
    if plan.compress == "none":
        return coders[shard], coders[replicas]
    if plan.dp_replicate == 1:
        return coders.outer(shard), coders[replicas]
    return coders[shard], coders.outer(replicas)


def connect_unit(module: FSDPModule, unit: int, axis: Axis, order: Order, wire: Coder, device: torch.device) -> None:
    """Let a unit communicate through `weft.comm`.

    Args:
        module: made by fully_shard.
        unit: its number.
        axis: that it is divided over.
        order: of what all ranks do there.
        wire: what travels in place of gradients.
        device: of this rank.
    """
    gather = UnitGather(unit, axis, order)
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(UnitReduce(unit, axis, order, wire))
    if device.type == "cuda":
        wrap_waits(module, gather.until_there, functools.partial(_until_summed, axis, device))


def _until_summed(axis: Axis, device: torch.device, wait: Callable[[], None]) -> None:
    """Wait for sums at the end of a backward, and tell the ledger how long that took."""
    stream_wait = StreamWait.begin(device)
    wait()
    if stream_wait is not None:
        axis.record(axis.name, "sums", 0, stream_wait.end(), 0, 0)
