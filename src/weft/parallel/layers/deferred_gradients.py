"""Deferred weight gradients: linear layers whose backward can store the two factors of the weight gradient.

While a `DeferredWeightGrad` is open, backward returns the input gradient immediately and stores the factors. All other
tensors that autograd saved are freed, so a deferred gradient keeps only the layer's input and its output gradient.

Method: Qi et al. 2023, arXiv 2401.10241. R rows, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import handle_torch_function, has_torch_function

from weft.parallel.layers.float8_products import Float8, product
from weft.private_torch import Function, graph_task, hooks_of_parameter


@dataclass(slots=True)
class DeferredProduct:
    """The two factors of a weight gradient. `is_transposed` means that the weight is (I, O)."""

    weight: nn.Parameter
    x_RI: Tensor
    grad_RO: Tensor
    is_transposed: bool

    def multiply(self) -> Tensor:
        """Multiply the factors. Returns the gradient in the weight's shape."""
        left, right = (self.x_RI, self.grad_RO) if self.is_transposed else (self.grad_RO, self.x_RI)
        return left.t() @ right


class DeferredWeightGrad:
    """Stores the factors of weight gradients that the current backward defers.

    Attributes:
        may_defer: False in a forward whose backward computes all gradients. Layers then use torch's own backward, which
            costs less than a backward in Python.
    """

    def __init__(self) -> None:
        self.may_defer = True
        self._open: list[DeferredProduct] | None = None
        self._task = -1

    @property
    def is_open(self) -> bool:
        """True if backward must defer weight gradients. False in a backward that runs inside a recomputed forward."""
        return self._open is not None and graph_task() == self._task

    def store(self, product: DeferredProduct) -> None:
        """Add the factors of one weight gradient."""
        assert self._open is not None
        self._open.append(product)

    def during(
        self, roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None] | None = None
    ) -> list[DeferredProduct]:
        """Run `torch.autograd.backward` and defer its weight gradients. Returns their factors."""
        nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        hooks = [node.register_prehook(self._begin) for node in nodes if node is not None]
        self._open = []
        run: Any = torch.autograd.backward  # its type excludes sequences of both kinds of root
        try:
            run(roots, grads)
            return self._open
        finally:
            self._open = None
            for hook in hooks:
                hook.remove()

    def _begin(self, grads: Any) -> None:
        self._task = graph_task()

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredWeightGrad:
        return self  # layers of a copy share it


class HoldingLayer(nn.Module):
    """Linear layer that defers its weight gradient while `_weft_held` is set and open.

    `_weft_float8` sets float8 multiplication; it is None for multiplication in the weight's dtype.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    _weft_held: DeferredWeightGrad | None = None
    _weft_float8: Float8 | None = None


class _Linear(Function):
    """x W^T + b, whose weight gradient can be deferred."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, param: Any, held: Any, transposed: bool, form: Any
    ) -> Tensor:
        if hooks_of_parameter(weight)[0]:  # hooks would run without a gradient
            held = None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight has no gradient
        ctx.param, ctx.held, ctx.is_transposed, ctx.form = param, held, transposed, form
        return product(x, weight.t() if transposed else weight, bias, form)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight_OI = weight.t() if ctx.is_transposed else weight
            if ctx.form is None:
                grad_x = grad @ weight_OI
            else:
                [grad_RI] = ctx.form.input_gradients([grad.reshape(-1, grad.shape[-1])], [weight_OI])
                grad_x = grad_RI.view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[1]:
            product = DeferredProduct(
                ctx.param, x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]), ctx.is_transposed
            )
            if ctx.held is not None and ctx.held.is_open and isinstance(ctx.param, nn.Parameter):
                ctx.held.store(product)
            else:
                grad_weight = product.multiply()
        return grad_x, grad_weight, grad_bias, None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    held: DeferredWeightGrad | None,
    *,
    transposed: bool = False,
    form: Float8 | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.linear`, optionally in float8 and with a deferred weight gradient.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,) or None.
        held: stores the factors of the weight gradient while it is open, unless the weight has hooks; None to defer
            nothing.
        transposed: True if the weight is (I, O).
        form: float8 multiplication; None for the operands' dtype.
    """
    if has_torch_function((x, weight)):  # per-sample gradients replace this function
        return handle_torch_function(linear, (x, weight), x, weight, bias, held, transposed=transposed, form=form)
    if held is not None and not held.may_defer and form is None and not transposed:
        return nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, weight, held, transposed, form)
