"""How stored tokens become sequences: each packing gives the span of tokens that a sequence number stands for.

A span has up to seq_len tokens as inputs; the token after each input is its label. So neighbouring spans of one
document share a token (label of the one, input of the next), and each token is an input exactly once per epoch; only a
document that fits but for its end token keeps that one as a label alone.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.shards import sync

_PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class ConcatSpans:
    """The stored tokens as a ring that is cut every seq_len, from a start that the epoch shifts."""

    num_tokens: int
    seq_len: int

    @property
    def num_sequences(self) -> int:
        return -(-self.num_tokens // self.seq_len)

    def span(self, sequence: int, shift: int) -> tuple[int, int]:
        """(first token, number of inputs). shift: 0 .. num_tokens - 1."""
        done = sequence * self.seq_len
        return (shift + done) % self.num_tokens, min(self.seq_len, self.num_tokens - done)


@dataclass(frozen=True, slots=True)
class TableSpans:
    """Spans given by where each starts. starts: int64 [num_sequences + 1], the last is the number of tokens."""

    starts: np.ndarray
    seq_len: int

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    def span(self, sequence: int, shift: int = 0) -> tuple[int, int]:
        """(first token, number of inputs). shift does not apply."""
        start = int(self.starts[sequence])
        return start, min(self.seq_len, int(self.starts[sequence + 1]) - start)


def fit_starts(offsets: np.ndarray, seq_len: int) -> np.ndarray:
    """Next-fit in stored order: whole documents as long as they fit, longer ones in pieces of seq_len.

    offsets: int64 [num_documents + 1]. Returns int64 [num_sequences + 1].
    """
    starts = [0]
    position, total = 0, int(offsets[-1])
    while position < total:
        # The end token of the last document may be a label without being an input: hence the + 1.
        border = int(offsets[np.searchsorted(offsets, position + seq_len + 1, side="right") - 1])
        position = border if border > position else position + seq_len
        starts.append(position)
    return np.array(starts, np.int64)


def pad_starts(offsets: np.ndarray, seq_len: int) -> np.ndarray:
    """One document a sequence, longer ones in pieces of seq_len. Returns int64 [num_sequences + 1]."""
    lengths = np.diff(offsets)
    num_pieces = np.maximum(1, -(-(lengths - 1) // seq_len))
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    inside = (np.arange(int(num_pieces.sum())) - first) * seq_len
    return np.append(np.repeat(offsets[:-1], num_pieces) + inside, offsets[-1]).astype(np.int64)


def plan_path(folder: Path, packing: str, seq_len: int) -> Path:
    return folder / f"{packing}-{seq_len}-v{_PLAN_VERSION}.npy"


def write_plan(folder: Path, packing: str, seq_len: int, offsets: np.ndarray) -> None:
    """Compute the plan of a split and keep it beside the shards, unless it is there as it was written.

    Call it under the split's lock.

    Args:
        folder: of the split's shards.
        packing: "concat" (which needs no plan), "fit" or "pad".
        seq_len: tokens of a sequence.
        offsets: int64 (documents + 1,), where each document starts and the last one ends.
    """
    path = plan_path(folder, packing, seq_len)
    digest = path.with_suffix(".digest")
    if packing == "concat" or (path.exists() and digest.exists() and digest.read_text() == _digest(path)):
        return
    starts = (fit_starts if packing == "fit" else pad_starts)(offsets, seq_len)
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with temporary.open("wb") as file:
        np.save(file, starts, allow_pickle=False)
    sync(temporary)
    digest.write_text(_digest(temporary))
    os.replace(temporary, path)
    sync(folder)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def open_spans(
    folder: Path, packing: str, seq_len: int, offsets: np.ndarray, num_tokens: int
) -> ConcatSpans | TableSpans:
    """The spans of a split; the plan is read from beside the shards, or computed where it is not there."""
    if packing == "concat":
        return ConcatSpans(num_tokens, seq_len)
    try:
        starts = np.load(plan_path(folder, packing, seq_len), mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        starts = (fit_starts if packing == "fit" else pad_starts)(offsets, seq_len)
    return TableSpans(starts.view(np.ndarray), seq_len)
