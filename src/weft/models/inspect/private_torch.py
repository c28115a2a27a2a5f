"""Private names of torch that models/inspect uses, each with its purpose. Checked against torch 2.11 and 2.13."""

# Private names of torch may be used in this file.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

#: Operators that the tracer counts. Public functions (reshape, grouped products) lower to them.
UNSAFE_VIEW = torch.ops.aten._unsafe_view
GROUPED_MM = torch.ops.aten._grouped_mm

#: Returns the sequence number of the next autograd node, to mark the start of a part of forward.
next_node_number: Callable[[], int] = _get_sequence_nr
#: Returns the autograd node whose backward runs, or None outside a backward pass.
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


class CustomBackward:
    """The backward of a custom autograd function, which can be run during forward with this object as `ctx`.

    saved_tensors: the same objects in each read. grads: zeros of the shapes of the function's outputs.
    """

    def __init__(self, node: Any):
        self._node, self.name = node, node._forward_cls.__name__
        self.saved_tensors: tuple[torch.Tensor | None, ...] = node.saved_tensors
        forms = node._input_metadata
        self.grads = [torch.zeros(tuple(one.shape), dtype=one.dtype, device=one.device) for one in forms]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> CustomBackward | None:
        """Return the backward of the function that created a tensor, or None for functions of torch and Weft."""
        node: Any = tensor.grad_fn
        kind: Any = getattr(node, "_forward_cls", None)  # torch's own nodes have none
        return None if kind is None or kind.__module__.startswith(("torch.", "weft.")) else cls(node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __call__(self) -> Any:
        """Run the backward on zeros."""
        with torch.no_grad():
            return self._node._forward_cls.backward(self, *self.grads)
