"""Attention of a cut sequence as a list of pieces that need no mask.

Queries and keys are chunks of one sequence. What a causal mask lets through between them is either a whole rectangle
or, where a chunk meets itself, a lower triangle. Documents are intervals, so they only make these smaller: triangles
one per document, and between two chunks at most one rectangle, for the one document that reaches from one to the other.
Nothing of size (queries x keys) is ever made, and what documents keep apart is never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

#: First tokens of the documents in one sequence, ascending from 0, and behind them the length of the sequence.
Borders = tuple[int, ...]


class Piece(NamedTuple):
    """Queries q0..q1 see keys k0..k1, all of them or (causal) each those up to itself. Places in the parts.

    rows: sequences of the batch, first and behind the last; None is all.
    """

    rows: tuple[int, int] | None
    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


def pieces(
    mine: Sequence[int], theirs: Sequence[int], length: int, borders: Sequence[Borders] | None = None
) -> list[Piece]:
    """What queries of the chunks `mine` see of keys of the chunks `theirs`; triangles first.

    Chunks ascend, have `length` tokens each, and are equal or disjoint as sets. borders: documents of each sequence
    of the batch; None: each sequence is one document.
    """
    if borders is None:
        return list(_undivided(tuple(mine), tuple(theirs), length))
    found: list[Piece] = []
    start = 0
    for row_borders, rows in groupby(borders):
        end = start + len(list(rows))
        found += _divided((start, end), mine, theirs, length, row_borders)
        start = end
    return sorted(found, key=lambda piece: not piece.causal)


def _undivided(mine: tuple[int, ...], theirs: tuple[int, ...], length: int) -> Iterator[Piece]:
    if mine == theirs:
        # Both ascend: their own order is that of the sequence.
        size = len(mine) * length
        yield Piece(None, 0, size, 0, size, True)
        return
    # Of ascending chunks, those before a query's chunk are the first few; neighbours that see the same go together.
    seen = [sum(chunk < query for chunk in theirs) for query in mine]
    start = 0
    for count, group in groupby(seen):
        end = start + len(list(group))
        if count:
            yield Piece(None, start * length, end * length, 0, count * length, False)
        start = end


def _divided(
    rows: tuple[int, int], mine: Sequence[int], theirs: Sequence[int], length: int, borders: Borders
) -> Iterator[Piece]:
    documents = list(pairwise(borders))
    for i, query in enumerate(mine):
        q_start, q_end = query * length, (query + 1) * length
        for j, key in enumerate(theirs):
            k_start, k_end = key * length, (key + 1) * length
            for first, end in documents:
                q0, q1 = max(first, q_start), min(end, q_end)
                k0, k1 = max(first, k_start), min(end, k_end)
                if key > query or q0 >= q1 or k0 >= k1:
                    continue
                yield Piece(
                    rows,
                    q0 - q_start + i * length,
                    q1 - q_start + i * length,
                    k0 - k_start + j * length,
                    k1 - k_start + j * length,
                    key == query,
                )
