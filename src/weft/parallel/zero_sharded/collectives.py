"""Collectives of fully_shard under Weft. They use `weft.comm`, and run only if all ranks process the same unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.collectives import all_gather, reduce_scatter, start_reduce_scatter
from weft.comm.connect import sends_short_summands
from weft.comm.mesh import Axis, Mesh
from weft.comm.transports.link import StreamWait
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.codes import RowCodes, RowSlice
from weft.config.fields.wire_formats import WireSpec, wire_spec
from weft.config.plan import Plan
from weft.devices import access
from weft.errors import CommError
from weft.parallel.private_torch import GatherBase, ReduceBase, gathered_parts, wrap_waits
from weft.parallel.zero_sharded.hooks import Act, Order


class UnitGather(GatherBase):
    """All-gather of one unit's parameters.

    Args:
        order: order of all ranks' operations on the axis.
        wire: wire format of the weights, or None to send them unencoded.
        parts: returns, for each all-gather, (shape, module, parameter name) of this rank's shards.
        near: axis of the all-gather in backward, if the unit keeps secondary shards (ZeRO++ hpZ).
    """

    def __init__(
        self,
        unit: int,
        axis: Axis,
        order: Order,
        wire: WireSpec | None,
        parts: Callable[[], list[list[tuple[torch.Size, nn.Module, str]]]],
        near: Axis | None = None,
    ):
        self._unit, self._axis, self._order, self._wire, self._parts = unit, axis, order, wire, parts
        self._near = near
        self._codes: dict[tuple[int, torch.dtype], RowCodes] = {}
        self._there: tuple[torch.Event, torch.device] | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather into `output_tensor`. It is complete when this returns (with streams: in the current stream's order).

        Raises CommError if ranks start different operations.
        """
        self._order.check(Act.GATHER, self._unit, input_tensor.numel())
        try:
            if self._near is not None and group is self._near.group:
                all_gather(input_tensor, self._near, out=output_tensor)  # secondary shards, already rounded
            elif self._wire is None:
                all_gather(input_tensor, self._axis, out=output_tensor)
            else:  # every rank decodes all parts, its own too, so all compute with the same weights
                codec = self._codec(input_tensor, self._wire)
                codes = codec.encode(input_tensor)
                everyones = torch.empty(self._axis.size * codec.num_bytes, dtype=torch.uint8, device=codes.device)
                all_gather(codes, self._axis, out=everyones)
                codec.decode(everyones.view(self._axis.size, -1), output_tensor.view(self._axis.size, -1))
        except CommError as error:
            raise self._order.explain(error) from error
        if (there := access.record_event(output_tensor.device, timed=True)) is not None:
            self._there = there, output_tensor.device

    def _codec(self, flat: torch.Tensor, wire: WireSpec) -> RowCodes:
        key = flat.numel(), flat.dtype
        if key not in self._codes:
            every = [[_wire_part(wire, *part) for part in parts] for parts in self._parts()]
            fitting = [one for one in every if sum(part.rows * part.columns for part in one) == flat.numel()]
            if len(fitting) != 1:
                raise CommError(
                    f"gather={wire.name}: unit {self._unit} gathers {flat.numel()} values, and its weights of "
                    f"{[len(one) for one in every]} do not say which these are. Use gather=none."
                )
            self._codes[key] = RowCodes(wire, fitting[0], flat.dtype)
        return self._codes[key]

    def wait_all(self, wait: Callable[[], None]) -> None:
        """Wait for the last all-gather, and record the compute stream's wait time in the ledger.

        fully_shard's wait also copies out of the buffer. The copy is not counted, because the recorded wait ends with
        the all-gather.
        """
        there, self._there = self._there, None
        stream_wait = None if there is None else StreamWait.begin(there[1])
        wait()
        if there is not None and stream_wait is not None:
            self._axis.record(self._axis.name, "unshard", 0, stream_wait.end(there[0]), 0, 0)


def _wire_part(wire: WireSpec, shape: torch.Size, module: nn.Module, name: str) -> RowSlice:
    """Return the encoding of one shard. In fp8, only weights that will be rounded to fp8 are encoded."""
    whole = RowSlice.of(shape)
    rounds = name == "weight" and getattr(module, "_weft_float8", None) is not None
    return whole._replace(is_exact=True) if wire.name == "fp8" and not rounds else whole


class UnitReduce(ReduceBase):
    """Reduce-scatter of one unit's gradients.

    order: order of all ranks' operations on the axis. grads: dtype of all input gradients, if it has fewer bits than
    the dtype of sums and gradients are communicated in it; None to copy gradients into the dtype of sums first.
    """

    def __init__(self, unit: int, axis: Axis, order: Order, wire: Coder, grads: torch.dtype | None = None):
        self._unit, self._axis, self._order, self._wire, self._grads = unit, axis, order, wire, grads
        self._has_input = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor, in turn for the gradients and for their sums.

        fully_shard requests both in the dtype of sums, and copies gradients into the first.
        """
        is_input, self._has_input = not self._has_input, not self._has_input
        return torch.empty(*size, dtype=self._grads if is_input and self._grads else dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum `input_tensor` over the ranks, and store this rank's part in `output_tensor`.

        Raises CommError if ranks start different operations, or if `op` is not SUM.
        """
        if op != dist.ReduceOp.SUM:
            raise CommError(
                f"fully_shard reduces the gradients of a unit by {op}, and Weft can only sum them. Use "
                "torch 2.11 or later."
            )
        self._order.check(Act.REDUCE, self._unit, input_tensor.numel())
        try:
            if input_tensor.dtype == output_tensor.dtype:
                reduce_scatter(input_tensor, self._axis, out=output_tensor, wire=self._wire)
            else:
                parts = Parts([(0, input_tensor)], input_tensor.numel(), output_tensor.dtype)
                start_reduce_scatter(parts, self._axis, output_tensor, wire=self._wire).wait()
        except CommError as error:
            raise self._order.explain(error) from error


def unit_wires(coders: Coders, unit: int, plan: Plan) -> tuple[Coder, Coder]:
    """Return the coders of a unit's gradients, over the shard axis and over replicas.

    The plan's `compress` applies to the outermost data axis, which is dp_replicate if its size is above 1.
    """
    shard, replicas = f"unit {unit} shard", f"unit {unit} replicas"
    if plan.compress == "none":
        return coders[shard], coders[replicas]
    if plan.dp_replicate == 1:
        return coders.outer(shard), coders[replicas]
    return coders[shard], coders.outer(replicas)


def connect_unit(
    module: FSDPModule, unit: int, axis: Axis, order: Order, wire: Coder, mesh: Mesh, grads: torch.dtype | None = None
) -> None:
    """Make a unit communicate through `weft.comm`.

    Args:
        order: order of all ranks' operations on the axis.
        mesh: mesh of the ranks; the `gather` field of its plan is the wire format of weights.
        grads: dtype of all gradients to reduce, if it has fewer bits than the dtype of sums; else None.
    """
    plan, device = mesh.plan, mesh.device
    near = mesh[f"dp_shard/{plan.second_shards}"] if plan.second_shards else None
    weights = None if plan.gather == "none" else wire_spec(plan.gather)
    gather = UnitGather(unit, axis, order, weights, functools.partial(gathered_parts, module), near)
    module.set_custom_all_gather(gather)
    short = grads if grads is not None and sends_short_summands(axis, device) else None
    module.set_custom_reduce_scatter(UnitReduce(unit, axis, order, wire, short))
    # Divide by 1 to get sums, because fully_shard computes means by default.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if access.has_streams(device):
        wrap_waits(module, gather.wait_all, functools.partial(_until_summed, axis, device))


def _until_summed(axis: Axis, device: torch.device, wait: Callable[[], None]) -> None:
    """Wait for sums at the end of a backward, and record the wait time in the ledger."""
    stream_wait = StreamWait.begin(device)
    wait()
    if stream_wait is not None:
        axis.record(axis.name, "sums", 0, stream_wait.end(), 0, 0)
