"""A flat tensor that lies in many places: gradients travel from where autograd put them, without a copy before.

The bytes in the slots are those of the same operation on one flat tensor, so ranks may differ in which they use.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch

from weft.comm.links.routes import ReduceScatter, Slots, Span, SplitReduce, WholeReduce


class Parts:
    """`numel` elements, of which each part (first element, 1-D tensor) holds some; they do not overlap.

    Elements that no part holds count as zero; where the result is written, they are left as they are.
    """

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]], numel: int):
        parts = sorted(((start, part) for start, part in parts if part.numel()), key=lambda pair: pair[0])
        self._starts = [start for start, _ in parts]
        self._tensors = [part.detach() for _, part in parts]
        self._numel = numel
        self.dtype, self.device = self._tensors[0].dtype, self._tensors[0].device
        self.itemsize = self.dtype.itemsize
        self.nbytes = numel * self.itemsize

    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self._numel

    def cut(self, first: int, last: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """What lies in [first, last): where, counted from `first`, and the elements."""
        index = max(bisect.bisect_right(self._starts, first) - 1, 0)
        for start, tensor in zip(self._starts[index:], self._tensors[index:], strict=True):
            if start >= last:
                return
            low, high = max(start, first), min(start + tensor.numel(), last)
            if low < high:
                whole = high - low == tensor.numel()
                yield slice(low - first, high - first), tensor if whole else tensor[low - start : high - start]

    def copy_to(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Write what lies from `first` on into a flat tensor, zeros between. Returns the tensor."""
        pieces = list(self.cut(first, first + flat.numel()))
        if sum(piece.numel() for _, piece in pieces) < flat.numel():
            flat.zero_()
        for place, piece in pieces:
            flat[place].copy_(piece)
        return flat

    def joined(self) -> torch.Tensor:
        """One flat tensor of all."""
        return self.copy_to(torch.empty(self._numel, dtype=self.dtype, device=self.device))


class PartsWholeReduce(WholeReduce):
    """all_reduce of parts, each rank adding everything."""

    source: Parts

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        self.source.copy_to(mine[: span[1] - span[0]], span[0])

    def reduce(self, span: Span, slots: Slots) -> None:
        out = self.out[span[0] : span[1]]
        for place, piece in self.source.cut(*span):
            parts = [slot[place] for slot in slots]
            parts[self.rank] = piece
            self.combine(parts, self.op, out[place])


class PartsSplitReduce(SplitReduce):
    """all_reduce of parts, each rank adding its part of a piece."""

    source: Parts

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        first, numel = span[0], span[1] - span[0]
        own = self._part(self.rank, numel)
        self.source.copy_to(mine[: own.start], first)
        self.source.copy_to(mine[own.stop : numel], first + own.stop)

    def reduce(self, span: Span, slots: Slots) -> None:
        own = self._part(self.rank, span[1] - span[0])
        mine = [slot[own] for slot in slots]
        pieces = list(self.source.cut(span[0] + own.start, span[0] + own.stop))
        if sum(piece.numel() for _, piece in pieces) < own.stop - own.start:
            mine[self.rank].zero_()
        for place, piece in pieces:
            parts = [part[place] for part in mine]
            result = parts[self.rank]
            parts[self.rank] = piece
            self.combine(parts, self.op, result)


class PartsReduceScatter(ReduceScatter):
    """reduce_scatter of parts."""

    source: Parts

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        first, last = span
        for rank in range(self.size):
            if rank != self.rank:
                place = self._place(rank, self.rank, last - first)
                self.source.copy_to(mine[place], rank * self.length + first)

    def reduce(self, span: Span, slots: Slots) -> None:
        first, last = span
        out = self.out[first:last]
        theirs = [
            out if rank == self.rank else slot[self._place(self.rank, rank, last - first)]
            for rank, slot in enumerate(slots)
        ]
        base = self.rank * self.length
        for place, piece in self.source.cut(base + first, base + last):
            parts = [part[place] for part in theirs]
            parts[self.rank] = piece
            self.combine(parts, self.op, out[place])
