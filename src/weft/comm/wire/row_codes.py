"""Weights as bytes while they travel to the ranks that compute with them, rounded to the nearest, row by row.

Of each weight, `rows` rows of `columns` values. int8: a row has a scale (bf16) for each 256 of them, from its start on;
fp8: one scale, a power of two, with which layers that multiply in float8 round the same row again to the same numbers:

    int8    scale = the block's largest value / 127, rounded up to bf16;    a value travels as round(value / scale)
    fp8     scale = a power of two; the row's largest / scale within e4m3;    a value travels as e4m3(value / scale)

A row lies on one rank whole, so what a weight becomes does not depend on how many ranks divide it. Vectors (norms,
biases) are few and matter much: they travel as they are. Nothing is kept from step to step: weights are rounded from
the masters each time, so errors do not add up. Scheme: ZeRO++'s quantised weights (Wang et al. 2023, arXiv 2306.10209).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from weft.comm.wire.block_codes import scales_of, usable
from weft.spec import WireSpec

#: The largest number of e4m3; no magnitude counts as less than the next; sign and exponent of a float32.
_LARGEST, _SMALLEST, _POWER_BITS = 448.0, 1e-12, -(1 << 23)

#: Each weight begins at a multiple of so many bytes, so that bytes can be read as numbers of any format.
_ALIGNED = 16


class RowStretch(NamedTuple):
    """A weight's part on a rank: so many rows of so many values; is_exact: they travel as they are."""

    rows: int
    columns: int
    is_exact: bool

    @classmethod
    def of(cls, shape: Sequence[int]) -> RowStretch:
        """Return that of a part of this shape: all dimensions after the first are a row."""
        return cls(shape[0] if shape else 1, math.prod(shape[1:]), len(shape) < 2 or not math.prod(shape))


class RowCodes:
    """What a unit's parts of one rank are on the wire, one after another.

    Args:
        spec: with the size of blocks; fp8: e4m3, and whole rows.
        stretches: of the parts, in the order in which they lie in a flat tensor.
        dtype: of that tensor.
    """

    def __init__(self, spec: WireSpec, stretches: Sequence[RowStretch], dtype: torch.dtype):
        self._stretches, self._dtype, self._is_float = tuple(stretches), dtype, spec.name == "fp8"
        self._block = spec.block
        self.numel = sum(one.rows * one.columns for one in self._stretches)
        self._sizes = [self._num_bytes(one) for one in self._stretches]
        self.num_bytes = sum(self._sizes)

    def _num_bytes(self, one: RowStretch) -> int:
        numel = one.rows * one.columns
        exact = numel * self._dtype.itemsize
        size = exact if one.is_exact else numel + 2 * one.rows * self._blocks_in(one)
        return -(-size // _ALIGNED) * _ALIGNED

    def _blocks_in(self, one: RowStretch) -> int:
        return 1 if self._is_float else math.ceil(one.columns / self._block)

    def _places(self) -> Iterator[tuple[RowStretch, slice, slice]]:
        """Each part, with its place among the values and among the bytes."""
        at = first = 0
        for one, size in zip(self._stretches, self._sizes, strict=True):
            numel = one.rows * one.columns
            yield one, slice(at, at + numel), slice(first, first + size)
            at, first = at + numel, first + size

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a rank's parts, uint8 (num_bytes,). flat: their values, (numel,)."""
        codes = torch.zeros(self.num_bytes, dtype=torch.uint8, device=flat.device)
        for one, values, place in self._places():
            x, out = flat[values], codes[place]
            if one.is_exact:
                out[: x.numel() * x.element_size()].copy_(x.contiguous().view(torch.uint8))
                continue
            if self._is_float:
                scales, steps = _as_floats(x.view(one.rows, one.columns))
            else:
                blocks = self._in_blocks(x.view(one.rows, one.columns))
                scales = scales_of(blocks, 127)
                steps = (blocks / usable(scales, x.dtype)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
            out[: 2 * scales.numel()].copy_(scales.view(torch.uint8))
            rows = steps.view(one.rows, -1)[:, : one.columns].reshape(-1)
            out[2 * scales.numel() :][: rows.numel()].copy_(rows.view(torch.uint8))
        return codes

    def _in_blocks(self, x_RC: torch.Tensor) -> torch.Tensor:
        rest = -x_RC.shape[1] % self._block
        return (pad(x_RC, (0, rest)) if rest else x_RC).reshape(-1, self._block)

    def decode(self, codes_RB: torch.Tensor, out_RN: torch.Tensor) -> None:
        """Write the values of several ranks' parts. codes_RB: uint8 (ranks, num_bytes). out_RN: (ranks, numel)."""
        ranks = len(codes_RB)
        for one, values, place in self._places():
            codes, out = codes_RB[:, place], out_RN[:, values]
            if one.is_exact:
                out.copy_(codes[:, : out.shape[1] * out.element_size()].contiguous().view(out.dtype))
                continue
            number = self._blocks_in(one)
            end = 2 * one.rows * number
            scales = codes[:, :end].contiguous().view(torch.bfloat16).view(ranks, one.rows, number).to(out.dtype)
            # In place: no second copy of all ranks' values.
            into = out.view(ranks, one.rows, one.columns)
            steps = codes[:, end : end + one.rows * one.columns]
            if self._is_float:
                into.copy_(steps.view(torch.float8_e4m3fn).view(into.shape))
                into.mul_(scales)
                continue
            into.copy_(steps.view(torch.int8).view(into.shape))
            whole = one.columns // self._block * self._block
            if whole:
                blocks = into[..., :whole].view(ranks, one.rows, -1, self._block)
                blocks.mul_(scales[..., : whole // self._block, None])
            into[..., whole:].mul_(scales[..., -1:])


def power_scale(largest: torch.Tensor, most: float) -> torch.Tensor:
    """Return the largest power of two, in float32, that keeps magnitudes up to `largest` within `most`.

    What multiplies in float8 and what travels so round by this one rule. What is not finite has no scale (NaN): with
    others under the same one, they would come out as zeros.
    """
    exact = (most / largest.double().clamp(min=_SMALLEST)).float()
    return (exact.view(torch.int32) & _POWER_BITS).view(torch.float32) + (largest - largest).float()


def _as_floats(x_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3, and the scale of each in bf16. A row with a number that is none, or infinite, has none."""
    largest = x_RC.abs().amax(-1)
    finer = power_scale(largest, _LARGEST)
    return finer.reciprocal().to(torch.bfloat16), (x_RC * finer.to(x_RC.dtype)[:, None]).to(torch.float8_e4m3fn)
