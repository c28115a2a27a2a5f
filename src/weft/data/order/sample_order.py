"""The order of data as pure functions: nothing is shuffled in memory, so any place is reached at once.

A permutation is a Feistel network over the next power of two, walked until it lands inside (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002): fewer than two steps on average.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

_MASK = 2**64 - 1
_MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_ROUNDS = 8


@lru_cache(maxsize=1024)
def derive_key(*parts: int | str) -> int:
    """Return 64 bits that depend on all parts and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Permutation:
    """A fixed permutation of range(size) that is computed per element. key: 64 bits."""

    def __init__(self, size: int, key: int):
        self.size = size
        bits = max(1, (size - 1).bit_length())
        self._low_bits = (bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._keys = [derive_key(key, number) for number in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """index: 0 .. size - 1."""
        while True:
            low, high = index & self._low_mask, index >> self._low_bits
            for number, key in enumerate(self._keys):
                if number % 2:
                    low ^= _scramble(high, key) & self._low_mask
                else:
                    high ^= _scramble(low, key) & self._high_mask
            index = high << self._low_bits | low
            if index < self.size:
                return index

    def take(self, indices: np.ndarray) -> np.ndarray:
        """The same for an array of indices. int64 [n] -> int64 [n]."""
        result = np.array(indices, np.uint64)
        walking = np.arange(result.size)
        while walking.size:
            result[walking] = self._step(result[walking])
            walking = walking[result[walking] >= self.size]
        return result.astype(np.int64)

    def _step(self, index: np.ndarray) -> np.ndarray:
        low_bits, low_mask, high_mask = (np.uint64(n) for n in (self._low_bits, self._low_mask, self._high_mask))
        low, high = index & low_mask, index >> low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_scramble_array(high, key) & low_mask)
            else:
                high = high ^ (_scramble_array(low, key) & high_mask)
        return high << low_bits | low


def _scramble(value: int, key: int) -> int:
    value = (value ^ key) * _MULTIPLY_1 & _MASK
    value = (value ^ value >> 32) * _MULTIPLY_2 & _MASK
    return value ^ value >> 32


def _scramble_array(value: np.ndarray, key: int) -> np.ndarray:
    half = np.uint64(32)
    value = (value ^ np.uint64(key)) * np.uint64(_MULTIPLY_1)
    value = (value ^ (value >> half)) * np.uint64(_MULTIPLY_2)
    return value ^ (value >> half)


@lru_cache(maxsize=256)
def permutation(size: int, *parts: int | str) -> Permutation:
    """Return the permutation of range(size) that the parts name, such as a seed, a source and an epoch."""
    return Permutation(size, derive_key(*parts))
