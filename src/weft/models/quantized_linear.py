"""Quantized formats of frozen base weights: int8 and NF4, in blocks of 64 weights of one row with one scale each.

A quantized ("packed") weight is one uint8 matrix, (F, blocks * bytes per block), or a stack of them. Each block has its
codes, followed by the bytes of its float32 scale. So a shard of a weight along any dim is a shard of the bytes,
including its scales, and the bytes are never cast to a plan's precision. An incomplete last block is padded with zeros.

Method: Dettmers et al. 2023, arXiv 2305.14314 (QLoRA: NF4 in blocks of 64; the scales are not quantized again here).

F output features, D input features, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.inspect import layers
from weft.models.inspect.blocks import replace_class, revert
from weft.private_torch import Function

#: Weights that share a scale.
BLOCK = 64
#: Elements to dequantize per chunk, to keep temporary memory small.
_AT_ONCE = 2**23

#: Quantiles of the normal distribution on both sides of an exact zero, scaled to 1: appendix E of the paper.
NF4_CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BaseFormat:
    """A format of frozen weights.

    Attributes:
        name: "int8" or "nf4".
        code_bytes: bytes of the codes of one block.
    """

    name: str
    code_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, including its scale."""
        return self.code_bytes + 4

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` weights."""
        return -(-width // BLOCK) * self.block_bytes

    @torch.no_grad()
    def pack(self, weight_FD: Tensor) -> Tensor:
        """Return the quantized bytes of a weight, (F, D), or of stacked weights, (E, F, D); uint8.

        Blocks are rounded independently, so shards of the weight give shards of the same bytes.
        """
        *lead, width = weight_FD.shape
        if weight_FD.is_meta:
            return torch.empty(*lead, self.row_bytes(width), dtype=torch.uint8, device="meta")
        weight_FD = weight_FD.flatten(0, -2)
        rows = weight_FD.shape[0]
        padded = torch.nn.functional.pad(weight_FD.to(torch.float32), (0, -width % BLOCK))
        blocks = padded.view(rows, -1, BLOCK)
        most = blocks.abs().amax(2, keepdim=True)
        if self.name == "int8":
            scale = most / 127
            # Rounding may increase the largest quotient above 127.
            codes = (blocks / scale.where(scale > 0, 1.0)).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        else:
            scale, table = most, torch.tensor(NF4_CODES, device=most.device)
            nearest = torch.bucketize(blocks / scale.where(scale > 0, 1.0), (table[1:] + table[:-1]) / 2)
            codes = (nearest[..., 0::2] << 4 | nearest[..., 1::2]).to(torch.uint8)
        return torch.cat([codes, scale.contiguous().view(torch.uint8)], 2).view(*lead, -1)

    @torch.no_grad()
    def unpack(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights, (F, width) or (E, F, width).

        Args:
            packed: rows of complete blocks, (F, bytes) or (E, F, bytes).
            width: weights per row.
            dtype: dtype of the result. Codes are multiplied by scales in float32, or in float64 if that is `dtype`.
        """
        lead, packed = packed.shape[:-1], packed.flatten(0, -2)
        rows = packed.shape[0]
        out = torch.empty(rows, width, dtype=dtype, device=packed.device)
        if packed.is_meta:
            return out.view(*lead, width)
        made = torch.promote_types(dtype, torch.float32)
        step = max(1, _AT_ONCE // max(width, 1))
        for first in range(0, rows, step):
            some = packed[first : first + step].view(-1, packed.shape[1] // self.block_bytes, self.block_bytes)
            scale = some[..., self.code_bytes :].contiguous().view(torch.float32).to(made)
            values = (self._values(some[..., : self.code_bytes], made) * scale).view(some.shape[0], -1)
            out[first : first + step] = values[:, :width]
        return out.view(*lead, width)

    def _values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        if self.name == "int8":
            return codes.contiguous().view(torch.int8).to(dtype)
        table = torch.tensor(NF4_CODES, dtype=torch.float32, device=codes.device).to(dtype)
        return torch.stack([table[(codes >> 4).int()], table[(codes & 15).int()]], -1).flatten(-2)


BASE_FORMATS = {one.name: one for one in (BaseFormat("int8", BLOCK), BaseFormat("nf4", BLOCK // 2))}


# Linear layers that store their frozen weight quantized and dequantize it for each matmul.


class PackedLinear(nn.Module):
    """Linear layer with a quantized weight. `replace_class` combines this class with the layer's own class."""

    #: `inspect.layers.is_linear` ignores this class when it looks up the layer's own forward.
    is_adapter = True

    weight: nn.Parameter
    in_features: int
    _weft_format: BaseFormat
    #: The dtype of the weight before it was quantized.
    _weft_stored: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer: (..., D) to (..., F)."""
        return self.times_weight(x, layers.bias_of(self))

    def times_weight(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x times the transposed dequantized weight, plus the bias. Backward dequantizes the weight again."""
        product: Tensor = _PackedProduct.apply(x, self.weight, self._weft_format, self._width)
        return product if bias is None else product + bias

    def unpacked_weight(self) -> Tensor:
        """Return the dequantized weight, (F, D), in the dtype before quantization, but at least in float32."""
        kind = torch.promote_types(self._weft_stored, torch.float32)
        return self._weft_format.unpack(self.weight.detach(), self._width, kind)

    @property
    def _width(self) -> int:
        """Return the number of inputs on this rank. A row-parallel layer has some of the blocks."""
        return min(self.in_features, self.weight.shape[1] // self._weft_format.block_bytes * 64)


class _PackedProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, kept: BaseFormat, width: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.kept, ctx.width = kept, width
        return F.linear(x, kept.unpack(packed, width, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        [packed] = ctx.saved_tensors
        return grads[0] @ ctx.kept.unpack(packed, ctx.width, grads[0].dtype), None, None, None


@torch.no_grad()
def pack_layers(model: nn.Module, chosen: Mapping[str, nn.Module], base: str) -> dict[str, int]:
    """Quantize the weights of linear layers in place.

    Args:
        model: the model of the layers.
        chosen: layers by path.
        base: "int8" or "nf4".

    Returns:
        The number of inputs of each layer, by path.

    Raises:
        ModelError: if the format is unknown, or if a layer stores its weight transposed.
    """
    if base not in BASE_FORMATS:
        raise ModelError(f"base={base}: a base is stored, int8 or nf4. Use base=nf4.")
    kept, widths = BASE_FORMATS[base], dict[str, int]()
    for path, layer in chosen.items():
        if layers.is_transposed(layer):
            raise ModelError(
                f"base={base}: {path} keeps its weight as (inputs, outputs), and blocks are of an output's inputs. "
                "Use base=stored."
            )
    for path, layer in chosen.items():
        weight = layers.stored_weight(layer)
        widths[path] = weight.shape[1]
        layer.weight = nn.Parameter(kept.pack(weight), requires_grad=False)
        replace_class(layer, PackedLinear, format=kept, stored=weight.dtype)
    return widths


@torch.no_grad()
def unpack_layer(layer: nn.Module) -> None:
    """Replace the quantized weight of a layer by its dequantized values in place, in the dtype before quantization."""
    assert isinstance(layer, PackedLinear)
    layer.weight = nn.Parameter(layer.unpacked_weight().to(layer._weft_stored), requires_grad=False)


def leave_packed(layer: nn.Module) -> None:
    """Remove a layer's format after `unpack_layer`, and restore its class unless a later subclass replaced it."""
    del layer._weft_format, layer._weft_stored
    revert(layer, PackedLinear)
