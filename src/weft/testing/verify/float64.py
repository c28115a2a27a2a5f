"""Float64 throughout: Hugging Face models compute norms, softmax and rotary angles in float32 whatever they are given.

What is rounded to float32 in the middle depends on how a batch is cut, and would hide any difference below 1e-7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft.testing.private_torch import run_backward


class Float64Throughout(TorchFunctionMode):
    """While active, nothing turns a float64 tensor into float32, or asks an operation on one for a float32 result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Asked at each call, even for a dtype: what most calls need comes first, and costs a microsecond.
        kwargs = kwargs or {}
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            if (roots := _roots_of(func, args, kwargs)) is not None:
                # A mode is off while it is asked; what is recomputed in backward must be as it was in forward. Through
                # torch.autograd.backward it would be asked once more.
                with self:
                    return run_backward(*roots, False, False, (), allow_unreachable=True, accumulate_grad=True)
        elif func is torch.Tensor.float or _names_float32(args) or kwargs.get("dtype") is torch.float32:
            first = args[0] if args else None
            if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
                if func is torch.Tensor.float:
                    return first
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in kwargs.items()}
        return func(*args, **kwargs)


def _names_float32(args: Any) -> bool:
    """Whether float32 itself is among them. Not by `in`: to compare it with a tensor takes 20 us."""
    for arg in args:  # noqa: SIM110 (a generator takes twice as long)
        if arg is torch.float32:
            return True
    return False


def _roots_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Tensors and their gradients, where a call is a plain backward of one: the step's, or a pipeline's."""
    if func is torch.Tensor.backward and len(args) == 1 and not any(kwargs.values()):
        return args, (torch.ones_like(args[0]),)
    if func is torch.autograd.backward and not any(value for name, value in kwargs.items() if name != "grad_tensors"):
        tensors = args[0]
        grads = kwargs.get("grad_tensors") or [None] * len(tensors)
        ones = (torch.ones_like(each) if grad is None else grad for each, grad in zip(tensors, grads, strict=True))
        return tuple(tensors), tuple(ones)
    return None
