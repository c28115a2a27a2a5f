"""Rows of different lengths as one tensor, and evaluation sets filled up to whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def padded_length(longest: int, multiple: int, most: int) -> int:
    """Return how long the rows of a batch become.

    Args:
        longest: of its rows.
        multiple: what lengths are rounded up to.
        most: what no row is longer than.
    """
    return max(longest, min(-(-longest // multiple) * multiple, most))


def padded(rows: Sequence[np.ndarray], value: int, length: int) -> torch.Tensor:
    """Return rows one below the other, filled up on the right: int64 (rows, length).

    Args:
        rows: whole numbers, each 1-D.
        value: what is filled in.
        length: of the result's rows.
    """
    found = torch.full((len(rows), length), value, dtype=torch.int64)
    for number, row in enumerate(rows):
        found[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return found


class FilledUp(Sequence[Any]):
    """Samples, filled up to whole batches with some that count for nothing.

    Args:
        samples: at least one.
        multiple: what the number of samples is filled up to.
        blank: makes of a sample one that counts for nothing.
    """

    def __init__(self, samples: Sequence[Any], multiple: int, blank: Callable[[Any], Any]):
        self._samples, self._blank = samples, blank
        self._length = -(-len(samples) // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        known = len(self._samples)
        return self._samples[index] if index < known else self._blank(self._samples[index % known])
