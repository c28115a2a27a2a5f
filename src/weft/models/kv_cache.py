"""Keys and values of earlier tokens, so that sampling computes only the new token.

B sequences, S tokens, K key-value heads, C width of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer. Memory for `max_tokens` tokens is allocated on first use."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k_BKTC: Tensor, v_BKTC: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens and return all keys and values so far, each (B, K, S, C)."""
        if self._keys is None or self._values is None:
            batch, heads, _, width = k_BKTC.shape
            self._keys = k_BKTC.new_empty(batch, heads, self.max_tokens, width)
            self._values = torch.empty_like(self._keys)
        end = self.num_tokens + k_BKTC.shape[2]
        self._keys[:, :, self.num_tokens : end] = k_BKTC
        self._values[:, :, self.num_tokens : end] = v_BKTC
        self.num_tokens = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Cache:
    """One LayerCache for each layer of a decoder."""

    def __init__(self, num_layers: int, max_tokens: int):
        self.max_tokens = max_tokens
        self.layers = tuple(LayerCache(max_tokens) for _ in range(num_layers))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache."""
        return self.layers[0].num_tokens
