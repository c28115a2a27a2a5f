"""Attention of a cut sequence as a list of pieces that need no mask.

Queries and keys are chunks of one sequence. What a query may see is a band around its own place, and documents are
intervals; so what is seen between two chunks is made of whole rectangles, lower triangles (a query sees the keys up to
its number) and upper ones (from its number on), which are lower ones read backwards. Of a window that is shorter than
a chunk there are many equal triangles one after another: tiles, which are one piece.
Nothing of size (queries x keys) is ever made, and what windows and documents keep apart is never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, TypeAlias

#: First tokens of the documents in one sequence, ascending from 0, and behind them the length of the sequence.
Borders = tuple[int, ...]
#: What of a piece is seen: all, keys up to the query's number in the piece, or keys from that number on.
Shape: TypeAlias = Literal["all", "lower", "upper"]


@dataclass(frozen=True, slots=True)
class Sight:
    """How far a token sees: so many tokens before itself and so many after; None: to the end. Itself it always sees."""

    before: int | None = None
    after: int | None = 0


CAUSAL = Sight()
BOTH_WAYS = Sight(None, None)


class Piece(NamedTuple):
    """Queries q0..q1 see keys k0..k1, all of them or those of a triangle. Places in the parts.

    rows: sequences of the batch, first and behind the last; None is all. tiles: queries and keys are cut into so many
    equal tiles, and each tile of queries meets its tile of keys alone.
    """

    rows: tuple[int, int] | None
    q0: int
    q1: int
    k0: int
    k1: int
    shape: Shape = "all"
    tiles: int = 1

    def moved(self, rows: tuple[int, int] | None, q: int, k: int) -> Piece:
        """The same piece of other rows, with its queries and keys at other places."""
        return Piece(rows, self.q0 + q, self.q1 + q, self.k0 + k, self.k1 + k, self.shape, self.tiles)


def pieces(
    mine: Sequence[int],
    theirs: Sequence[int],
    length: int,
    borders: Sequence[Borders] | None = None,
    sight: Sight = CAUSAL,
) -> list[Piece]:
    """What queries of the chunks `mine` see of keys of the chunks `theirs`; none where nothing is seen.

    Chunks ascend, have `length` tokens each, and are equal or disjoint as sets. borders: documents of each sequence
    of the batch; None: each sequence is one document.
    """
    if borders is None:
        if sight in (CAUSAL, BOTH_WAYS):
            return list(_undivided(tuple(mine), tuple(theirs), length, sight))
        return list(_divided(None, mine, theirs, length, (0, (max(*mine, *theirs) + 1) * length), sight))
    found: list[Piece] = []
    start = 0
    for row_borders, rows in groupby(borders):
        end = start + len(list(rows))
        found += _divided((start, end), mine, theirs, length, row_borders, sight)
        start = end
    return found


def _undivided(mine: tuple[int, ...], theirs: tuple[int, ...], length: int, sight: Sight) -> Iterator[Piece]:
    if mine == theirs or sight == BOTH_WAYS:
        # Both ascend: their own order is that of the sequence.
        yield Piece(None, 0, len(mine) * length, 0, len(theirs) * length, "all" if sight == BOTH_WAYS else "lower")
        return
    # Of ascending chunks, those before a query's chunk are the first few; neighbours that see the same go together.
    seen = [sum(chunk < query for chunk in theirs) for query in mine]
    start = 0
    for count, group in groupby(seen):
        end = start + len(list(group))
        if count:
            yield Piece(None, start * length, end * length, 0, count * length)
        start = end


def _divided(
    rows: tuple[int, int] | None,
    mine: Sequence[int],
    theirs: Sequence[int],
    length: int,
    borders: Borders,
    sight: Sight,
) -> Iterator[Piece]:
    for i, query in enumerate(mine):
        for j, key in enumerate(theirs):
            for first, end in pairwise(borders):
                q0, q1 = max(first, query * length), min(end, (query + 1) * length)
                k0, k1 = max(first, key * length), min(end, (key + 1) * length)
                if q0 < q1 and k0 < k1:
                    for piece in _band(q0, q1, k0, k1, sight):
                        yield piece.moved(rows, (i - query) * length, (j - key) * length)


def _band(q0: int, q1: int, k0: int, k1: int, sight: Sight) -> Iterator[Piece]:
    """What queries q0..q1 see of keys k0..k1, all by their places in the sequence."""
    before = q1 - k0 if sight.before is None else sight.before
    after = k1 - q0 if sight.after is None else sight.after
    q0, q1 = max(q0, k0 - after), min(q1, k1 + before)  # those that see any
    if q0 >= q1:
        return
    # From `slides` on a query's first key moves with it, and up to `stops` its last one does.
    slides, stops = (min(max(place, q0), q1) for place in (k0 + before, k1 - after))
    for start, end in pairwise(sorted({q0, slides, stops, q1})):
        if start >= slides and end <= stops:
            yield from _window(start, end, before, after)
        elif start >= slides:
            yield Piece(None, start, end, start - before, end - before, "upper")
            yield from _rectangle(start, end, end - before, k1)
        elif end <= stops:
            yield from _rectangle(start, end, k0, start + after)
            yield Piece(None, start, end, start + after, end + after, "lower")
        else:
            yield from _rectangle(start, end, k0, k1)


def _window(start: int, end: int, before: int, after: int) -> Iterator[Piece]:
    """Queries that each see a whole window: in tiles as long as the window, and one shorter one for the rest."""
    length = max(1, before + after)
    whole = (end - start) // length
    for q0, q1, tiles in ((start, start + whole * length, whole), (start + whole * length, end, 1)):
        if q0 == q1:
            continue
        yield Piece(None, q0, q1, q0 + after, q1 + after, "lower", tiles)
        if before + after:
            yield Piece(None, q0, q1, q0 - before, q1 - before, "upper", tiles)
        if tiles == 1:
            yield from _rectangle(q0, q1, q1 - before, q0 + after)


def _rectangle(q0: int, q1: int, k0: int, k1: int) -> Iterator[Piece]:
    if k0 < k1:
        yield Piece(None, q0, q1, k0, k1)
