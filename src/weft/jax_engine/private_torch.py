"""Private names of torch in this package, each with its purpose. Checked in torch 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["OVERLOAD", "choose_experts", "has_experts", "is_operator", "tree_flatten", "tree_leaves", "tree_unflatten"]

#: Flattening of batches in the order of the captured graph's inputs.
tree_flatten, tree_leaves, tree_unflatten = _pytree.tree_flatten, _pytree.tree_leaves, _pytree.tree_unflatten

#: Class of the operators of a graph.
OVERLOAD: Any = torch._ops.OpOverload


def is_operator(target: object) -> bool:
    """Return True for an operator or a higher-order operator, and False for a function of Python."""
    return isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def has_experts(config: Any) -> bool:
    """Return True if a config of transformers chooses how experts are multiplied."""
    return hasattr(config, "_experts_implementation")


def choose_experts(config: Any, choice: Any) -> Any:
    """Set how a model of transformers multiplies its experts, and return the choice before."""
    before = config._experts_implementation
    config._experts_implementation = choice
    return before
