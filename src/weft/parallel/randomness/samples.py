"""Which samples of the global batch a microbatch holds: what random numbers follow, whoever has the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

#: A row of a sample is so far from the next: row 0 has the sample's own number.
_ROW = 2**32


@dataclass(frozen=True, slots=True)
class SampleNumbers:
    """Which samples of the global batch a microbatch holds.

    numbers: of the samples in the global batch, in their order; empty where the microbatch stands in for one without
    samples. rows: how many rows each sample has in tensors whose rows are no samples, one tuple for each such tensor.
    total: how many samples the global batch has; None where nobody said.
    """

    numbers: Sequence[int]
    rows: Sequence[Sequence[int]] = ()
    total: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the rank has none here: the microbatch that it runs counts for nothing."""
        return not self.numbers

    def places(self, count: int, device: torch.device) -> Tensor:
        """Number the rows of a tensor with `count` of them, int64 (count,): the same however batches are cut.

        Rows are samples where there are as many; else those that each sample brought, or as many of every sample.
        A row's number is that of its sample and its place within it.
        """
        numbers = self.numbers
        if count == len(numbers):
            if isinstance(numbers, range):
                return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
            return torch.tensor(numbers, device=device)
        per_sample = self.rows_of_each(count)
        if per_sample is None:
            first = numbers[0] if numbers else 0
            return torch.arange(first, first + count, device=device)
        rows = ((n + _ROW * row for row in range(many)) for n, many in zip(numbers, per_sample, strict=True))
        return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64, device=device)

    def rows_of_each(self, count: int) -> list[int] | None:
        """Return how many of a tensor's `count` rows each sample has; None where that cannot be told.

        Layers may have joined rows or divided them evenly.
        """
        if not self.numbers or not count:
            return None
        if count == len(self.numbers):
            return [1] * count
        scaled = [rows for rows in self.rows if sum(rows) and all(many * count % sum(rows) == 0 for many in rows)]
        for rows in scaled:
            if count <= sum(rows):
                return [many * count // sum(rows) for many in rows]
        size, rest = divmod(count, len(self.numbers))
        if not rest:
            return [size] * len(self.numbers)
        return [many * count // sum(scaled[0]) for many in scaled[0]] if scaled else None


def rows_of_samples(numbers: Tensor, count: int) -> Tensor:
    """Return `SampleNumbers.places` of samples without rows of their own, from their numbers; for compiled code."""
    size, rest = divmod(count, len(numbers))
    if rest:
        return numbers[0] + torch.arange(count, device=numbers.device)
    if size == 1:
        return numbers
    return (numbers[:, None] + torch.arange(size, device=numbers.device) * _ROW).flatten()
