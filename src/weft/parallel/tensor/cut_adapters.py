"""Adapters on cut layers: what of A and B a rank has, and who adds up what they make.

    layer                          A                        B, magnitude             travels
    cut by columns                 whole                    its rows, as the weight  the gradient of A x
    cut by columns, tokens cut     whole, partial sums      its rows                 A x of all tokens, and its gradient
    cut by rows                    its inputs               whole, partial sums      nothing more: a part of the product

So what travels for an adapter has its rank for a width. Under dora the row-cut layer adds up squares for the norms.
"""

from __future__ import annotations

from torch import Tensor, nn

from weft.comm.autograd import copy_to, gather_from
from weft.mesh import Axis
from weft.models.adapters import Alone
from weft.parallel.randomness import CutPart
from weft.parallel.tensor.cut_linear import TOKENS, summed


class ColumnAdapter(Alone):
    """Of a column-cut layer, all of whose input is on each rank."""

    def __init__(self, axis: Axis, part: CutPart | None):
        self._axis, self._part = axis, part

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        """All ranks drop the same."""
        return _dropped(dropout, x, self._part, is_whole=True)

    def into_weight(self, x: Tensor) -> Tensor:
        """Its gradient is a sum over the ranks."""
        return copy_to(x, self._axis)

    def low(self, h: Tensor) -> Tensor:
        """Its gradient is a sum over the ranks: then those of A and of the input are whole on each."""
        return copy_to(h, self._axis)


class TokenAdapter(Alone):
    """Of a column-cut layer between which and the one before tokens are cut: it reads this rank's tokens.

    is_flat: the layer itself is given (batch * tokens, features).
    """

    def __init__(self, axis: Axis, part: CutPart | None, *, is_flat: bool = False):
        self._axis, self._part, self._is_flat = axis, part, is_flat

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        """As in front of the cut part."""
        if self._is_flat:
            return _dropped(dropout, x.flatten(0, 1), self._part, is_whole=False).view_as(x)
        return _dropped(dropout, x, self._part, is_whole=False)

    def into_weight(self, x: Tensor) -> Tensor:
        """Bring all tokens."""
        return self._all_tokens(x)

    def low(self, h: Tensor) -> Tensor:
        """Bring all tokens."""
        return self._all_tokens(h)

    def _all_tokens(self, x: Tensor) -> Tensor:
        found = gather_from(x, self._axis, TOKENS)
        return found.flatten(0, 1) if self._is_flat else found


class GatheredAdapter(Alone):
    """Of a column-cut layer that reads what was made of gathered tokens, whose gradient autograd adds up."""

    def __init__(self, part: CutPart | None):
        self._part = part

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        """All ranks drop the same."""
        return _dropped(dropout, x, self._part, is_whole=True)


class RowAdapter(Alone):
    """Of a row-cut layer: each rank's product goes into the sum over the ranks."""

    def __init__(self, axis: Axis, part: CutPart):
        self._axis, self._part = axis, part

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        """Each rank has its own features."""
        with self._part.at(is_open=True):
            return dropout(x)

    def squares(self, total_F: Tensor) -> Tensor:
        """Each rank has some elements of every row."""
        return summed(total_F, self._axis)


def _dropped(dropout: nn.Module, x: Tensor, part: CutPart | None, *, is_whole: bool) -> Tensor:
    if part is None:
        return dropout(x)
    with part.at(is_open=False, is_whole=is_whole):
        return dropout(x)
