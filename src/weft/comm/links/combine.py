"""Sums, maxima and minima of the ranks' parts, always in one tree over ranks: every transport gives the same bits.

The tree splits n parts at the largest power of two below n: ((0+1)+(2+3))+(4+5) of six. So ranks of one host that are a
whole branch of it (2, 4, 8 ... neighbours, beginning at a multiple of their number) may be added up among themselves
first, and the hosts' sums then, with the bits of one sum over all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.links.link import combined_in

#: Bytes combined at a time: small enough to stay in a core's cache while all parts are added.
BLOCK_BYTES = 1 << 19

_FUNCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def branch(size: int) -> int:
    """Return how many of `size` parts, from the first, are combined among themselves: 2^k, less than `size`."""
    return 1 << (size - 1).bit_length() - 1


class Combiner:
    """Combines parts of equal length; keeps scratch memory between calls: BLOCK_BYTES for each level of the tree."""

    def __init__(self) -> None:
        self._scratch: list[torch.Tensor] = []

    def __call__(self, parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
        """Combine parts in the order of the tree. `out` may be the memory of one of the parts.

        Sums of bf16 and fp16 are kept in fp32 and rounded once. (Two parts need no scratch: their sum is
        rounded once anyway.)
        """
        function, size = _FUNCTIONS[op], len(parts)
        if size == 2:
            function(parts[0], parts[1], out=out)
            return
        dtype, middle = combined_in(out.dtype, op), branch(size)
        step = BLOCK_BYTES // dtype.itemsize
        for first in range(0, out.numel(), step):
            block = slice(first, min(first + step, out.numel()))
            cut = [part[block] for part in parts]
            left = self._fold(cut[:middle], op, dtype, 0)
            right = self._fold(cut[middle:], op, dtype, 1)
            # Only the last step writes to `out`: every part has been read by then.
            if dtype == out.dtype:
                function(left, right, out=out[block])
            else:
                out[block].copy_(left.add_(right))

    def _fold(self, parts: list[torch.Tensor], op: str, dtype: torch.dtype, level: int) -> torch.Tensor:
        """The parts combined, in the scratch of a level; a single part where it lies."""
        if len(parts) == 1:
            return parts[0]
        middle = branch(len(parts))
        total = self._room(parts[0].numel(), dtype, level)
        left = self._fold(parts[:middle], op, dtype, level)
        right = self._fold(parts[middle:], op, dtype, level + 1)
        if dtype == parts[0].dtype:
            _FUNCTIONS[op](left, right, out=total)
        else:
            (total.copy_(left) if middle == 1 else left).add_(right)
        return total

    def _room(self, numel: int, dtype: torch.dtype, level: int) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        while len(self._scratch) <= level:
            self._scratch.append(torch.empty(0, dtype=torch.uint8))
        if self._scratch[level].numel() < num_bytes:
            self._scratch[level] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[level][:num_bytes].view(dtype)
