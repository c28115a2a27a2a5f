"""Wires of integers or fp8 with scales, of plain number formats, and of the largest values only.

    row:  scales (bf16, two bytes for each block) | a code for each value

A block is a group of neighboring values. Its scale is its largest magnitude over the largest code, rounded up to bf16,
so that no value is clipped. A block with a non-finite value has a non-finite scale, so none of its values decodes to a
finite one.

int8 uses stochastic rounding: x / scale is rounded to one of the two nearest integers such that the mean is exact. The
rounding error is zero-mean noise, so no residual is kept. u of floor(x / scale + u) comes from a permutation of 2^16
numbers between 0 and 1 instead of a generator. It is read from an offset that a key determines for every 2^16 values.
Rounding scheme: Alistarh et al. 2017, arXiv 1610.02132 (QSGD).

int4 rounds to nearest and adds the rounding error to the next step's values (error feedback; Seide et al. 2014,
Karimireddy et al. 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch.nn.functional import pad

from weft.comm.wire.wire_format import State, Wire
from weft.config.fields.wire_formats import WireSpec

#: Size of the table, and number of values that are encoded at a time, so that they fit a core's cache.
_DRAWS = 1 << 16
_MIX, _STEP, _MASK = 0xBF58476D1CE4E5B9, 0x9E3779B97F4A7C15, 2**64 - 1


class Int8(Wire):
    """Wire with one byte per value and a scale per 256 values, with stochastic rounding keyed by `key`."""

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
        """Return numbers between 0 and 1 for the values from `first` on, (2^16,)."""
        mixed = (self._key + (row * (1 << 40) + first // _DRAWS + 1) * _STEP) & _MASK
        mixed = ((mixed ^ mixed >> 30) * _MIX) & _MASK
        start = (mixed ^ mixed >> 27) >> 16 & _DRAWS - 1
        return _table(device)[start : start + _DRAWS]


class Int4(Wire):
    """Wire with half a byte per value and a scale per 64 values, rounded to nearest, with error feedback."""

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
        # Two neighbors share a byte.
        codes_RN = steps_RN[:, 0::2] | steps_RN[:, 1::2] << 4
        return torch.cat([torch.stack(scale_bytes), codes_RN[:, : math.ceil(numel / 2)]], 1), None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        rows, num_scale_bytes = len(codes_RC), 2 * math.ceil(numel / self.spec.block)
        codes_RN = codes_RC[:, num_scale_bytes:]
        steps_RN = torch.stack([codes_RN & 15, codes_RN >> 4], -1).view(rows, -1)[:, :numel].to(dtype).sub_(8)
        scales = codes_RC[:, :num_scale_bytes].reshape(-1).clone().view(torch.bfloat16).view(rows, -1).to(dtype)
        return steps_RN.mul_(scales.repeat_interleave(self.spec.block, 1)[:, :numel])


def scales_of(blocks_BK: torch.Tensor, largest: int) -> torch.Tensor:
    """Return a bf16 scale (B,) per block, at least its largest magnitude / `largest`; NaN for non-finite values."""
    exact = blocks_BK.abs().amax(-1) / largest
    scales = exact.to(torch.bfloat16)
    # Positive floats are ordered like their bits, so the next bit pattern is the next larger number.
    above = (scales.view(torch.int16) + 1).view(torch.bfloat16)
    scales = torch.where(scales.to(exact.dtype) < exact, above, scales)
    return torch.where(scales.isfinite(), scales, torch.nan)


def usable(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales as divisors: 1 for a scale that is zero (all values are zero) or NaN."""
    return torch.where(scales > 0, scales, 1.0).to(dtype)


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """Return (k + 1/2) / 2^16 for all k in an order that is the same on every machine, repeated twice."""
    mixed = torch.arange(_DRAWS, dtype=torch.int64) * (_STEP - 2**64)
    mixed = (mixed ^ (mixed >> 30)) * (_MIX - 2**64)
    order = (mixed ^ (mixed >> 27)).argsort(stable=True)
    draws = (order.to(torch.float32) + 0.5) / _DRAWS
    return torch.cat([draws, draws]).to(device)


# Weights encoded as bytes for all-gathers, rounded to nearest, row by row.

#: Largest e4m3 number; lower bound for magnitudes; mask of sign and exponent of a float32.
_LARGEST, _SMALLEST, _POWER_BITS = 448.0, 1e-12, -(1 << 23)

#: Alignment in bytes of each weight, so that bytes can be viewed as numbers of any format.
_ALIGNED = 16


class RowSlice(NamedTuple):
    """Numbers of rows and columns of a rank's shard of a weight. With `is_exact` the shard is sent unencoded."""

    rows: int
    columns: int
    is_exact: bool

    @classmethod
    def of(cls, shape: Sequence[int]) -> RowSlice:
        """Return the `RowSlice` for a shard of this shape. All dims after the first form a row."""
        return cls(shape[0] if shape else 1, math.prod(shape[1:]), len(shape) < 2 or not math.prod(shape))


class RowCodes:
    """Encoding of one rank's shards of a unit's weights, stored one after another.

    spec: gives the block size. fp8 uses e4m3 with one scale per row. stretches: the shards, in their order in the flat
    tensor.
    """

    def __init__(self, spec: WireSpec, stretches: Sequence[RowSlice], dtype: torch.dtype):
        self._flat_slices, self._dtype, self._is_float = tuple(stretches), dtype, spec.name == "fp8"
        self._block = spec.block
        self.numel = sum(one.rows * one.columns for one in self._flat_slices)
        self._sizes = [self._num_bytes(one) for one in self._flat_slices]
        self.num_bytes = sum(self._sizes)

    def _num_bytes(self, one: RowSlice) -> int:
        numel = one.rows * one.columns
        exact = numel * self._dtype.itemsize
        size = exact if one.is_exact else numel + 2 * one.rows * self._blocks_in(one)
        return -(-size // _ALIGNED) * _ALIGNED

    def _blocks_in(self, one: RowSlice) -> int:
        return 1 if self._is_float else math.ceil(one.columns / self._block)

    def _ranges(self) -> Iterator[tuple[RowSlice, slice, slice]]:
        """Yield each shard with its slice of the values and of the bytes."""
        at = first = 0
        for one, size in zip(self._flat_slices, self._sizes, strict=True):
            numel = one.rows * one.columns
            yield one, slice(at, at + numel), slice(first, first + size)
            at, first = at + numel, first + size

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the encoded bytes, uint8 (num_bytes,), of a rank's shards with the values `flat`, (numel,)."""
        codes = torch.zeros(self.num_bytes, dtype=torch.uint8, device=flat.device)
        for one, values, place in self._ranges():
            x, out = flat[values], codes[place]
            if one.is_exact:
                out[: x.numel() * x.element_size()].copy_(x.contiguous().view(torch.uint8))
                continue
            if self._is_float:
                scales, steps = _as_floats(x.view(one.rows, one.columns))
            else:
                x_RC, rest = x.view(one.rows, one.columns), -one.columns % self._block
                blocks = (pad(x_RC, (0, rest)) if rest else x_RC).reshape(-1, self._block)
                scales = scales_of(blocks, 127)
                steps = (blocks / usable(scales, x.dtype)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
            out[: 2 * scales.numel()].copy_(scales.view(torch.uint8))
            rows = steps.view(one.rows, -1)[:, : one.columns].reshape(-1)
            out[2 * scales.numel() :][: rows.numel()].copy_(rows.view(torch.uint8))
        return codes

    def decode(self, codes_RB: torch.Tensor, out_RN: torch.Tensor) -> None:
        """Write the values of several ranks' shards into `out_RN`.

        codes_RB: uint8 (ranks, num_bytes). out_RN: output, (ranks, numel).
        """
        ranks = len(codes_RB)
        for one, values, place in self._ranges():
            codes, out = codes_RB[:, place], out_RN[:, values]
            if one.is_exact:
                out.copy_(codes[:, : out.shape[1] * out.element_size()].contiguous().view(out.dtype))
                continue
            number = self._blocks_in(one)
            end = 2 * one.rows * number
            scales = codes[:, :end].contiguous().view(torch.bfloat16).view(ranks, one.rows, number).to(out.dtype)
            # In place, without a second copy of all ranks' values.
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
    """Return the largest power of two (float32) that keeps magnitudes up to `largest` within `most`.

    float8 matmuls and float8 communication share this rule. The scale of a non-finite value is NaN, because a finite
    scale would turn the other values into zeros.
    """
    exact = (most / largest.double().clamp(min=_SMALLEST)).float()
    return (exact.view(torch.int32) & _POWER_BITS).view(torch.float32) + (largest - largest).float()


def _as_floats(x_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bf16 scale of each row, and the rows in e4m3. A row with NaN or infinity has a NaN scale."""
    largest = x_RC.abs().amax(-1)
    finer = power_scale(largest, _LARGEST)
    return finer.reciprocal().to(torch.bfloat16), (x_RC * finer.to(x_RC.dtype)[:, None]).to(torch.float8_e4m3fn)


# Wires that are number formats and that links can add: unchanged, and bf16.


class AsIs(Wire):
    """Wire that sends values unchanged."""

    ops = ("sum", "max", "min")

    def added_in(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        return x_RN.contiguous().view(torch.uint8), None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return codes_RC.view(dtype).clone()


class Bf16(Wire):
    """Wire that rounds values and sums to bfloat16. On the CPU, sums are computed in float32 and rounded once."""

    ops = ("sum", "max", "min")

    def added_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        return x_RN.to(torch.bfloat16).contiguous().view(torch.uint8), None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return codes_RC.view(torch.bfloat16).to(dtype)


# The largest values of each 4096 neighbors with their indices. The others become the residual.


class Largest(Wire):
    """Top-k wire: `spec.kept` values of each `spec.block` with their indices, with error feedback."""

    # The sum of sparse tensors has more nonzero values than the encoding can hold.
    sends_to_all = True
    feeds_back = True

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
            # Stored as signed 16-bit integers, which all devices support.
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
        """Yield (index of the first value, number of chunks, values per chunk, encoded values per chunk).

        Full chunks are first, then the rest.
        """
        block, kept = self.spec.block, self.spec.kept
        whole, rest = divmod(numel, block)
        if whole:
            yield 0, whole, block, kept
        if rest:
            yield whole * block, 1, rest, math.ceil(kept * rest / block)
