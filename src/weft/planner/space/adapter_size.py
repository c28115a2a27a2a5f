"""How large an adapter is that a config asks for, without building the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weft.spec import DecoderSpec
from weft.spec.config import AdapterSection


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
