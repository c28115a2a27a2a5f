"""How fully_shard communicates under Weft: through `weft.comm`, and only when all ranks mean the same unit.

Blocks are alike, so a rank that skips one would gather its shard of block 3 together with another rank's shard of
block 4, and compute with weights that never existed. Every gather and reduction therefore says first what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import all_gather, reduce_scatter
from weft.errors import CommError
from weft.mesh import Axis


class Act(IntEnum):
    """What a rank is about to do with a unit."""

    GATHER = 0
    REDUCE = 1
    SUM = 2
    END = 3

    def told(self, unit: str) -> str:
        """In words, for an error."""
        if self is Act.END:
            return "ends the step"
        return f"{('gathers the weights', 'reduces the gradients', 'sums the gradients')[self]} of {unit}"


class Order:
    """Compares, over one axis, what each rank does next. Costs one collective of three numbers a rank.

    On CPU a disagreement raises before any data moves. On other devices the comparison is looked at one call later,
    so that the host does not wait: still before any update of the weights.
    """

    def __init__(self, axis: Axis, units: Sequence[str], device: torch.device):
        self._axis = axis
        self._units = units
        self._late = device.type != "cpu"
        self._unread: torch.Tensor | None = None

    def meet(self, act: Act, unit: int = 0, num_elements: int = 0) -> None:
        """Say what comes; CommError, on all ranks of the axis, where one comes for something else."""
        if self._axis.size == 1:
            return
        mine = torch.tensor([act, unit, num_elements], dtype=torch.float64)
        plans = all_gather(mine, self._axis).view(self._axis.size, 3)
        if self._late:
            self._unread, plans = plans, self._unread
        self._compare(plans)
        if act is Act.END and self._late:
            self._unread, plans = None, self._unread
            self._compare(plans)

    def _compare(self, plans: torch.Tensor | None) -> None:
        if plans is None or bool((plans == plans[0]).all()):
            return
        rows = [(Act(int(act)), int(unit), int(size)) for act, unit, size in plans.tolist()]
        ranks = self._axis.ranks
        other = next(index for index, row in enumerate(rows) if row != rows[0])
        (act, unit, size), (other_act, other_unit, other_size) = rows[0], rows[other]
        ours, theirs = act.told(self._units[unit]), other_act.told(self._units[other_unit])
        if (act, unit) == (other_act, other_unit):
            raise CommError(
                f"rank {ranks[0]} {ours} in {size} elements and rank {ranks[other]} in {other_size}: the ranks used "
                f"different parameters of it in this step. Use the same ones on all ranks; where one has nothing to "
                f"compute, multiply its output by zero."
            )
        raise CommError(
            f"rank {ranks[0]} {ours} while rank {ranks[other]} {theirs}: the ranks call different modules, and with "
            f"zero=3 each call needs all ranks. Call the same modules in the same order on all of them; where one has "
            f"nothing to compute, multiply its output by zero."
        )


class _Buffers:
    """Buffers of fully_shard's collectives."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(_Buffers):
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
        all_gather(input_tensor, self._axis, out=output_tensor)


class UnitReduce(_Buffers):
    """reduce_scatter of one unit's gradients. dtype: the format in which they travel."""

    def __init__(self, unit: int, axis: Axis, order: Order, dtype: torch.dtype):
        self._unit = unit
        self._axis = axis
        self._order = order
        self._dtype = dtype

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
            raise CommError(f"gradients of a unit are to be reduced by {op}: only sums are. Use torch 2.11 or later.")
        self._order.meet(Act.REDUCE, self._unit, input_tensor.numel())
        reduce_scatter(input_tensor, self._axis, out=output_tensor, dtype=self._dtype)
