"""The largest values of each 4096 neighbours, with their places; the others are owed.

row:  scales (bf16, two bytes for each 4096) | two bytes for each value that travels: 12 bits of place, 4 of code

So many travel of each 4096, and of what is left at the end as large a share, rounded up. A scale is the largest value's
share of 7, rounded up to bf16; a value travels as round(value / scale) from -7 to 7. Where one is not finite, nothing
of its 4096 is. What does not travel, and what rounding loses, goes with the next time (error feedback).

Method: Aji, Heafield 2017, arXiv 1704.05021; of changes of weights in chunks Sarfi et al. 2025, arXiv 2508.15706
(SparseLoCo).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from weft.comm.wire.block_codes import scales_of, usable
from weft.comm.wire.wire import State, Wire


class Largest(Wire):
    """Few values with their places: `spec.kept` of each `spec.block`."""

    feeds_back = True
    # Sums of few values each are many: they would not fit what travels.
    sends_to_all = True

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        scales: list[torch.Tensor] = []
        words: list[torch.Tensor] = []
        for first, count, width, kept in self._chunks(x_RN.shape[1]):
            x = x_RN[:, first : first + count * width].reshape(-1, width)
            places = x.abs().topk(kept, sorted=False).indices.sort(-1).values
            values = x.gather(-1, places)
            scale = scales_of(values, 7)
            codes = (values / usable(scale, x.dtype)[:, None]).round_().clamp_(-7, 7).nan_to_num_(0.0).add_(8)
            scales.append(scale.view(len(x_RN), count))
            # Read as signed numbers of 16 bits, which all devices have.
            joined = (codes.to(torch.int32) << 12) | places.to(torch.int32)
            words.append(torch.where(joined < 1 << 15, joined, joined - (1 << 16)).to(torch.int16).view(len(x_RN), -1))
        if not scales:
            return x_RN.new_empty((len(x_RN), 0), dtype=torch.uint8), None
        parts = (torch.cat(scales, 1).view(torch.uint8), torch.cat(words, 1).view(torch.uint8))
        return torch.cat(parts, 1), None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        rows, num_chunks = len(codes_RC), math.ceil(numel / self.spec.block)
        out_RN = torch.zeros((rows, numel), dtype=dtype, device=codes_RC.device)
        if not numel:
            return out_RN
        scales = codes_RC[:, : 2 * num_chunks].clone().view(torch.bfloat16).to(dtype)
        words = codes_RC[:, 2 * num_chunks :].clone().view(torch.int16).to(torch.int32) & 0xFFFF
        at = chunk = 0
        for first, count, width, kept in self._chunks(numel):
            here = words[:, at : at + count * kept].view(rows, count, kept)
            scale = scales[:, chunk : chunk + count, None]
            values = ((here >> 12) - 8).to(dtype) * scale
            dense = torch.where(scale.isfinite(), 0.0, torch.nan).to(dtype).expand(rows, count, width).clone()
            dense.scatter_(-1, (here & 0xFFF).to(torch.int64), values)
            out_RN[:, first : first + count * width] = dense.view(rows, -1)
            at, chunk = at + count * kept, chunk + count
        return out_RN

    def _chunks(self, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first value, chunks, values of each, of which travel) of whole chunks, and of the rest."""
        block, kept = self.spec.block, self.spec.kept
        whole, rest = divmod(numel, block)
        if whole:
            yield 0, whole, block, kept
        if rest:
            yield whole * block, 1, rest, math.ceil(kept * rest / block)
