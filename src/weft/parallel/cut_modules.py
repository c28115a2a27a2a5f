"""Layers that hold a part of their matrix. A module gets a subclass of its own class: paths and names stay.

An `Entry` stands where activations go into a cut part of the model (an attention or feed-forward module). All
column-cut layers there that read what came in are one product with one collective; anything else that the module
computes from it takes the plain way through autograd, so a module nobody thought of is slower, never wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.comm.autograd import copy_to, gather_from, scatter_sum, sum_over
from weft.errors import ModelError
from weft.parallel.cut_dropout import Fork
from weft.parallel.cut_linear import TOKENS, Line, columns, rows, token_share


class Entry:
    """Where activations enter a cut part. members: the column-cut layers that read them. width: their features."""

    def __init__(self, line: Line, width: int, fork: Fork):
        self.line = line
        self.width = width
        self.fork = fork
        self.members: list[nn.Module] = []
        self._inner: torch.Tensor | None = None
        self._outer: torch.Tensor | None = None
        self._products: dict[int, torch.Tensor] = {}

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The activations as the cut part sees them: all tokens, and a gradient that is added up over the line."""
        self.close()
        if self.line.cuts_tokens:
            if x.dim() < 3:
                token_share(x.shape, self.line.axis)
            inner = gather_from(x, self.line.axis, TOKENS)
        else:
            inner = copy_to(x, self.line.axis)
        self._inner, self._outer = inner, x
        self.fork.begin()
        return inner

    def product(self, member: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The member's product with x; None where x is not what came in."""
        if x is not self._inner or self._outer is None or torch.is_autocast_enabled(x.device.type):
            return None
        if not self._products:
            weights = [weight_of(one) for one in self.members]
            made = columns(self._outer, x, self.line, weights, [one.bias for one in self.members])  # pyright: ignore
            self._products = {id(one): product for one, product in zip(self.members, made, strict=True)}
        product = self._products.pop(id(member), None)
        if not self._products:
            self.close()
        return product

    def close(self) -> None:
        """Forget what came in: it must not live longer than the module needs it."""
        self._inner = self._outer = None
        self._products = {}


class Enter:
    """Hooks of the module in front of which an entry stands. Objects, since copies of a module copy its hooks."""

    def __init__(self, entry: Entry):
        self._entry = entry

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bring in the activations among the arguments."""
        entry = self._entry
        found = False

        def bring(value: Any) -> Any:
            nonlocal found
            if (
                not isinstance(value, torch.Tensor)
                or not value.is_floating_point()
                or value.shape[-1:] != (entry.width,)
            ):
                return value
            if not found:
                found = True
                return entry.enter(value)
            # A second sequence (cross-attention): no product is shared, but its gradient adds up too.
            return value if entry.line.cuts_tokens else copy_to(value, entry.line.axis)

        args = tuple(bring(arg) for arg in args)
        kwargs = {name: bring(value) for name, value in kwargs.items()}
        if not found:
            raise ModelError(
                f"module of type {type(module).__name__}: none of its arguments has the {entry.width} features that "
                f"its cut layers read. Give a layout that leaves it out, with {type(module).__name__} as replicate."
            )
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Nothing of it is needed any more."""
        del module, args, output
        self._entry.close()
        self._entry.fork.end()


class ColumnLinear(nn.Module):
    """Makes this rank's share of the output features."""

    _weft_entry: Entry
    _weft_enters: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) to (..., F)."""
        entry = self._weft_entry
        if self._weft_enters:
            x = entry.enter(x)
        product = entry.product(self, x)
        return F.linear(x, weight_of(self), self.bias) if product is None else product  # pyright: ignore


class RowLinear(nn.Module):
    """Reads this rank's share of the input features; its output is the sum over the ranks."""

    _weft_line: Line
    _weft_fork: Fork | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., F) to (..., D)."""
        if self._weft_fork is not None:
            self._weft_fork.end()
        out = rows(x, weight_of(self).to(x.dtype), self._weft_line)
        return out if self.bias is None else out + self.bias  # pyright: ignore[reportOperatorIssue]


class VocabEmbedding(nn.Module):
    """Holds a share of the rows; ids of other ranks' rows come from there. The class's own forward looks them up."""

    _weft_line: Line
    _weft_vocab: int

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """(B, T) to (B, T, D), or this rank's tokens of it where tokens are cut from here on."""
        line, rows_here = self._weft_line, self.weight.shape[0]  # pyright: ignore[reportIndexIssue]
        if ids_BT.device.type == "cpu" and bool(((ids_BT < 0) | (ids_BT >= self._weft_vocab)).any()):
            raise ModelError(
                f"token ids from {int(ids_BT.min())} to {int(ids_BT.max())}: the embedding has {self._weft_vocab} "
                f"entries. Use ids from 0 to {self._weft_vocab - 1}."
            )
        local_BT = ids_BT - line.axis.rank * rows_here
        elsewhere_BT = (local_BT < 0) | (local_BT >= rows_here)
        x_BTD = super().forward(local_BT.masked_fill(elsewhere_BT, 0))
        x_BTD = x_BTD.masked_fill(elsewhere_BT[..., None], 0.0)
        return scatter_sum(x_BTD, line.axis, TOKENS) if line.cuts_tokens else sum_over(x_BTD, line.axis)


def is_transposed(module: nn.Module) -> bool:
    """Whether the layer keeps its weight as (inputs, outputs), as the linear layer of GPT-2 in transformers does."""
    return type(module).__name__.endswith("Conv1D") and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a product with a matrix and a bias, and nothing else."""
    own = type(module).forward
    return own is nn.Linear.forward or (is_transposed(module) and "addmm" in own.__code__.co_names)


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight as (outputs, inputs)."""
    return module.weight.t() if is_transposed(module) else module.weight  # pyright: ignore


def become(module: nn.Module, kind: type[nn.Module], **state: Any) -> None:
    """Give the module the behaviour of `kind`, on top of its own class."""
    module.__class__ = type(f"{kind.__name__}{type(module).__name__}", (kind, type(module)), {})
    for name, value in state.items():
        setattr(module, f"_weft_{name}", value)
