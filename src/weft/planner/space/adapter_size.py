"""How large an adapter is, and what its frozen base takes, without building the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.spec import DecoderSpec, TracedModel
from weft.spec.model import DecoderWidths

if TYPE_CHECKING:
    from weft.spec.config import AdapterSection

#: Of a linear layer: inputs and outputs.
Widths = tuple[float, float]
#: As in `models/adapters/base_format.py`, which loads torch (a test holds them together): weights of a block, and the
#: bytes of one with its scale.
BLOCK = 64
BLOCK_BYTES = {"int8": BLOCK + 4, "nf4": BLOCK // 2 + 4}
#: Bytes that unpacking a weight moves, kernel by kernel, as `BaseFormat.unpack` calls them: the code copied (2),
#: widened (5), scaled (8) and narrowed (6); of nf4 two codes are taken out of a byte (1.5), widened (2.5) and looked up
#: (4) for each half, so per weight 15, then brought together (8), scaled (8) and narrowed (6).
UNPACKED = {"int8": 21.0, "nf4": 37.0}
#: Weights that are unpacked at a time, as `models/adapters/base_format.py` has it.
UNPACKED_AT_ONCE = 2**23
#: Kernels of that.
UNPACKS = {"int8": 5, "nf4": 11}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """An adapter on a mean layer of a model, all else of which is frozen.

    rank: of its matrices. width: inputs and outputs of the adapted products, added up. products: how many.
    base: how frozen linear layers keep their weights: "stored", "int8" or "nf4". packed: weights of a mean layer that
    are kept so; packed_bytes: what they take; packed_products: products with them; largest: weights of the largest.
    """

    rank: int
    width: float
    products: float
    base: str = "stored"
    packed: float = 0.0
    packed_bytes: float = 0.0
    packed_products: float = 0.0
    largest: float = 0.0

    @property
    def params(self) -> float:
        """Parameters in a mean layer."""
        return self.rank * self.width

    def params_of_rank(self, layers: Any, t: Any) -> Any:
        """Return the parameters of `layers` layers on one of `t` tensor-parallel ranks, which cut one of two matrices.

        Numbers or numpy arrays.
        """
        return layers * self.params * (0.5 + 0.5 / t)

    def unpacking_bytes(self, t: Any, width: Any) -> Any:
        """Return the bytes that unpacking the largest weight of a packed base takes.

        The weight, and two values of 4 bytes for each of those that are unpacked at once.

        Args:
            t: tensor-parallel ranks.
            width: bytes of a weight in a pass.
        """
        largest = self.largest / t
        return width * largest + 8.0 * np.minimum(largest, UNPACKED_AT_ONCE)

    @property
    def unpacked_bytes(self) -> float:
        """Bytes that unpacking the base of a mean layer moves."""
        return self.packed * UNPACKED.get(self.base, 0.0)

    @property
    def unpack_calls(self) -> float:
        """Kernels of that."""
        return self.packed_products * UNPACKS.get(self.base, 0)

    @classmethod
    def of(cls, spec: DecoderSpec, section: AdapterSection) -> AdapterSize | None:
        """Return the size for one of Weft's decoders; None where the section asks for none."""
        if not section.rank:
            return None
        every = [(layer, *each) for layer in range(spec.num_layers) for each in _products(spec, layer)]
        chosen = [
            (inputs, outputs)
            for layer, path, inputs, outputs in every
            if _fits(f"blocks.{layer}.{path}", section.targets)
        ]
        frozen = [(inputs, outputs) for _, _, inputs, outputs in every]
        return cls.of_widths(section.rank, spec.num_layers, chosen, section.base, frozen)

    @classmethod
    def of_widths(
        cls, rank: int, num_layers: int, adapted: Iterable[Widths], base: str = "stored", frozen: Iterable[Widths] = ()
    ) -> AdapterSize:
        """Return the size by the widths of linear layers, of a whole model.

        Args:
            rank: of the matrices.
            num_layers: of the model, over which the mean is taken.
            adapted: (inputs, outputs) of each layer with an adapter.
            base: how frozen linear layers keep their weights.
            frozen: (inputs, outputs) of each layer that keeps them so.
        """
        chosen = list(adapted)
        kept = list(frozen) if base in BLOCK_BYTES else []
        return cls(
            rank=rank,
            width=sum(inputs + outputs for inputs, outputs in chosen) / num_layers,
            products=len(chosen) / num_layers,
            base=base,
            packed=sum(inputs * outputs for inputs, outputs in kept) / num_layers,
            packed_bytes=sum(_row_bytes(inputs, base) * outputs for inputs, outputs in kept) / num_layers,
            packed_products=len(kept) / num_layers,
            largest=max((inputs * outputs for inputs, outputs in kept), default=0.0),
        )

    @classmethod
    def of_shape(cls, shape: DecoderWidths, rank: int, base: str = "stored") -> AdapterSize:
        """Return the size on all linear layers of a decoder but the head, routers and stacked experts.

        Args:
            shape: of the decoder.
            rank: of the matrices.
            base: how frozen linear layers keep their weights.
        """
        dense = [*attention_products(shape), *feed_forward_products(shape, shape.ffn)] * (
            shape.layers - shape.moe_layers
        )
        moe = [*attention_products(shape), *feed_forward_products(shape, shape.shared_ffn)] * shape.moe_layers
        return cls.of_widths(rank, shape.layers, [*dense, *moe], base, [*dense, *moe])

    @classmethod
    def of_traced(cls, traced: TracedModel, rank: int, base: str = "stored") -> AdapterSize:
        """Return the size on all linear layers of a traced model that may have an adapter.

        Args:
            traced: the model.
            rank: of the matrices.
            base: how frozen linear layers keep their weights.
        """
        found = [(inputs, outputs) for inputs, outputs, count in traced.linears for _ in range(count)]
        return cls.of_widths(rank, traced.num_layers, found, base, found)


def _row_bytes(inputs: float, base: str) -> float:
    """Bytes of a row of weights: whole blocks."""
    return -(-inputs // BLOCK) * BLOCK_BYTES[base]


def attention_products(shape: DecoderWidths) -> list[Widths]:
    """Inputs and outputs of each product of an attention layer."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if not shape.kv_rank:
        return [(h, q), (h, kv), (h, kv), (q, h)]
    turned = shape.heads * (shape.head_dim + shape.rope_dim)
    low = [(h, shape.q_rank), (shape.q_rank, turned)] if shape.q_rank else [(h, turned)]
    return [*low, (h, shape.kv_rank + shape.rope_dim), (shape.kv_rank, 2 * q), (q, h)]


def feed_forward_products(shape: DecoderWidths, width: int) -> list[Widths]:
    """Inputs and outputs of each product of a feed-forward layer of this width."""
    return [*[(shape.hidden, width)] * (2 if shape.gated else 1), (width, shape.hidden)] if width else []


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
