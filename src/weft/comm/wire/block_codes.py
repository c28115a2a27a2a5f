"""Whole numbers with a scale for each block of neighbours.

    row:  scales (bf16, two bytes for each block) | a code for each value

A scale is the block's largest value over the largest code, rounded up to bf16: no value is cut off. A block with a
value that is not finite has no scale that is, so nothing of it comes out finite.

int8 rounds by chance: x / scale goes to one of the two whole numbers around it, in such a way that the mean is right.
What is rounded off is then noise with a mean of zero, and no residual needs to be kept. The draws are no generator's:
u of floor(x / scale + u) comes from a table of 2^16 numbers between 0 and 1, each once, read from a place that a key
gives for every 2^16 values. Scheme of the rounding: Alistarh et al. 2017, arXiv 1610.02132 (QSGD).

int4 rounds to the nearest, and what it rounds off is owed: it goes with the next step's values (error feedback; Seide
et al. 2014, Karimireddy et al. 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import functools
import math
from typing import Self

import torch
from torch.nn.functional import pad

from weft.comm.wire.wire import State, Wire
from weft.spec import WireSpec

#: Numbers of the table, and values that are encoded at a time: they stay in a core's cache.
_DRAWS = 1 << 16
_MIX, _STEP, _MASK = 0xBF58476D1CE4E5B9, 0x9E3779B97F4A7C15, 2**64 - 1


class Int8(Wire):
    """A byte for each value, a scale for each 256. key: what rounding draws from."""

    by_chance = True

    def __init__(self, spec: WireSpec, key: int = 0):
        super().__init__(spec)
        self._key = key

    def at(self, key: int) -> Self:
        return type(self)(self.spec, key)

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        rows, numel = x_RN.shape
        num_scale_bytes = 2 * math.ceil(numel / self.spec.block)
        codes_RC = torch.empty((rows, num_scale_bytes + numel), dtype=torch.uint8, device=x_RN.device)
        for row in range(rows):
            for first in range(0, numel, _DRAWS):
                x = x_RN[row, first : first + _DRAWS]
                rest = -len(x) % self.spec.block
                blocks = (pad(x, (0, rest)) if rest else x).view(-1, self.spec.block)
                scales = scales_of(blocks, 127)
                steps = blocks / usable(scales, x.dtype)[:, None]
                steps += self._draws(row, first, x.device).to(x.dtype)[: steps.numel()].view_as(steps)
                steps = steps.floor_().clamp_(-127, 127).to(torch.int8).view(-1)[: len(x)]
                place = 2 * (first // self.spec.block)
                codes_RC[row, place : place + 2 * len(scales)] = scales.view(torch.uint8)
                codes_RC[row, num_scale_bytes + first :][: len(x)] = steps.view(torch.uint8)
        return codes_RC, None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_blocks, whole = math.ceil(numel / self.spec.block), numel // self.spec.block
        out_RN = torch.empty((len(codes_RC), numel), dtype=dtype, device=codes_RC.device)
        for codes, out in zip(codes_RC, out_RN, strict=True):
            scales = codes[: 2 * num_blocks].clone().view(torch.bfloat16).to(dtype)
            out.copy_(codes[2 * num_blocks :].view(torch.int8))
            out[: whole * self.spec.block].view(whole, self.spec.block).mul_(scales[:whole, None])
            out[whole * self.spec.block :].mul_(scales[-1])
        return out_RN

    def _draws(self, row: int, first: int, device: torch.device) -> torch.Tensor:
        """Numbers between 0 and 1 for the values from `first` on, (2^16,)."""
        mixed = (self._key + (row * (1 << 40) + first // _DRAWS + 1) * _STEP) & _MASK
        mixed = ((mixed ^ mixed >> 30) * _MIX) & _MASK
        start = (mixed ^ mixed >> 27) >> 16 & _DRAWS - 1
        return _table(device)[start : start + _DRAWS]


class Int4(Wire):
    """Half a byte for each value, a scale for each 64, to the nearest. What is rounded off goes with the next step."""

    feeds_back = True

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        rows, numel = x_RN.shape
        num_blocks = math.ceil(numel / self.spec.block)
        steps_RN = torch.zeros((rows, num_blocks * self.spec.block), dtype=torch.uint8, device=x_RN.device)
        scale_bytes: list[torch.Tensor] = []
        for x, out in zip(x_RN, steps_RN, strict=True):
            blocks = pad(x, (0, -numel % self.spec.block)).view(num_blocks, -1)
            scales = scales_of(blocks, 7)
            steps = (blocks / usable(scales, x.dtype)[:, None]).round_().clamp_(-7, 7).add_(8)
            out.copy_(steps.view(-1))
            scale_bytes.append(scales.view(torch.uint8))
        # Two neighbours share a byte.
        codes_RN = steps_RN[:, 0::2] | steps_RN[:, 1::2] << 4
        return torch.cat([torch.stack(scale_bytes), codes_RN[:, : math.ceil(numel / 2)]], 1), None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        rows, num_scale_bytes = len(codes_RC), 2 * math.ceil(numel / self.spec.block)
        codes_RN = codes_RC[:, num_scale_bytes:]
        steps_RN = torch.stack([codes_RN & 15, codes_RN >> 4], -1).view(rows, -1)[:, :numel].to(dtype).sub_(8)
        scales = codes_RC[:, :num_scale_bytes].reshape(-1).clone().view(torch.bfloat16).view(rows, -1).to(dtype)
        return steps_RN.mul_(scales.repeat_interleave(self.spec.block, 1)[:, :numel])


def scales_of(blocks_BK: torch.Tensor, largest: int) -> torch.Tensor:
    """Return a scale for each block, bf16 (B,): at least its largest value / `largest`; not finite where one is not."""
    exact = blocks_BK.abs().amax(-1) / largest
    scales = exact.to(torch.bfloat16)
    # Positive numbers lie in the order of their bits: the next bit pattern is the next number above.
    above = (scales.view(torch.int16) + 1).view(torch.bfloat16)
    scales = torch.where(scales.to(exact.dtype) < exact, above, scales)
    return torch.where(scales.isfinite(), scales, torch.nan)


def usable(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what values are divided by: 1 where all are zero, and where the scale says that nothing of it counts."""
    return torch.where(scales > 0, scales, 1.0).to(dtype)


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """(k + 1/2) / 2^16 for all k, in an order that is the same on every machine, twice one after another."""
    mixed = torch.arange(_DRAWS, dtype=torch.int64) * (_STEP - 2**64)
    mixed = (mixed ^ (mixed >> 30)) * (_MIX - 2**64)
    order = (mixed ^ (mixed >> 27)).argsort(stable=True)
    draws = (order.to(torch.float32) + 0.5) / _DRAWS
    return torch.cat([draws, draws]).to(device)
