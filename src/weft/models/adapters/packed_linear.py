"""Linear layers whose frozen weight is kept as bytes, and unpacked in each product.

Backward unpacks it again: what autograd keeps is the bytes. D features that go in, F features that come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.adapters.base_format import BASE_FORMATS, BaseFormat
from weft.private_torch import Function
from weft.structure import become, layers, revert


class PackedLinear(nn.Module):
    """Base of the classes that layers with packed weights are given; beside it stands their own."""

    #: For `structure.layers.is_linear`: the layer is what it was without this class.
    is_adapter = True

    weight: nn.Parameter
    in_features: int
    _weft_format: BaseFormat
    #: Of the weight before it was packed.
    _weft_stored: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer: (..., D) to (..., F)."""
        return self.times_weight(x, layers.bias_of(self))

    def times_weight(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with the unpacked weight, which lives no longer than that."""
        product: Tensor = _PackedProduct.apply(x, self.weight, self._weft_format, self._width)
        return product if bias is None else product + bias

    def unpacked_weight(self) -> Tensor:
        """Return the weight that the bytes stand for, (F, D), in float32 or what it was stored in above that."""
        kind = torch.promote_types(self._weft_stored, torch.float32)
        return self._weft_format.unpack(self.weight.detach(), self._width, kind)

    @property
    def _width(self) -> int:
        """Inputs of what is here: of a layer cut by rows some blocks."""
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
    """Keep the weights of linear layers as bytes, in place.

    Args:
        model: whose layers they are.
        chosen: layers by path.
        base: "int8" or "nf4".

    Returns:
        The inputs of each layer, by path.

    Raises:
        ModelError: for another format, and for a layer that keeps its weight transposed.
    """
    if base not in BASE_FORMATS:
        raise ModelError(f"base={base}: a base is kept as stored, int8 or nf4. Use base=nf4.")
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
        become(layer, PackedLinear, format=kept, stored=weight.dtype)
    return widths


@torch.no_grad()
def unpack_layer(layer: nn.Module) -> None:
    """Give a packed layer a weight again, in place: what its bytes stand for, in the format that was stored."""
    assert isinstance(layer, PackedLinear)
    layer.weight = nn.Parameter(layer.unpacked_weight().to(layer._weft_stored), requires_grad=False)


def leave_packed(layer: nn.Module) -> None:
    """Give a layer that `unpack_layer` unpacked, and that nothing stands in front of any more, its own class back."""
    del layer._weft_format, layer._weft_stored
    revert(layer, PackedLinear)
