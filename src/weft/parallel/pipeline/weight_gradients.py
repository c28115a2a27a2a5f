"""Lets the layers of a stage hold back their weights' gradients, and delivers these when the schedule says so.

Linear layers get a subclass whose product may wait (parallel/held.py); layers that tensor parallelism cut ask by
themselves. Layers of other kinds give all their gradients at once, which is right and only less even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.cut_modules import ColumnLinear, RowLinear
from weft.parallel.held import HeldGradients, HeldProduct, linear


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
    kinds: dict[type, type] = {}
    count = 0
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            module._weft_held = held
            count += 1
            continue
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
