"""How fully_shard communicates under Weft: through `weft.comm`, and only when all ranks mean the same unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import all_gather, reduce_scatter
from weft.comm.wire import Coders
from weft.errors import CommError
from weft.mesh import Axis
from weft.parallel.private_torch import GatherBase, ReduceBase
from weft.parallel.zero.sharded.gather_order import Act, Order


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


class UnitReduce(_Buffers, ReduceBase):
    """reduce_scatter of one unit's gradients. coders: what travels in place of them."""

    def __init__(self, unit: int, axis: Axis, order: Order, coders: Coders):
        self._unit = unit
        self._axis = axis
        self._order = order
        self._wire = coders[f"unit {unit} shard"]

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
