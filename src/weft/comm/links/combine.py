"""Sums, maxima and minima of the ranks' parts, always in order of rank, so that every transport gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Bytes combined at a time: small enough to stay in a core's cache while all parts are added.
BLOCK_BYTES = 1 << 19

_FUNCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_HALVES = (torch.bfloat16, torch.float16)


class Combiner:
    """Combines parts of equal length; keeps its scratch memory (at most BLOCK_BYTES) between calls."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(self, parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
        """out = parts[0] op parts[1] op ..., left to right. `out` may be the memory of one of the parts.

        Sums of bf16 and fp16 are kept in fp32 and rounded once. (Two parts need no scratch: their sum is
        rounded once anyway.)
        """
        function = _FUNCTIONS[op]
        if len(parts) == 2:
            function(parts[0], parts[1], out=out)
            return
        dtype = torch.float32 if op == "sum" and out.dtype in _HALVES else out.dtype
        step = BLOCK_BYTES // dtype.itemsize
        for first in range(0, out.numel(), step):
            block = slice(first, min(first + step, out.numel()))
            total = self._room(block.stop - first, dtype)
            if dtype == out.dtype:
                function(parts[0][block], parts[1][block], out=total)
                for part in parts[2:-1]:
                    function(total, part[block], out=total)
                # Only the last step writes to `out`: every part has been read by then.
                function(total, parts[-1][block], out=out[block])
            else:
                total.copy_(parts[0][block])
                for part in parts[1:]:
                    total.add_(part[block])
                out[block].copy_(total)

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(dtype)
