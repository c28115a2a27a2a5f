"""Steps of autograd around products in pieces, for blocks that run as they are and for compiled ones.

A compiled graph holds each as one operator, since inductor would wait for a collective where it begins. What backward
gathers again is part of its operator, so nothing gathered is kept.

A row-cut layer is two steps. What replays a block's forward stops at the first, in front of the last product, as it
stops in front of `row_sum`. Backward's second half needs what the first has gathered: they share a `_Travel`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.comm.autograd import operator_of, prepare_operators
from weft.mesh import Axis
from weft.parallel.layers import HeldGradients, HeldProduct
from weft.parallel.tensor.cut_linear import SharedLayer
from weft.parallel.tensor.token_pieces import (
    by_pieces,
    column_gradients,
    gather_multiply,
    multiply_scatter,
    row_factors,
)
from weft.private_torch import Function

_SCHEMAS = {
    "gather_multiply": "(Tensor x, Tensor[] weights, int pieces) -> Tensor[]",
    "multiply_scatter": "(Tensor x, Tensor weight, int pieces) -> Tensor",
    "column_gradients": "(Tensor x, Tensor[] grads, Tensor[] weights, bool of_x, bool of_weights) -> Tensor[]",
    "row_gradients": "(Tensor grad, Tensor x, Tensor weight, int pieces, bool of_weight) -> Tensor[]",
}


def prepare_piece_operators(axis: Axis) -> None:
    """Let compiled graphs hold products in pieces over this axis. Call it before what uses the axis is compiled."""
    real: dict[str, Callable[..., Any]] = {
        "gather_multiply": _gather_multiply,
        "multiply_scatter": _multiply_scatter,
        "column_gradients": _column_gradients,
        "row_gradients": _row_gradients,
    }
    size = axis.size
    fake: dict[str, Callable[..., Any]] = {
        "gather_multiply": partial(_gathered_like, size),
        "multiply_scatter": partial(_scattered_like, size),
        "column_gradients": _column_gradients_like,
        "row_gradients": partial(_row_gradients_like, size),
    }
    prepare_operators(axis, {name: (_SCHEMAS[name], real[name], fake[name]) for name in _SCHEMAS})


def compiled_columns(x_BSD: Tensor, line: SharedLayer, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """`gather_multiply` in a compiled graph."""
    return _CompiledColumns.apply(x_BSD, line, *weights)


def compiled_row(x_BTD: Tensor, line: SharedLayer, weight_FD: Tensor) -> Tensor:
    """`multiply_scatter` in a compiled graph."""
    return _CompiledRow.apply(x_BTD, line, weight_FD)


def row(x_BTD: Tensor, weight: Tensor, line: SharedLayer, held: HeldGradients | None, *, transposed: bool) -> Tensor:
    """`multiply_scatter` of a layer whose weight is (F, D), or (D, F) where transposed. held: its gradient may wait."""
    travel, weight_FD = _Travel(), weight.t() if transposed else weight
    there = _RowFactors.apply(x_BTD, weight_FD, (weight, held, transposed), line, travel)
    return _RowSum.apply(there, x_BTD.detach(), weight_FD.detach(), line, travel)


class _CompiledColumns(Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, line: SharedLayer, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BSD, *weights)
        ctx.line = line
        return tuple(operator_of(line.axis, "gather_multiply")(x_BSD, list(weights), line.pieces))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, *weights = ctx.saved_tensors
        of_x, of_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        gradients = operator_of(ctx.line.axis, "column_gradients")
        found = list(gradients(x_BSD, list(grads), weights, of_x, of_weights))
        grad_x = found.pop(0) if of_x else None
        return grad_x, None, *(found if of_weights else [None] * len(weights))


class _CompiledRow(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, line: SharedLayer, weight_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_FD)
        ctx.line = line
        return operator_of(line.axis, "multiply_scatter")(x_BTD, weight_FD, line.pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_FD = ctx.saved_tensors
        of_weight = ctx.needs_input_grad[2]
        gradients = operator_of(ctx.line.axis, "row_gradients")
        found = gradients(grads[0], x_BTD, weight_FD, ctx.line.pieces, of_weight)
        return found[0], None, found[1] if of_weight else None


class _Travel:
    """What the sum's backward hands to the product's: it is not the product's gradient yet."""

    grad_BSF: Tensor | None = None


class _RowFactors(Function):
    """Stands for a product that `_RowSum` makes, and has its backward.

    layer: its weight, where the gradient of that may wait, and whether it is transposed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight_FD: Tensor,
        layer: tuple[Tensor, HeldGradients | None, bool],
        line: SharedLayer,
        travel: _Travel,
    ) -> Tensor:
        ctx.save_for_backward(x_BTD if ctx.needs_input_grad[1] else None, weight_FD)
        ctx.layer, ctx.line, ctx.travel = layer, line, travel
        return x_BTD.new_empty(1).expand(*x_BTD.shape[:2], len(weight_FD))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del grads  # see `_Travel`
        x_BTD, weight_FD = ctx.saved_tensors
        grad_BSF, ctx.travel.grad_BSF = ctx.travel.grad_BSF, None
        assert grad_BSF is not None
        axis, count = ctx.line.axis, ctx.line.pieces
        grad_BTD, whole_NF = row_factors(grad_BSF, weight_FD, axis, count)
        grad_weight: Tensor | None = None
        if x_BTD is not None:
            weight, held, transposed = ctx.layer
            product = HeldProduct(weight, by_pieces(x_BTD, axis, count), whole_NF, transposed)
            if held is not None and held.is_open and isinstance(weight, nn.Parameter):
                held.hold(product)
            else:
                grad_weight = whole_NF.t().mm(product.x_RI)  # of the weight as it multiplies
        return grad_BTD, grad_weight, None, None, None


class _RowSum(Function):
    @staticmethod
    def forward(
        ctx: Any, there_BTF: Tensor, x_BTD: Tensor, weight_FD: Tensor, line: SharedLayer, travel: _Travel
    ) -> Tensor:
        ctx.shape, ctx.travel = there_BTF.shape, travel
        return multiply_scatter(x_BTD, weight_FD, line.axis, line.pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.travel.grad_BSF = grads[0]
        return grads[0].new_zeros(1).expand(ctx.shape), None, None, None, None


def _gather_multiply(axis: Axis, x: Tensor, weights: list[Tensor], count: int) -> list[Tensor]:
    return gather_multiply(x, weights, axis, count)


def _gathered_like(size: int, x: Tensor, weights: list[Tensor], count: int) -> list[Tensor]:
    del count
    return [x.new_empty((x.shape[0], x.shape[1] * size, weight.shape[0])) for weight in weights]


def _multiply_scatter(axis: Axis, x: Tensor, weight: Tensor, count: int) -> Tensor:
    return multiply_scatter(x, weight, axis, count)


def _scattered_like(size: int, x: Tensor, weight: Tensor, count: int) -> Tensor:
    del count
    return x.new_empty((x.shape[0], x.shape[1] // size, weight.shape[0]))


def _column_gradients(
    axis: Axis, x: Tensor, grads: list[Tensor], weights: list[Tensor], of_x: bool, of_weights: bool
) -> list[Tensor]:
    return column_gradients(x, grads, weights, axis, of_x=of_x, of_weights=of_weights)


def _column_gradients_like(
    x: Tensor, grads: list[Tensor], weights: list[Tensor], of_x: bool, of_weights: bool
) -> list[Tensor]:
    del grads
    found = [x.new_empty(x.shape)] if of_x else []
    return found + ([weight.new_empty(weight.shape) for weight in weights] if of_weights else [])


def _row_gradients(axis: Axis, grad: Tensor, x: Tensor, weight: Tensor, count: int, of_weight: bool) -> list[Tensor]:
    grad_BTD, whole_NF = row_factors(grad, weight, axis, count)
    return [grad_BTD, whole_NF.t().mm(by_pieces(x, axis, count))] if of_weight else [grad_BTD]


def _row_gradients_like(
    size: int, grad: Tensor, x: Tensor, weight: Tensor, count: int, of_weight: bool
) -> list[Tensor]:
    del size, grad, count
    return [x.new_empty(x.shape), *([weight.new_empty(weight.shape)] if of_weight else [])]
