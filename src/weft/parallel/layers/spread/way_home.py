"""The way of features from an encoder to its model: those of all items brought home, at once or when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.parallel.layers.spread.item_division import Division
from weft.private_torch import Function


class Beside(Function):
    """A tensor as it is; others have a gradient of zero from it, so that their backward takes place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return (grads[0], *zeros)


@dataclass(frozen=True)
class ItemCall:
    """One call, from the hook before it to the one behind.

    given: rows that the module got. expected: rows that who stands by passed to it, and waits for; 0: nobody does.
    """

    division: Division
    given: int
    expected: int

    def home(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the rows of this data rank's items in outputs of the module; for who stands by, zeros."""
        found = self.division.home(outputs, self.given)
        if not self.expected:
            return found
        rows = (output.shape[0] * self.expected // self.given for output in outputs)
        zeros = (output.new_zeros(count, *output.shape[1:]) for count, output in zip(rows, outputs, strict=True))
        return [Beside.apply(zero, one) for zero, one in zip(zeros, found, strict=True)]


def lists_of_states(output: Any) -> dict[str, tuple[Tensor, ...]]:
    """Of an output by name, entries with a tensor for each layer, of which models read few."""
    if not isinstance(output, dict):
        return {}
    return {
        name: value
        for name, value in output.items()
        if isinstance(value, tuple) and len(value) > 1 and all(isinstance(one, Tensor) for one in value)
    }


class HomeOnDemand(tuple[Any, ...]):
    """Tensors of which each is brought home when it is first read: all ranks that share items read the same."""

    def __new__(cls, parts: tuple[Tensor, ...], call: ItemCall) -> HomeOnDemand:
        found = super().__new__(cls, [None] * len(parts))
        found._parts, found._found, found._call = parts, {}, call
        return found

    _parts: tuple[Tensor, ...]
    _found: dict[int, Tensor]
    _call: ItemCall

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[one] for one in range(*place.indices(len(self))))
        number = range(len(self))[place]
        if number not in self._found:
            [self._found[number]] = self._call.home([self._parts[number]])
        return self._found[number]

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))
