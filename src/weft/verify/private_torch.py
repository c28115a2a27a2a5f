"""Private names of torch in this package, each with its purpose. Checked in torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

__all__ = ["changes_arguments", "name_of", "run_backward", "storage_behind"]

#: Backward without `torch.autograd.backward`, which would call the active function modes again.
run_backward = _engine_run_backward


def name_of(operator: Any) -> str:
    """Return the name of an operator that a dispatch mode receives, such as "aten::add"."""
    return operator._schema.name


def changes_arguments(operator: Any) -> bool:
    """Return True if an operator writes to its arguments."""
    return operator._schema.is_mutable


def storage_behind(weak_pointer: int) -> torch.UntypedStorage | None:
    """Return the storage of a `StorageWeakRef`, or None if it is freed."""
    return torch.UntypedStorage._new_with_weak_ptr(weak_pointer)
