"""Keys and values of earlier tokens, so that generation computes only the new token.

B sequences, S tokens, K key-value heads, C width of one head.
"""

from __future__ import annotations

from torch import Tensor

#: Tokens for which memory is allocated beyond those in use, so that most appends copy nothing.
_ROOM = 64


class LayerCache:
    """Keys and values of one layer. Memory grows in steps, or is allocated once for `num_expected` tokens.

    Attributes:
        keys, values: of the tokens so far, (B, K, S, C), or None before the first. Assign others to replace them.
        num_elsewhere: number of tokens of a layer that another rank computes, and whose keys are therefore not here.
    """

    def __init__(self, num_expected: int = 0):
        self._num_expected = num_expected
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.num_elsewhere = 0
        self._memory: tuple[Tensor, Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache."""
        return self.num_elsewhere if self.keys is None else self.keys.shape[2]

    def append(self, k_BKTC: Tensor, v_BKTC: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens and return all keys and values so far, each (B, K, S, C)."""
        start = 0 if self.keys is None else self.keys.shape[2]
        end = start + k_BKTC.shape[2]
        memory = self._memory
        is_own = memory is not None and self.keys is not None and self.keys.data_ptr() == memory[0].data_ptr()
        if memory is None or not is_own or memory[0].shape[0] != k_BKTC.shape[0] or memory[0].shape[2] < end:
            size = max(self._num_expected, end + max(_ROOM, end // 4))
            memory = self._memory = _grown(self.keys, k_BKTC, size), _grown(self.values, v_BKTC, size)
        for whole, new in zip(memory, (k_BKTC, v_BKTC), strict=True):
            whole[:, :, start:end] = new
        self.keys, self.values = memory[0][:, :, :end], memory[1][:, :, :end]
        return self.keys, self.values


def _grown(old_BKSC: Tensor | None, new_BKTC: Tensor, size: int) -> Tensor:
    """Return memory for `size` tokens that begins with the old ones."""
    memory = new_BKTC.new_empty(*new_BKTC.shape[:2], size, new_BKTC.shape[3])
    if old_BKSC is not None:
        memory[:, :, : old_BKSC.shape[2]] = old_BKSC
    return memory


class Cache:
    """One LayerCache for each layer of a decoder.

    Args:
        num_layers: number of layers.
        max_tokens: the decoder refuses more tokens; None sets no limit.

    Attributes:
        starts_B: column of the first token of each row, if rows start at different columns. None: all start at 0.
    """

    def __init__(self, num_layers: int, max_tokens: int | None = None):
        self.max_tokens = max_tokens
        self.layers = tuple(LayerCache(max_tokens or 0) for _ in range(num_layers))
        self.starts_B: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the cache."""
        return self.layers[0].num_tokens
