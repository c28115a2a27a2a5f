"""Routes of a flat tensor in parts through the slots, without joining the parts first.

The same operation on one flat tensor writes the same bytes to the slots, so ranks may differ in which one they use.
"""

from __future__ import annotations

import torch

from weft.comm.transports.routes import Route, ScatterRoute, Slots, Span, SplitRoute
from weft.comm.transports.scattered_tensor import Parts


class ScatteredDirectReduce(Route[Parts]):
    """all_reduce of parts in which each rank adds everything."""

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        self.source.copy_to(mine[: span[1] - span[0]], span[0])

    def reduce(self, span: Span, slots: Slots) -> None:
        out = self.out[span[0] : span[1]]
        for place, piece in self.source.overlapping(*span):
            parts = [slot[place] for slot in slots]
            parts[self.rank] = piece
            self.combine(parts, self.op, out[place])


class PartsSplitReduce(SplitRoute[Parts]):
    """all_reduce of parts in which each rank adds its part of a span."""

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        first, numel = span[0], span[1] - span[0]
        own = self._part(self.rank, numel)
        self.source.copy_to(mine[: own.start], first)
        self.source.copy_to(mine[own.stop : numel], first + own.stop)

    def reduce(self, span: Span, slots: Slots) -> None:
        own = self._part(self.rank, span[1] - span[0])
        mine = [slot[own] for slot in slots]
        pieces = list(self.source.overlapping(span[0] + own.start, span[0] + own.stop))
        if sum(piece.numel() for _, piece in pieces) < own.stop - own.start:
            mine[self.rank].zero_()
        for place, piece in pieces:
            parts = [part[place] for part in mine]
            result = parts[self.rank]
            parts[self.rank] = piece
            self.combine(parts, self.op, result)


class PartsReduceScatter(ScatterRoute[Parts]):
    """reduce_scatter of parts."""

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        first, last = span
        for rank in range(self.size):
            if rank != self.rank:
                place = self._slot_range(rank, self.rank, last - first)
                self.source.copy_to(mine[place], rank * self.length + first)

    def reduce(self, span: Span, slots: Slots) -> None:
        first, last = span
        out = self.out[first:last]
        theirs = [
            out if rank == self.rank else slot[self._slot_range(self.rank, rank, last - first)]
            for rank, slot in enumerate(slots)
        ]
        base = self.rank * self.length
        for place, piece in self.source.overlapping(base + first, base + last):
            parts = [part[place] for part in theirs]
            parts[self.rank] = piece
            self.combine(parts, self.op, out[place])
