"""Private names of torch in testing/, each with what it is for. Read in torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

__all__ = ["changes_arguments", "name_of", "run_backward", "storage_behind"]

#: Backward without `torch.autograd.backward`, which asks the modes that are on once more.
run_backward = _engine_run_backward


def name_of(operator: Any) -> str:
    """The name of an operator that a mode was shown, such as "aten::add"."""
    return operator._schema.name


def changes_arguments(operator: Any) -> bool:
    """Whether an operator writes into what it is given."""
    return operator._schema.is_mutable


def storage_behind(weak_pointer: int) -> torch.UntypedStorage | None:
    """The storage of a `StorageWeakRef`, which tells alone whether it lives; None where it does not."""
    return torch.UntypedStorage._new_with_weak_ptr(weak_pointer)
