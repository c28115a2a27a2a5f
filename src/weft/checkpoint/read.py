"""Mapping between elements of a full array, flat slices in memory, and ranks. Pure arithmetic.

`Part` describes the elements that a rank has: rows of one dim of the array, flattened. If two tp ranks shard an (8, 4)
array along dim 0, the second rank has rows 4 to 8, flattened to 16 elements.

`OwnershipMap` describes which rank owns which elements of a part. The part is inside a flat buffer (a bucket), which is
split into equal chunks for ranks.

Neither lists elements per rank, so the size does not grow with the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Index ranges of an array, a pair for each dim.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BoxView:
    """Memory layout of a box of the full array. `offset` is the position of the box's first element in memory.

    Positions and strides are in elements.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]

    def at(self, box: Box) -> int:
        """Return the memory position of the first element of `box`, which must be inside this box."""
        steps = zip(box, self.box, self.strides, strict=True)
        return self.offset + sum((inner[0] - outer[0]) * stride for inner, outer, stride in steps)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one dim of an array, flattened in a given order of dims.

    Attributes:
        shape: shape of the full array.
        dim: the dim whose rows the rank has.
        rows: ranges of rows of `dim`, joined in this order, or None for all. Ranges beyond the full array are padding.
        order: dims from the slowest to the fastest in memory, or () for row-major.
    """

    shape: tuple[int, ...]
    dim: int = 0
    rows: tuple[tuple[int, int], ...] | None = None
    order: tuple[int, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the joined rows."""
        if self.rows is None:
            return self.shape
        number = sum(end - start for start, end in self.rows)
        return (*self.shape[: self.dim], number, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.local_shape)

    @property
    def is_padded(self) -> bool:
        """True if rows reach beyond the full array."""
        return self.rows is not None and any(end > self.shape[self.dim] for _, end in self.rows)

    def strides(self) -> tuple[int, ...]:
        """Return the stride of each dim in the flattened part."""
        local, found, step = self.local_shape, [0] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            found[dim] = step
            step *= local[dim]
        return tuple(found)

    def views(self, start: int, end: int) -> Iterator[BoxView]:
        """Yield the elements of the flattened part from `start` to `end` as boxes of the full array.

        Offsets of the boxes count from `start`.
        """
        order, local, strides = self.order or tuple(range(len(self.shape))), self.local_shape, self.strides()
        for first, last in _boxes([local[dim] for dim in order], start, end):
            low, high = [0] * len(order), [0] * len(order)
            for place, dim in enumerate(order):
                low[dim], high[dim] = first[place], last[place]
            offset = sum(one * stride for one, stride in zip(low, strides, strict=True)) - start
            box = tuple(zip(low, high, strict=True))
            yield from self._in_full(BoxView(box, offset, strides))

    def span(self, box: Box) -> tuple[int, int] | None:
        """Return the smallest range (start, end) of the flattened part that contains its elements in `box`, or None."""
        strides, found = self.strides(), []
        for place, low, high in self._segments():
            lower, upper = max(low, box[self.dim][0]), min(high, box[self.dim][1])
            if lower < upper:
                inside = (*box[: self.dim], (place + lower - low, place + upper - low), *box[self.dim + 1 :])
                first = sum(one[0] * stride for one, stride in zip(inside, strides, strict=True))
                last = sum((one[1] - 1) * stride for one, stride in zip(inside, strides, strict=True))
                found.append((first, last + 1))
        if not self.shape:
            return 0, 1
        return (min(one[0] for one in found), max(one[1] for one in found)) if found else None

    def _segments(self) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of rows: (first row in the part, first row in the full array, end row in the full array)."""
        place = 0
        for low, high in self.rows if self.rows is not None else ((0, self.shape[self.dim]),) if self.shape else ():
            yield place, low, min(high, self.shape[self.dim])
            place += high - low

    def _in_full(self, view: BoxView) -> Iterator[BoxView]:
        if self.rows is None:
            yield view
            return
        start, end = view.box[self.dim]
        for place, low, high in self._segments():
            lower, upper = max(start, place), min(end, place + high - low)
            if lower < upper:
                there = (low + lower - place, low + upper - place)
                box = (*view.box[: self.dim], there, *view.box[self.dim + 1 :])
                yield BoxView(box, view.offset + (lower - start) * view.strides[self.dim], view.strides)


@dataclass(frozen=True, slots=True)
class OwnershipMap:
    """Owner rank of each element of a flattened part.

    A rank may own several consecutive chunks, if no other rank replicates them. They are one slice.

    The part starts at element `start` of a flat buffer that is split into equal chunks. Each chunk is replicated on
    several ranks. For saving, it is split among these ranks into slices; the last slices may be shorter or empty.

    Attributes:
        ranks: the ranks of chunk 0, then the ranks of chunk 1, ...
        length: elements of a chunk.
        start: position of the part in the flat buffer.
        times: number of ranks that replicate a chunk.
        each: elements of a slice, or 0 if one rank owns the full chunk.
        turn: index of the replica that owns the first slice. It varies by tensor, to spread small tensors over ranks.
    """

    ranks: tuple[int, ...]
    length: int
    start: int = 0
    times: int = 1
    each: int = 0
    turn: int = 0

    @classmethod
    def to_one(cls, rank: int, numel: int) -> OwnershipMap:
        """Build a map with one owner of all elements."""
        return cls((rank,), max(numel, 1))

    @property
    def share(self) -> int:
        """Maximum number of elements that one rank owns."""
        return self.each or self.length

    def holder(self, position: int) -> int:
        """Return the rank that owns the element at this position. For an empty part, return the rank at its start."""
        number, rest = divmod(self.start + position, self.length)
        if number * self.times >= len(self.ranks):  # an empty part at the end of the flat buffer
            number, rest = len(self.ranks) // self.times - 1, 0
        return self.ranks[number * self.times + (rest // self.share + self.turn) % self.times]

    def runs(self, start: int, end: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, from, to) for each rank's slice that overlaps a range of the part.

        A slice is given in full, also if it extends beyond the range. start, end: the range, with `end` excluded.
        numel: number of elements of the part.
        """
        position = start
        while position < end:
            number, rest = divmod(self.start + position, self.length)
            if self.times == 1 and not self.each:
                first, last = self._chunks(number)
                stop = min(last * self.length - self.start, numel)
                yield self.ranks[number], max(first * self.length - self.start, 0), stop
                position = stop
                continue
            piece = number * self.length + rest // self.share * self.share - self.start
            stop = min(piece + self.share, (number + 1) * self.length - self.start, numel)
            yield self.holder(position), max(piece, 0), stop
            position = stop

    def _chunks(self, number: int) -> tuple[int, int]:
        """Return the range of consecutive chunks, around one, that have the same owner."""
        first, last, rank = number, number + 1, self.ranks[number]
        while first and self.ranks[first - 1] == rank:
            first -= 1
        while last < len(self.ranks) and self.ranks[last] == rank:
            last += 1
        return first, last

    def run_of(self, rank: int, start: int, end: int, numel: int) -> tuple[int, int] | None:
        """Return the elements (from, to) that a rank owns in a range of the part, or None.

        For an empty part, return (0, 0) for the rank at its start.

        start, end: the range of the part, with `end` excluded.
        """
        if not numel:
            return (0, 0) if self.holder(0) == rank else None
        if rank not in self.ranks:
            return None
        number, place = divmod(self.ranks.index(rank), self.times)
        last = number + 1
        if self.times == 1 and not self.each:
            number, last = self._chunks(number)
        low = number * self.length + (place - self.turn) % self.times * self.share
        high = min(low + self.share * (last - number), last * self.length)
        low, high = max(low - self.start, start), min(high - self.start, end, numel)
        return (low, high) if low < high else None


#: Minimum elements of a slice. Smaller chunks are owned by one rank.
LEAST_SHARE = 65536


def assign_evenly(ranks: Sequence[int], length: int, times: int, *, start: int = 0, turn: int = 0) -> OwnershipMap:
    """Divide a flat buffer into equal chunks, and each chunk evenly among its replicas unless it is small.

    Args:
        ranks: ranks in the order of their chunks, `times` for each.
        length: elements of a chunk.
        times: number of replicas of a chunk.
        start: position of the part's first element in the flat buffer.
        turn: index of the replica that owns the first slice, modulo `times`.
    """
    each = min(length, max(-(-length // times), LEAST_SHARE))
    return OwnershipMap(tuple(ranks), max(length, 1), start, times, max(each, 1), turn % times)


def intersect_boxes(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(low >= high for low, high in found) else found


def _boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a range of a row-major array into boxes, at most 2 n - 1 for n dims, as (first corner, end corner)."""
    if end <= start:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    inner = math.prod(rest)
    first = start // inner
    if start % inner:
        stop = min(end, (first + 1) * inner)
        for low, high in _boxes(rest, start - first * inner, stop - first * inner):
            yield (first, *low), (first + 1, *high)
        first, start = first + 1, stop
    full = end // inner
    if start < end and first < full:
        yield (first, *([0] * len(rest))), (full, *rest)
    if start < end and full * inner < end:
        for low, high in _boxes(rest, 0, end - full * inner):
            yield (full, *low), (full + 1, *high)
