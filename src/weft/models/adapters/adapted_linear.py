"""A linear layer with an adapter beside its frozen weight.

    lora, rslora   y = W x + b + s B A drop(x)
    dora           y = b + (m / |W + s B A|) (W x + s B A x), where |.| is the norm of each row and has no gradient

Method: Hu et al. 2021, arXiv 2106.09685 (LoRA); Kalajdzievski 2023, arXiv 2312.03732 (rsLoRA); Liu et al. 2024, arXiv
2402.09353 (DoRA). The numbers are those of peft.

D features that go in, F features that come out, R the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError
from weft.models.adapters.adapter_kind import AdapterKind
from weft.models.initialise import initialise_parameter, uniform_values
from weft.structure import layers


class Alone:
    """What an adapter asks of the ranks that share its layer; here one process has it whole."""

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        """Drop some of the adapter's inputs."""
        return dropout(x)

    def into_weight(self, x: Tensor) -> Tensor:
        """Give the input of a second product with the layer's own weight."""
        return x

    def low(self, h: Tensor) -> Tensor:
        """Give what B reads, (..., R), from what A made."""
        return h

    def squares(self, total_F: Tensor) -> Tensor:
        """Add up squares of a row's elements that lie on several ranks."""
        return total_F


_ALONE = Alone()


class AdaptedLinear(nn.Module):
    """Base of the classes that adapted layers are given; beside it stands their own."""

    #: For `structure.layers.is_linear`: the layer is what it was without this class.
    is_adapter = True

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter | None
    lora_dropout: nn.Module | None
    _weft_adapter: AdapterKind
    #: (F, D) of the whole layer.
    _weft_whole: tuple[int, int]
    _weft_is_on: bool

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with its adapter: (..., D) to (..., F)."""
        return self.adapt(super().forward(x), x)

    def adapt(self, product: Tensor, x: Tensor, line: Alone = _ALONE, *, has_bias: bool = True) -> Tensor:
        """Add the adapter to the layer's own product.

        Args:
            product: (..., F), of the layer's weight; not used any more by the caller.
            x: (..., D) that the adapter reads.
            line: the ranks that share the layer.
            has_bias: whether the product holds the layer's bias.
        """
        if not self._weft_is_on:
            return product
        factor = self._weft_adapter.scale
        drops = self.lora_dropout is not None and self.training
        read = line.drop(self.lora_dropout, x) if self.lora_dropout is not None else x
        read = read.to(self.lora_A.dtype)
        low = line.low(F.linear(read, self.lora_A))
        if self.lora_magnitude is None and low.dtype == product.dtype:  # one pass over the product in place of three
            return torch.addmm(product.flatten(0, -2), low.flatten(0, -2), self.lora_B.t(), alpha=factor).view(
                product.shape
            )
        added = (F.linear(low, self.lora_B) * factor).to(product.dtype)
        if self.lora_magnitude is None:
            return product + added
        weight, bias = layers.weight_of(self), layers.bias_of(self) if has_bias else None
        plain = product if bias is None else product - bias
        if drops:  # both terms read what was left
            plain = F.linear(line.into_weight(read).to(weight.dtype), weight)
        grown = (self.lora_magnitude / self._norm(line)).to(product.dtype)
        return product + (grown - 1) * plain + grown * added

    @torch.no_grad()
    def _norm(self, line: Alone = _ALONE) -> Tensor:
        """The norm of each row of W + s B A, (F,), without making that matrix; at least in float32."""
        kept = torch.promote_types(self.lora_A.dtype, torch.float32)
        weight, a, b = layers.weight_of(self), self.lora_A, self.lora_B.to(kept)
        scale = self._weft_adapter.scale
        total = torch.linalg.vector_norm(weight, dim=1, dtype=kept).square()
        total += 2 * scale * (F.linear(weight.to(a.dtype), a).to(kept) * b).sum(1)
        total += scale * scale * (b @ (a.to(kept) @ a.to(kept).t()) * b).sum(1)
        return line.squares(total).sqrt()

    @torch.no_grad()
    def fill_adapter(self, parameter: Tensor, name: str, full_name: str, seed: int) -> bool:
        """Fill one of the adapter's parameters, whole, with its first values; False: it is none of the adapter's.

        A is uniform as `nn.Linear` begins, from seed and name; B is zero, so that the adapter changes nothing at first;
        the magnitude is the norm of the weight's rows.

        Args:
            parameter: any tensor of its whole shape.
            name: in this layer.
            full_name: in the whole model.
            seed: of the weights.
        """
        if name == "lora_A":
            flat, bound = parameter.view(-1), 1 / math.sqrt(self._weft_whole[1])
            for start, values in uniform_values(seed, full_name, parameter.numel()):
                flat[start : start + values.numel()] = values.mul_(2).sub_(1).mul_(bound).to(parameter.device)
        elif name == "lora_B":
            parameter.zero_()
        elif name == "lora_magnitude":
            weight = layers.weight_of(self)
            if weight.is_meta or tuple(weight.shape) != self._weft_whole:
                # Cut, or not made yet: the weight is a function of seed and name too.
                stored = self._weft_whole[::-1] if layers.is_transposed(self) else self._weft_whole
                made = torch.empty(stored, dtype=parameter.dtype)
                initialise_parameter(made, full_name.removesuffix(name) + "weight", self, seed)
                weight = made.t() if layers.is_transposed(self) else made
            parameter.copy_(torch.linalg.vector_norm(weight, dim=1, dtype=parameter.dtype))
        else:
            return False
        return True


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had no adapter inside, such as for reference log-probabilities.

    Raises:
        ModelError: where the model has none.
    """
    found = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    if not found:
        raise ModelError(f"model of type {type(model).__name__}: it has no adapter. Call add_adapter first.")
    before = [layer._weft_is_on for layer in found]
    for layer in found:
        layer._weft_is_on = False
    try:
        yield
    finally:
        for layer, was_on in zip(found, before, strict=True):
            layer._weft_is_on = was_on
