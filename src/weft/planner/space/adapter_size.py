"""How large an adapter is that a config asks for, without building the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weft.spec import DecoderSpec
from weft.spec.config import AdapterSection
from weft.spec.model import DecoderWidths


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """An adapter on a mean layer of a model, all else of which is frozen.

    rank: of its matrices. width: inputs and outputs of the adapted products, added up. products: how many.
    """

    rank: int
    width: float
    products: float

    @property
    def params(self) -> float:
        """Parameters in a mean layer."""
        return self.rank * self.width

    @classmethod
    def of(cls, spec: DecoderSpec, section: AdapterSection) -> AdapterSize | None:
        """Return the size for one of Weft's decoders; None where the section asks for none."""
        if not section.rank:
            return None
        found = [
            inputs + outputs
            for layer in range(spec.num_layers)
            for path, inputs, outputs in _products(spec, layer)
            if _fits(f"blocks.{layer}.{path}", section.targets)
        ]
        return cls(rank=section.rank, width=sum(found) / spec.num_layers, products=len(found) / spec.num_layers)

    @classmethod
    def of_shape(cls, shape: DecoderWidths, rank: int) -> AdapterSize:
        """Return the size on all linear layers of a decoder but the head, routers and stacked experts."""
        attention, moe = _attention(shape), shape.moe_layers / shape.layers
        dense, shared = _feed_forward(shape, shape.ffn), _feed_forward(shape, shape.shared_ffn)
        width = sum(attention) + (1 - moe) * sum(dense) + moe * sum(shared)
        products = len(attention) + (1 - moe) * len(dense) + moe * len(shared)
        return cls(rank=rank, width=width, products=products)


def _attention(shape: DecoderWidths) -> list[int]:
    """Inputs and outputs, added up, of each product of an attention layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if not shape.kv_rank:
        return [shape.hidden + q, shape.hidden + kv, shape.hidden + kv, q + shape.hidden]
    turned = shape.heads * (shape.head_dim + shape.rope_dim)
    low = [shape.hidden + shape.q_rank, shape.q_rank + turned] if shape.q_rank else [shape.hidden + turned]
    return [*low, shape.hidden + shape.kv_rank + shape.rope_dim, shape.kv_rank + 2 * q, q + shape.hidden]


def _feed_forward(shape: DecoderWidths, width: int) -> list[int]:
    return [shape.hidden + width] * (3 if shape.gated else 2) if width else []


def _fits(path: str, targets: Sequence[str]) -> bool:
    return not targets or any(fnmatchcase(path, one) or fnmatchcase(path, f"*.{one}") for one in targets)


def _products(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, int, int]]:
    """(Path in the block, inputs, outputs) of the linear layers of one block."""
    dim, q, kv = spec.dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from (("attn.q", dim, q), ("attn.k", dim, kv), ("attn.v", dim, kv), ("attn.o", q, dim))
    part, width = "mlp", spec.ffn_dim
    if layer in spec.moe_layers:
        part, width = "mlp.shared", spec.num_shared_experts * spec.expert_width
        if not width:
            return
    yield from ((f"{part}.{name}", dim, width) for name in (("up",) if spec.family == "gpt2" else ("gate", "up")))
    yield f"{part}.down", width, dim
