"""Collectives that autograd passes through: each names its axis, and its backward is the transposed collective.

    forward                       backward
    copy_to       identity        all_reduce
    sum_over      all_reduce      identity
    gather_from   all_gather      reduce_scatter        along dim
    gather_slice  all_gather      this rank's slice     along dim
    scatter_sum   reduce_scatter  all_gather            along dim
    slice_to      slice           all_gather            along dim
    exchange      all_to_all      all_to_all back       rows
    exchange_dims all_to_all      all_to_all back       split one dim, join another
    max_over      all_reduce      none: a number without gradient

`copy_to` and `sum_over` are f and g of Shoeybi et al. 2019, arXiv 1909.08053; `gather_from` and `scatter_sum` those of
Korthikanti et al. 2022, arXiv 2205.05198. Over an axis of size 1 each returns its argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.autograd.operators import add_up, join, largest, share, sum_part
from weft.comm.peer import all_to_all
from weft.mesh import Axis
from weft.private_torch import Function, split


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the same tensor; its gradient is summed over the axis, whose ranks each go on with a part of the work."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def sum_over(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum the ranks' tensors; each gets the gradient of the sum."""
    return x if axis.size == 1 else _SumOver.apply(x, axis)


def gather_from(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Join the ranks' tensors along dim; ranks go on with parts of the work, so gradients are summed and cut.

    Args:
        x: of one shape on all ranks.
        axis: the ranks.
        dim: grows by the size of the axis.
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim % x.dim())


def gather_slice(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Join the ranks' tensors along dim; ranks go on with the same work, so gradients are only cut.

    Args:
        x: of one shape on all ranks.
        axis: the ranks.
        dim: grows by the size of the axis.
    """
    return x if axis.size == 1 else _GatherSlice.apply(x, axis, dim % x.dim())


def scatter_sum(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice along dim of the sum of the ranks' tensors.

    Args:
        x: of one shape on all ranks.
        axis: the ranks.
        dim: shrinks by the size of the axis; CommError where it is no multiple of it.
    """
    return x if axis.size == 1 else _ScatterSum.apply(x, axis, dim % x.dim())


def slice_to(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice along dim of a tensor that is equal on all ranks.

    Args:
        x: the same on all ranks.
        axis: the ranks.
        dim: shrinks by the size of the axis; CommError where it is no multiple of it.
    """
    return x if axis.size == 1 else _SliceTo.apply(x, axis, dim % x.dim())


def exchange(
    x: torch.Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], most: int | None = None
) -> torch.Tensor:
    """Exchange rows with each rank, as many as `send` and `receive` say; gradients travel back the same way.

    Args:
        x: (sum of `send`, ...), the rows for each rank one after another.
        axis: the ranks.
        send: rows for each rank, in order of the axis.
        receive: rows from each rank.
        most: the most rows that any rank sends to any other, where the caller knows it: else ranks ask each other.
    """
    return x if axis.size == 1 else _Exchange.apply(x, axis, tuple(send), tuple(receive), most)


def exchange_dims(x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
    """Return each rank's part of `split_dim` from all ranks, joined along `join_dim` in order of the axis.

    The exchange of Ulysses (Jacobs et al. 2023, arXiv 2309.14509) with split_dim heads and join_dim sequence.

    Args:
        x: of one shape on all ranks.
        axis: the ranks.
        split_dim: shrinks by the size of the axis.
        join_dim: grows by it.
    """
    return x if axis.size == 1 else _ExchangeDims.apply(x, axis, split_dim % x.dim(), join_dim % x.dim())


def max_over(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the largest of the ranks' values, element by element, without a gradient."""
    return x.detach() if axis.size == 1 else largest(x.detach(), axis)


def _part(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's slice along dim."""
    return x.narrow(dim, axis.rank * (size := share(x, axis, dim)), size)


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return add_up(grads[0], ctx.axis), None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return add_up(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return sum_part(grads[0], ctx.axis, ctx.dim), None, None


class _GatherSlice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _part(grads[0], ctx.axis, ctx.dim), None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return sum_part(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join(grads[0], ctx.axis, ctx.dim), None, None


class _SliceTo(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _part(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join(grads[0], ctx.axis, ctx.dim), None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, send: tuple[int, ...], receive: tuple[int, ...], most: int | None
    ) -> torch.Tensor:
        ctx.axis, ctx.send, ctx.receive, ctx.most = axis, send, receive, most
        return all_to_all(x, axis, send=send, receive=receive, most=most)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        back = all_to_all(grads[0], ctx.axis, send=ctx.receive, receive=ctx.send, most=ctx.most)
        return back, None, None, None, None


class _ExchangeDims(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
        ctx.axis, ctx.dims = axis, (split_dim, join_dim)
        return _swap(x, axis, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        split_dim, join_dim = ctx.dims
        return _swap(grads[0], ctx.axis, join_dim, split_dim), None, None, None


def _swap(x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
    parts = torch.stack(split(x, share(x, axis, split_dim), split_dim))
    return torch.cat(all_to_all(parts, axis).unbind(0), join_dim)
