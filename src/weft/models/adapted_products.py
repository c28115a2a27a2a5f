"""Products of rows with stacked experts' weights that are quantized or have an adapter.

E experts, R rows, F outputs, D inputs, K rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.experts import Ends, by_row, grouped_linear
from weft.models.quantized_linear import BaseFormat
from weft.private_torch import Function, storage_key


@dataclass(frozen=True, slots=True)
class PackedStack:
    """Format of a stack of quantized weights.

    Attributes:
        kept: format of the codes.
        width: weights per row, which is the last dim of the stack.
        dtype: dtype of the weights before they were quantized.
    """

    kept: BaseFormat
    width: int
    dtype: torch.dtype

    def unpack(self, packed: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return dequantized weights: in `dtype`, or in the dtype before quantization, but at least in float32."""
        return self.kept.unpack(packed, self.width, dtype or torch.promote_types(self.dtype, torch.float32))


def packed_product(x_RD: Tensor, packed: Tensor, form: PackedStack, ends_E: Ends, is_transposed: bool) -> Tensor:
    """Compute x @ w[e].T for the rows of each expert e; (R, F). Only one expert is dequantized at a time.

    Args:
        x_RD: rows, by expert.
        packed: quantized weights, (E, F, bytes), or (E, D, bytes) if transposed.
        form: their format.
        ends_E: cumulative row counts by expert.
        is_transposed: layout of the weights.
    """
    if torch.is_autocast_enabled(x_RD.device.type):
        x_RD = x_RD.to(torch.get_autocast_dtype(x_RD.device.type))
    ends = ends_E.tolist() if isinstance(ends_E, Tensor) else ends_E
    return _PackedLoop.apply(x_RD, packed, form, ends, is_transposed)


class _PackedLoop(Function):
    """Matmuls of one expert at a time, also of experts without rows, for the reason that `experts._Loop` gives."""

    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, packed: Tensor, form: PackedStack, ends: Sequence[int], is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.is_transposed = is_transposed
        ctx.form, ctx.sizes = form, [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        parts = [
            torch.mm(rows, _weight(packed[expert], form, rows, is_transposed).t())
            for expert, rows in enumerate(x_RD.split(ctx.sizes))
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        [packed] = ctx.saved_tensors
        rows = grads[0].split(ctx.sizes)
        parts = [
            torch.mm(some, _weight(packed[expert], ctx.form, some, ctx.is_transposed))
            for expert, some in enumerate(rows)
        ]
        return torch.cat(parts), None, None, None, None


def _weight(packed: Tensor, form: PackedStack, rows: Tensor, is_transposed: bool) -> Tensor:
    """Return one expert's weights, (F, D), for a matmul with `rows`. They stay undefined if there are no rows."""
    has_rows = rows.shape[0] > 0
    weight = form.unpack(packed, rows.dtype) if has_rows else rows.new_empty(packed.shape[0], form.width)
    return weight.t() if is_transposed else weight


def is_low_rank_cheaper(rows: int, stored: Tensor, rank: int) -> bool:
    """Return True if adding the adapter's products takes fewer FLOPs than adding the adapter to the weights.

    Per row, the products take 6 K (D + F) multiply-adds in forward and backward. Adding B A to each expert's weight and
    taking the gradients of A and B from the weight's gradient takes 3 E K D F, and that gradient takes R D F.
    """
    count, outputs, inputs = stored.shape
    return 3 * rows * rank * (outputs + inputs) <= (rows + 3 * count * rank) * outputs * inputs


def add_adapter_product(
    product_RF: Tensor, x_RD: Tensor, own: Mapping[str, Tensor], scale: float, ends: Ends
) -> Tensor:
    """Return the experts' outputs plus the adapter's outputs, without the matrices B A; (R, F).

    Args:
        product_RF: product with the frozen weights.
        x_RD: rows, by expert.
        own: A (E, K, D) and B (E, F, K) by the ends of their names.
        scale: factor of the product of B and A.
        ends: cumulative row counts by expert.
    """
    a, b = own["_lora_A"], own["_lora_B"]
    added = grouped_linear(grouped_linear(x_RD.to(a.dtype), a, ends), b, ends) * scale
    return product_RF + added.to(product_RF.dtype)


@torch.no_grad()
def output_norms(stored: Tensor, own: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return the norm of each output of W + s B A, (E, F), without that sum; at least in float32."""
    kept = torch.promote_types(own["_lora_A"].dtype, torch.float32)
    a, b = own["_lora_A"].to(kept), own["_lora_B"].to(kept)
    total = torch.linalg.vector_norm(stored, dim=2, dtype=kept).square()
    total += 2 * scale * (torch.bmm(stored.to(own["_lora_A"].dtype), own["_lora_A"].mT).to(kept) * b).sum(2)
    total += scale * scale * (torch.bmm(b, torch.bmm(a, a.mT)) * b).sum(2)
    return total.sqrt()


def times_by_expert(product_RF: Tensor, factor_EF: Tensor, ends: Ends) -> Tensor:
    """Multiply each row by the factors of its expert."""
    return product_RF * by_row(factor_EF, ends, len(product_RF)).to(product_RF.dtype)


@dataclass(slots=True)
class MadeWeights:
    """Weights that a module's forward computes from smaller tensors. Backward computes them again.

    `pack` and `unpack` are hooks for saved tensors: a view of such a weight is replaced by a function that computes it,
    so no weight stays in memory from forward to backward.
    """

    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _makers: dict[int, tuple[str, Callable[[], Tensor]]] = field(
        default_factory=dict[int, tuple[str, Callable[[], Tensor]]]
    )
    _again: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _num_saved: int = 0

    def make(self, name: str, maker: Callable[[], Tensor]) -> Tensor:
        """Return the weight of this name, and compute it at first use."""
        if name not in self.weights:
            self.weights[name] = maker()
            self._makers[storage_key(self.weights[name].untyped_storage())] = name, maker
        return self.weights[name]

    def pack(self, saved: Tensor) -> Any:
        """Return what autograd keeps for a tensor."""
        is_plain = type(saved) in (Tensor, nn.Parameter)
        found = self._makers.get(storage_key(saved.untyped_storage())) if is_plain else None
        if found is None or saved.dtype != self.weights[found[0]].dtype:
            return saved
        self._num_saved += 1
        return found, saved.shape, saved.stride(), saved.storage_offset()

    @torch.no_grad()
    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor of `pack`'s result. The weight is kept until the last of its views was used."""
        if isinstance(kept, Tensor):
            return kept
        (name, maker), shape, stride, offset = kept
        if name not in self._again:
            self._again[name] = maker()
        view = self._again[name].as_strided(shape, stride, offset)
        self._num_saved -= 1
        if self._num_saved <= 0:
            self._again.clear()
        return view
