"""Lets the layers of a stage hold back their weights' gradients, and delivers these when the schedule says so.

Linear layers get a subclass whose product may wait (parallel/layers/held.py); layers that ask by themselves, such as
those that tensor parallelism cut, are told whom. Layers of other kinds give all their gradients at once, which is right
and only less even.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.models.adapters import AdaptedLinear
from weft.parallel.layers import HeldGradients, HeldProduct, HoldingLayer, linear
from weft.structure import become


@torch.no_grad()
def deliver(held: list[HeldProduct]) -> None:
    """Multiply what was held, and give it to autograd as if its backward came just now.

    One weight after another, and what each was made of is let go: so a stage never has all its gradients beside those
    that add up. Products of one weight come together, for its gradient arrives once.
    """
    by_weight = _by_weight(held)
    held.clear()
    for weight in list(by_weight):
        grads = [product.multiply() for product in by_weight.pop(weight)]
        torch.autograd.backward([weight] * len(grads), grads)
        del grads


def _by_weight(held: list[HeldProduct]) -> dict[nn.Parameter, list[HeldProduct]]:
    found: dict[nn.Parameter, list[HeldProduct]] = {}
    for product in held:
        found.setdefault(product.weight, []).append(product)
    return found


def hold_weight_gradients(model: nn.Module, held: HeldGradients) -> int:
    """Let the linear layers of a model ask `held`, in place. Returns how many there are.

    Layers whose forward was replaced, and subclasses with a forward of their own, stay as they are.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, HoldingLayer):
            module._weft_held = held
            count += 1
            continue
        kind = _kind_of(module)
        if kind is not None and "forward" not in vars(module):
            become(module, kind, held=held)
            count += 1
    return count


class _HoldingLinear(HoldingLayer):
    """A linear layer whose weight's gradient may wait."""

    _weft_held: HeldGradients

    def forward(self, input: Tensor) -> Tensor:
        """(..., I) to (..., O)."""
        return linear(input, self.weight, self.bias, self._weft_held)


class _HoldingConv1D(HoldingLayer):
    """transformers' layer of GPT-2: a linear layer whose weight is (I, O)."""

    _weft_held: HeldGradients

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O)."""
        return linear(x, self.weight, self.bias, self._weft_held, transposed=True)


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    if isinstance(module, AdaptedLinear):
        return None  # its weight is frozen, and nothing of it can wait
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return _HoldingLinear
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx"):
        return _HoldingConv1D
    return None
