"""Which source a global sample comes from: a pure function of the sample's index, exact in the long run.

Each source is due at even distances, in proportion to its weight; samples are dealt in the order they fall due. After
any number of whole blocks a source's count is off its share by less than the number of sources. Inside a block the
order is permuted, so that the pattern of the dealing does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from weft.data.order.sample_order import permutation

#: Weights are kept as integers with this sum: all arithmetic is exact at any index.
_SCALE = 2**32
_GRID = 4096


class Mixture:
    """shares: positive weights of samples, of any sum. block: samples that are permuted among each other."""

    def __init__(self, shares: Sequence[float], *, seed: int, block: int = 256):
        self._parts = _integer_shares(shares)
        self._seed, self._block = seed, block
        self._locate = lru_cache(maxsize=8)(self._block_table)

    def locate(self, index: int) -> tuple[int, int]:
        """(source, how many samples of this source came before) for a global sample index."""
        if len(self._parts) == 1:
            return 0, index
        number, slot = divmod(index, self._block)
        sources, ordinals = self._locate(number)
        return int(sources[slot]), int(ordinals[slot])

    def counts_before(self, index: int) -> list[int]:
        """Samples of each source among the first `index`."""
        if len(self._parts) == 1:
            return [index]
        number, slot = divmod(index, self._block)
        counts = self._dealt(number * self._block)
        if slot:
            for source in self._locate(number)[0][:slot].tolist():
                counts[source] += 1
        return counts

    def _block_table(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        before, after = self._dealt(number * self._block), self._dealt((number + 1) * self._block)
        sizes = [last - first for first, last in zip(before, after, strict=True)]
        in_turn = np.repeat(np.arange(len(sizes)), sizes)
        sources = in_turn[permutation(self._block, "mixture", self._seed, number).take(np.arange(self._block))]
        ordinals = np.empty(self._block, np.int64)
        for source, first in enumerate(before):
            slots = np.flatnonzero(sources == source)
            ordinals[slots] = first + np.arange(slots.size)
        return sources, ordinals

    def _dealt(self, total: int) -> list[int]:
        """How many samples of each source fall due among the first `total`; the sum is `total`."""
        # The time at which `total` are due is near `total` itself; find the last tick with at most that many.
        low, high = max(0, total - len(self._parts) - 1) * _GRID, (total + len(self._parts) + 1) * _GRID
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sum(self._due(middle)) <= total else (low, middle - 1)
        counts, following = self._due(low), self._due(low + 1)
        for source in range(len(counts)):
            counts[source] += min(following[source] - counts[source], total - sum(counts))
        return counts

    def _due(self, tick: int) -> list[int]:
        """Samples of each source that are due by a tick: the nearest whole number to its share of the time."""
        return [(2 * tick * part + _GRID * _SCALE) // (2 * _GRID * _SCALE) for part in self._parts]


def _integer_shares(shares: Sequence[float]) -> list[int]:
    total = float(sum(shares))
    parts = [max(1, round(share / total * _SCALE)) for share in shares]
    parts[parts.index(max(parts))] += _SCALE - sum(parts)
    return parts
