"""Float64 throughout: Hugging Face models compute norms, softmax and rotary angles in float32 whatever they are given.

What is rounded to float32 in the middle depends on how a batch is cut, and would hide any difference below 1e-7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """While active, nothing turns a float64 tensor into float32, or asks an operation on one for a float32 result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                return first
            if torch.float32 in args or kwargs.get("dtype") is torch.float32:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in kwargs.items()}
        if func is torch.Tensor.backward and len(args) == 1 and all(not value for value in kwargs.values()):
            # A mode is off while it is asked; what is recomputed in backward must be as it was in forward. Through
            # torch.autograd.backward it would be asked once more.
            with self:
                seeds = (torch.ones_like(args[0]),)
                return _engine_run_backward(args, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return func(*args, **kwargs)
