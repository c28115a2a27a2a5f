"""Gradients of weights that wait: backward gives the input's gradient at once, and the products with weights later.

Linear layers get a subclass whose backward, while a `HeldGradients` is open, keeps the two factors of the weight's
gradient in place of multiplying them. All else that autograd kept is let go, so what waits costs a layer's input and
its output's gradient. Layers of other kinds give all their gradients at once, which is right and only less even.

Method: Qi et al. 2023, arXiv 2401.10241. R rows, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(slots=True)
class _Product:
    """The factors of one weight's gradient. is_transposed: the weight is (I, O)."""

    weight: nn.Parameter
    x_RI: Tensor
    grad_RO: Tensor
    is_transposed: bool

    def multiply(self) -> Tensor:
        """The gradient, in the weight's shape."""
        left, right = (self.x_RI, self.grad_RO) if self.is_transposed else (self.grad_RO, self.x_RI)
        return left.t() @ right


class HeldGradients:
    """What the backward under way holds back."""

    def __init__(self) -> None:
        self._open: list[_Product] | None = None

    @property
    def is_open(self) -> bool:
        """Whether backward shall hold back."""
        return self._open is not None

    def hold(self, product: _Product) -> None:
        """Keep the factors of one gradient."""
        assert self._open is not None
        self._open.append(product)

    def during(self, backward: Callable[[], None]) -> list[_Product]:
        """Run a backward that holds back; what it held."""
        self._open = []
        try:
            backward()
            return self._open
        finally:
            self._open = None

    def __deepcopy__(self, memo: dict[int, object]) -> HeldGradients:
        return self  # layers of a copy ask the same


@torch.no_grad()
def deliver(held: list[_Product]) -> None:
    """Multiply what was held, and give it to autograd as if its backward came just now."""
    if held:
        grads = [product.multiply() for product in held]
        torch.autograd.backward([product.weight for product in held], grads)
        held.clear()


class _Linear(torch.autograd.Function):
    """x W^T + b, whose weight gradient may wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, param: Any, held: Any, transposed: bool):
        ctx.save_for_backward(x, weight)
        ctx.param, ctx.held, ctx.is_transposed = param, held, transposed
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ (weight.t() if ctx.is_transposed else weight)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[1]:
            product = _Product(
                ctx.param, x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]), ctx.is_transposed
            )
            if ctx.held.is_open and isinstance(ctx.param, nn.Parameter):
                ctx.held.hold(product)
            else:
                grad_weight = product.multiply()
        return grad_x, grad_weight, grad_bias, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, held: HeldGradients, *, transposed: bool = False) -> Tensor:
    """`torch.nn.functional.linear` (with transposed, of a weight (I, O)) whose weight gradient may wait."""
    return _Linear.apply(x, weight, bias, weight, held, transposed)  # pyright: ignore[reportReturnType]


def hold_weight_gradients(model: nn.Module, held: HeldGradients) -> int:
    """Let the linear layers of a model ask `held`, in place. Returns how many there are.

    Layers whose forward was replaced, and subclasses with a forward of their own, stay as they are.
    """
    kinds: dict[type, type] = {}
    count = 0
    for module in model.modules():
        forward = _forward_of(module)
        if forward is not None and "forward" not in vars(module):
            kind = type(module)
            if kind not in kinds:
                kinds[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
            module._weft_held = held  # pyright: ignore[reportArgumentType]
            module.__class__ = kinds[kind]
            count += 1
    return count


def _forward_of(module: nn.Module) -> Callable[..., Tensor] | None:
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return _linear_forward
    # transformers' layer of GPT-2: a linear layer whose weight is (I, O).
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx"):
        return _conv1d_forward
    return None


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias, self._weft_held)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias, self._weft_held, transposed=True)
