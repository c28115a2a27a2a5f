"""Collectives over parts of unequal sizes, made from those over equal parts: every part is padded to the largest.

For size parts of which the largest has `most` elements, the bytes on the links and the temporary memory are those of
`size * most` elements. So every transport supports them, and values are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.collectives import start_all_gather, start_reduce_scatter
from weft.comm.mesh import Axis
from weft.comm.pending import Pending


class PaddedGather:
    """An all-gather in flight.

    Args:
        part: this rank's part, flat.
        axis: the ranks.
        sizes: elements of each rank's part, in order of the axis.
        out: flat result, with the sum of `sizes` elements; None to allocate it.
    """

    @torch.no_grad()
    def __init__(self, part: torch.Tensor, axis: Axis, sizes: Sequence[int], out: torch.Tensor | None = None):
        padded = part.new_zeros(max(sizes))
        padded[: part.numel()].copy_(part)
        self._sizes = list(sizes)
        self._out = part.new_empty(sum(sizes)) if out is None else out
        self._pending: Pending | None = start_all_gather(padded, axis)

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        """Wait for the parts of all ranks, and return them in order."""
        if self._pending is not None:
            rows = self._pending.wait().view(len(self._sizes), -1)
            for piece, row in zip(torch.split(self._out, self._sizes), rows, strict=True):
                piece.copy_(row[: piece.numel()])
            self._pending = None
        return self._out


class PaddedReduceScatter:
    """A sum over the ranks of an axis in flight, of which every rank gets its part.

    Args:
        flat: this rank's summands of all parts, flat.
        axis: the ranks.
        sizes: elements of each rank's part, in order of the axis.
        out: this rank's part of the sum. It may be a view of `flat`.
    """

    @torch.no_grad()
    def __init__(self, flat: torch.Tensor, axis: Axis, sizes: Sequence[int], out: torch.Tensor):
        rows = flat.new_zeros(len(sizes), max(sizes))
        for row, piece in zip(rows, torch.split(flat.detach(), list(sizes)), strict=True):
            row[: piece.numel()].copy_(piece)
        self._out = out
        self._pending: Pending | None = start_reduce_scatter(rows.view(-1), axis)

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        """Wait for the sum, and return this rank's part."""
        if self._pending is not None:
            self._out.copy_(self._pending.wait()[: self._out.numel()])
            self._pending = None
        return self._out
