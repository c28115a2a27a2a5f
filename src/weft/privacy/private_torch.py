"""Private names of torch in privacy/, each with its purpose. Checked against torch 2.13."""

from __future__ import annotations

from typing import Any

import torch

#: Context without torch function modes, for a module whose gradients vmap computes.
without_functions = torch._C.DisableTorchFunction


def is_checkpointed() -> bool:
    """Return True inside torch.utils.checkpoint with use_reentrant=False, whose backward runs forward again."""
    untyped: Any = torch._C
    hooks = untyped._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
