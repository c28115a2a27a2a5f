"""Private names of torch in structure/, each with what it is for. Read in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

# This file is where private names are used.
# pyright: reportPrivateUsage=false


#: Operators that the tracer counts; both are what public functions (reshape, grouped products) come down to.
UNSAFE_VIEW = torch.ops.aten._unsafe_view
GROUPED_MM = torch.ops.aten._grouped_mm

#: The number that autograd gives to the next node: where a part of forward begins.
next_node_number: Callable[[], int] = _get_sequence_nr
#: The node of autograd whose backward runs; None outside of a backward pass.
node_in_backward: Callable[[], Node | None] = torch._C._current_autograd_node


def number_of(node: Any) -> int:
    """The number of a node of autograd, which tells the part of forward that made it."""
    return node._sequence_nr()


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """A module's hooks that run behind its forward, by the number of each: what is taken out no longer runs."""
    untyped: Any = module  # the types of its hooks are partly unknown
    return untyped._forward_hooks


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by name, each as often as it is there; `named_children` gives a shared one once."""
    return module._modules
