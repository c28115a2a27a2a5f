"""Private names of torch in structure/, each with what it is for. Read in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Operators that the tracer counts; both are what public functions (reshape, grouped products) come down to.
UNSAFE_VIEW = torch.ops.aten._unsafe_view
GROUPED_MM = torch.ops.aten._grouped_mm

#: The number that autograd gives to the next node: where a part of forward begins.
next_node_number = torch._C._autograd._get_sequence_nr
#: The node of autograd whose backward runs; None outside of a backward pass.
node_in_backward = torch._C._current_autograd_node


def number_of(node: Any) -> int:
    """The number of a node of autograd, which tells the part of forward that made it."""
    return node._sequence_nr()


class KeepsTies(nn.Module):
    """A module whose tied weights stay tied when it leaves the meta device.

    torch then replaces each module's parameters one by one, which parts a pair; `to` and `to_empty` have no hook.
    """

    def is_tied(self) -> bool:
        """Whether there is a pair now."""
        raise NotImplementedError

    def tie(self) -> None:
        """Make one weight of the pair."""
        raise NotImplementedError

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        was_tied = self.is_tied()
        super()._apply(fn, recurse)
        if was_tied:
            self.tie()
        return self
