"""Private names of torch in memory/, each with what it is for. Read in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch.utils import checkpoint
from torch.utils.checkpoint import _VersionWrapper

__all__ = ["StoredValue", "above_autograd", "compiled_call", "recompute_word", "set_compiled_call"]

#: What selective checkpoints store of an operation's output: `val`, and `version` when it was stored. There is no hook
#: by which a policy could say how a value is kept, and kept values must be saved tensors that offload hooks see.
StoredValue = _VersionWrapper


def recompute_word() -> Any:
    """What, stored in the place of a value, tells a selective checkpoint to compute it again; None in some releases."""
    return getattr(checkpoint, "_RECOMPUTE", None)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` left to be called in the place of the module's hooks and forward; else None."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Lay something around the compiled module. Hooks of a module are compiled with it, so they cannot."""
    module._compiled_call_impl = call  # pyright: ignore[reportAttributeAccessIssue] - torch says None


@contextmanager
def above_autograd() -> Generator[None]:
    """While inside, autograd records again: torch runs an operator's own code below it."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
        excluded = excluded - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield
