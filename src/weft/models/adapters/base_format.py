"""Formats of a frozen base: int8 and NF4, in blocks of 64 weights of one row that have one scale.

A packed weight is one matrix of bytes, (F, blocks * bytes of a block): each block is its codes, then its scale as the
bytes of a float32. So a part of a weight along either dim is a part of the bytes, and takes its scales along; and bytes
are never rounded to a plan's precision. A last block of fewer weights is filled with zeros.

Method: Dettmers et al. 2023, arXiv 2305.14314 (QLoRA: NF4 in blocks of 64; its scales are not quantised again here).

F features that come out, D features that go in, N blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Weights that share a scale.
BLOCK = 64
#: Elements that are unpacked at once: what that needs beside the result stays small.
_AT_ONCE = 2**23

#: Quantiles of the normal distribution on both sides of an exact zero, scaled to 1: appendix E of the paper.
NF4_CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BaseFormat:
    """One way to keep frozen weights. name: "int8" or "nf4". code_bytes: of the codes of one block."""

    name: str
    code_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block with its scale."""
        return self.code_bytes + 4

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of so many weights."""
        return -(-width // BLOCK) * self.block_bytes

    @torch.no_grad()
    def pack(self, weight_FD: Tensor) -> Tensor:
        """Return a weight's bytes, uint8; each block is rounded by itself, so parts give parts of the same bytes."""
        rows, width = weight_FD.shape
        if weight_FD.is_meta:
            return torch.empty(rows, self.row_bytes(width), dtype=torch.uint8, device="meta")
        padded = torch.nn.functional.pad(weight_FD.to(torch.float32), (0, -width % BLOCK))
        blocks = padded.view(rows, -1, BLOCK)
        most = blocks.abs().amax(2, keepdim=True)
        if self.name == "int8":
            scale = most / 127
            # What rounding makes of the largest quotient may lie above 127.
            codes = (blocks / scale.where(scale > 0, 1.0)).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        else:
            scale, table = most, torch.tensor(NF4_CODES, device=most.device)
            nearest = torch.bucketize(blocks / scale.where(scale > 0, 1.0), (table[1:] + table[:-1]) / 2)
            codes = (nearest[..., 0::2] << 4 | nearest[..., 1::2]).to(torch.uint8)
        return torch.cat([codes, scale.contiguous().view(torch.uint8)], 2).view(rows, -1)

    @torch.no_grad()
    def unpack(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the weights that bytes stand for, (F, width).

        Args:
            packed: rows of whole blocks.
            width: weights in a row.
            dtype: of the result; the product of code and scale is made in float32, or in float64 for that.
        """
        rows = packed.shape[0]
        out = torch.empty(rows, width, dtype=dtype, device=packed.device)
        if packed.is_meta:
            return out
        made = torch.promote_types(dtype, torch.float32)
        step = max(1, _AT_ONCE // max(width, 1))
        for first in range(0, rows, step):
            some = packed[first : first + step].view(-1, packed.shape[1] // self.block_bytes, self.block_bytes)
            scale = some[..., self.code_bytes :].contiguous().view(torch.float32).to(made)
            values = (self._values(some[..., : self.code_bytes], made) * scale).view(some.shape[0], -1)
            out[first : first + step] = values[:, :width]
        return out

    def _values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        if self.name == "int8":
            return codes.contiguous().view(torch.int8).to(dtype)
        table = torch.tensor(NF4_CODES, dtype=torch.float32, device=codes.device).to(dtype)
        return torch.stack([table[(codes >> 4).int()], table[(codes & 15).int()]], -1).flatten(-2)


BASE_FORMATS = {one.name: one for one in (BaseFormat("int8", BLOCK), BaseFormat("nf4", BLOCK // 2))}
