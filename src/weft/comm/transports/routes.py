"""Routes of collectives through the slots of a shared segment.

A tensor is processed in spans that fit a slot. For each span, `publish` writes to this rank's slot. When all ranks have
published, `reduce` reads their slots. With `two_phases`, `collect` then reads the reduced results of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from weft.comm.transports.link import Combiner, Operation
from weft.comm.transports.scattered_tensor import Parts
from weft.private_torch import split

Span = tuple[int, int]
Slots = Sequence[torch.Tensor]
#: Type of this rank's input.
Source = TypeVar("Source", torch.Tensor, Parts)

#: For tensors of fewer bytes, each rank of three or more adds all parts itself: one synchronization instead of two.
WHOLE_BYTES = 1 << 15


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both flat tensors begin at the same address."""
    return one.data_ptr() == other.data_ptr()


class Route(Generic[Source]):
    """One operation, split into spans of at most `span` elements of `length`. `source` is the operation's input."""

    two_phases = False

    def __init__(self, operation: Operation, source: Source, rank: int, size: int, combine: Combiner):
        self.operation = operation
        self.source, self.out, self.op = source, operation.out, operation.op
        self.rank, self.size, self.combine = rank, size, combine
        self.length = self.source.numel()

    def spans(self, slot_bytes: int) -> list[Span]:
        """Split the full length into spans, equal on all ranks."""
        span = self.span(slot_bytes // self.source.itemsize)
        return [(first, min(first + span, self.length)) for first in range(0, max(self.length, 1), span)]

    def span(self, slot_numel: int) -> int:
        """Return the number of elements of a span if a slot has `slot_numel` elements."""
        return slot_numel

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        """Write to this rank's slot. Does nothing if the other ranks only need to detect this rank's arrival."""

    def published(self, span: Span) -> int:
        """Return the number of elements that `publish` writes."""
        return span[1] - span[0]

    def reduce(self, span: Span, slots: Slots) -> None:
        """Read the slots, after every rank has published."""

    def collect(self, span: Span, slots: Slots) -> None:
        """Read the slots, after every rank has reduced."""


class FlatRoute(Route[torch.Tensor]):
    """Base of routes whose `publish` copies the span to the slot unchanged."""

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        first, last = span
        mine[: last - first].copy_(self.source[first:last])


class DirectReduce(FlatRoute):
    """All-reduce in which each rank reads and adds all parts: for two ranks, and for small tensors."""

    def reduce(self, span: Span, slots: Slots) -> None:
        first, last = span
        parts = [slot[: last - first] for slot in slots]
        parts[self.rank] = self.source[first:last]
        self.combine(parts, self.op, self.out[first:last])


class SplitRoute(Route[Source]):
    """All-reduce in which each rank adds one part of a span and writes the sum to its slot for the others."""

    two_phases = True

    def _part(self, rank: int, numel: int) -> slice:
        return slice(rank * numel // self.size, (rank + 1) * numel // self.size)

    def collect(self, span: Span, slots: Slots) -> None:
        first, last = span
        for rank, slot in enumerate(slots):
            part = self._part(rank, last - first)
            self.out[first + part.start : first + part.stop].copy_(slot[part])


class SplitReduce(SplitRoute[torch.Tensor]):
    """SplitRoute with a single tensor as input."""

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        first, last = span
        own = self._part(self.rank, last - first)
        mine[: own.start].copy_(self.source[first : first + own.start])
        mine[own.stop : last - first].copy_(self.source[first + own.stop : last])

    def reduce(self, span: Span, slots: Slots) -> None:
        first, last = span
        own = self._part(self.rank, last - first)
        parts = [slot[own] for slot in slots]
        result = parts[self.rank]
        parts[self.rank] = self.source[first + own.start : first + own.stop]
        self.combine(parts, self.op, result)


class ScatterRoute(Route[Source]):
    """Reduce-scatter. A span is a range within a shard; a slot holds this span of every other rank's shard."""

    def __init__(self, operation: Operation, source: Source, rank: int, size: int, combine: Combiner):
        super().__init__(operation, source, rank, size, combine)
        self.length = self.out.numel()

    def span(self, slot_numel: int) -> int:
        return slot_numel // (self.size - 1)

    def published(self, span: Span) -> int:
        return (span[1] - span[0]) * (self.size - 1)

    def _slot_range(self, rank: int, of: int, numel: int) -> slice:
        """Return the position of the span of `rank`'s shard in the slot of rank `of`, which omits its own shard."""
        index = rank - (rank > of)
        return slice(index * numel, (index + 1) * numel)


class ReduceScatter(ScatterRoute[torch.Tensor]):
    """ScatterRoute with a single tensor as input."""

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        first, last = span
        for rank in range(self.size):
            if rank != self.rank:
                mine[self._slot_range(rank, self.rank, last - first)].copy_(self._of(rank, span))

    def reduce(self, span: Span, slots: Slots) -> None:
        first, last = span
        parts = [
            self._of(rank, span) if rank == self.rank else slot[self._slot_range(self.rank, rank, last - first)]
            for rank, slot in enumerate(slots)
        ]
        self.combine(parts, self.op, self.out[first:last])

    def _of(self, rank: int, span: Span) -> torch.Tensor:
        """Return the span of one rank's shard in the local source."""
        return self.source[rank * self.length + span[0] : rank * self.length + span[1]]


class AllGather(FlatRoute):
    """All-gather. A span is a range within a shard."""

    def __init__(self, operation: Operation, source: torch.Tensor, rank: int, size: int, combine: Combiner):
        super().__init__(operation, source, rank, size, combine)
        self.shards = self.out.view(size, self.length)

    def reduce(self, span: Span, slots: Slots) -> None:
        first, last = span
        for rank, slot in enumerate(slots):
            if rank != self.rank:
                self.shards[rank, first:last].copy_(slot[: last - first])
        if not same_memory(self.source, self.shards[self.rank]):
            self.shards[self.rank, first:last].copy_(self.source[first:last])


class AllToAll(Route[torch.Tensor]):
    """All-to-all. A span is a range of the data from one rank to another; a slot holds one span per other rank."""

    def __init__(self, operation: Operation, source: torch.Tensor, rank: int, size: int, combine: Combiner):
        super().__init__(operation, source, rank, size, combine)
        self.length = operation.most
        self.sent = list(split(source, list(operation.send)))
        self.received = list(split(self.out, list(operation.receive)))

    def span(self, slot_numel: int) -> int:
        return slot_numel // (self.size - 1)

    def published(self, span: Span) -> int:
        others = (part for rank, part in enumerate(self.sent) if rank != self.rank)
        return sum(part[span[0] : span[1]].numel() for part in others)

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        for rank, part in enumerate(self.sent):
            piece = part[span[0] : span[1]]
            if rank != self.rank and piece.numel():
                mine[self._slot_range(rank, self.rank, span, piece.numel())].copy_(piece)

    def reduce(self, span: Span, slots: Slots) -> None:
        for rank, part in enumerate(self.received):
            piece = part[span[0] : span[1]]
            if piece.numel():
                mine = self.sent[rank][span[0] : span[1]]
                theirs = slots[rank][self._slot_range(self.rank, rank, span, piece.numel())]
                piece.copy_(mine if rank == self.rank else theirs)

    def _slot_range(self, to: int, of: int, span: Span, numel: int) -> slice:
        """Return the position of the span for rank `to` in the slot of rank `of`, which omits its own part."""
        start = (to - (to > of)) * (span[1] - span[0])
        return slice(start, start + numel)


class Broadcast(FlatRoute):
    """Broadcast, in which only the root publishes."""

    def published(self, span: Span) -> int:
        return super().published(span) if self.rank == self.operation.root else 0

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        if self.rank == self.operation.root:
            super().publish(span, mine)

    def reduce(self, span: Span, slots: Slots) -> None:
        first, last = span
        if self.rank != self.operation.root:
            self.out[first:last].copy_(slots[self.operation.root][: last - first])


class Barrier(Route[torch.Tensor]):
    """Barrier, which synchronizes the ranks and moves no data."""


# Routes of operations whose input is scattered over several tensors.


class ScatteredDirectReduce(Route[Parts]):
    """All-reduce of a tensor stored in parts; each rank adds all elements."""

    def publish(self, span: Span, mine: torch.Tensor) -> None:
        self.source.copy_to(mine[: span[1] - span[0]], span[0])

    def reduce(self, span: Span, slots: Slots) -> None:
        out = self.out[span[0] : span[1]]
        for place, piece in self.source.overlapping(*span):
            parts = [slot[place] for slot in slots]
            parts[self.rank] = piece
            self.combine(parts, self.op, out[place])


class PartsSplitReduce(SplitRoute[Parts]):
    """All-reduce of a tensor stored in parts; each rank adds one part of a span."""

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
    """Reduce-scatter of a tensor stored in parts."""

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


# Choice of an operation's route.


_KINDS: dict[str, type[Route[torch.Tensor]]] = {
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "broadcast": Broadcast,
    "barrier": Barrier,
    "reduce_scatter": ReduceScatter,
}


def route(operation: Operation, rank: int, size: int, combine: Combiner) -> Route[torch.Tensor] | Route[Parts]:
    source = operation.source
    whole = size == 2 or source.nbytes <= WHOLE_BYTES
    if isinstance(source, Parts):
        if operation.kind == "reduce_scatter":
            return PartsReduceScatter(operation, source, rank, size, combine)
        return (ScatteredDirectReduce if whole else PartsSplitReduce)(operation, source, rank, size, combine)
    if operation.kind == "all_reduce":
        return (DirectReduce if whole else SplitReduce)(operation, source, rank, size, combine)
    return _KINDS[operation.kind](operation, source, rank, size, combine)
