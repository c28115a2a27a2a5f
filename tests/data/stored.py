"""Small tokenized sources for tests. The token at stream position p has the id p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.token_files import SplitCounts, SplitWriter


@dataclass(frozen=True)
class Stored:
    name: str
    folder: Path
    counts: SplitCounts
    weight: float | None = None
    pad_id: int = 999_999
    packing: str = "concat"


def store(
    folder: Path, lengths: Sequence[int], *, masks: Sequence[Sequence[bool]] | None = None, weight: float | None = None,
    shard_bytes: int = 64, name: str = "", first_id: int = 0,
) -> Stored:  # fmt: skip
    """Write documents of the given lengths to tiny shards, so that reads cross them. first_id: the first token's id."""
    writer = SplitWriter(folder, vocab_size=2**20, with_mask=masks is not None, shard_bytes=shard_bytes)
    start = first_id
    for number, length in enumerate(lengths):
        trained = None if masks is None else np.array(masks[number], bool)
        writer.append(np.arange(start, start + length), trained)
        writer.end_document()
        start += length
    return Stored(name or folder.name, folder, writer.close(), weight)
