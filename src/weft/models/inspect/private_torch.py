"""Private names of torch that models/inspect uses, each with its purpose. Checked against torch 2.11 and 2.13."""

# This file is where private names are used.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

# This is the only file with private names.


#: Operators that the tracer counts. Public functions (reshape, grouped products) lower to them.
UNSAFE_VIEW = torch.ops.aten._unsafe_view
GROUPED_MM = torch.ops.aten._grouped_mm

#: Returns the sequence number of the next autograd node, to mark the start of a part of forward.
next_node_number: Callable[[], int] = _get_sequence_nr
#: Returns the autograd node whose backward runs, or None outside of a backward pass.
node_in_backward: Callable[[], Node | None] = torch._C._current_autograd_node


def number_of(node: Any) -> int:
    """Return the sequence number of an autograd node, which identifies the part of forward that made it."""
    return node._sequence_nr()


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a module's forward hooks by id. Hooks that are removed from the dict no longer run."""
    untyped: Any = module  # the hooks are only partly typed
    return untyped._forward_hooks


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name, including repeated ones; `named_children` returns a shared one once."""
    return module._modules
