"""Which share of a decoder is trained where groups of the optimizer have lr=0, without building the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from weft.spec import DecoderSpec

if TYPE_CHECKING:
    from weft.spec.config import OptimizerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPart:
    """Shares, 0 to 1, of parameters that have gradients.

    layers: of a mean layer outside of its experts. most: of the layer that trains most. experts: of the experts of all
    layers. embedding, head: of these. reach: of the layers, those through which gradients flow: from the first with a
    trained parameter on, or all where the embedding is trained.
    """

    layers: float = 1.0
    most: float = 1.0
    experts: float = 1.0
    embedding: float = 1.0
    head: float = 1.0
    reach: float = 1.0

    def of_ends(self, embedding: Any, head: Any) -> Any:
        """Return the share of the ends that a rank trains. embedding, head: whether it holds them; bool or arrays."""
        held = 1.0 * embedding + 1.0 * head
        return (embedding * self.embedding + head * self.head) / (held + (held == 0))

    @classmethod
    def of(cls, spec: DecoderSpec, groups: Sequence[OptimizerGroup]) -> TrainedPart | None:
        """Return the shares of one of Weft's decoders; None where no group has lr=0."""
        if all(group.lr != 0 for group in groups):
            return None
        sizes: dict[str, list[float]] = {}
        for part, name, size in parameters_of(spec):
            trained, all_of_it = sizes.setdefault(part, [0.0, 0.0])
            sizes[part] = [trained + size * (not _is_frozen(name, groups)), all_of_it + size]
        inside = [sizes[f"{layer}"] for layer in range(spec.num_layers)]
        experts = [sizes[f"{layer} experts"] for layer in spec.moe_layers] or [[1.0, 1.0]]
        moving = [
            layer for layer in range(spec.num_layers) if sizes[f"{layer}"][0] or sizes.get(f"{layer} experts", [0])[0]
        ]
        embedding, head = (sizes[part][0] / sizes[part][1] for part in ("embedding", "head"))
        first = 0 if embedding else min(moving, default=spec.num_layers)
        return cls(
            layers=sum(each[0] for each in inside) / sum(each[1] for each in inside),
            most=max(each[0] / each[1] for each in inside),
            experts=sum(each[0] for each in experts) / sum(each[1] for each in experts),
            embedding=embedding,
            head=embedding if spec.tied else head,
            reach=1 - first / spec.num_layers,
        )


def _is_frozen(name: str, groups: Sequence[OptimizerGroup]) -> bool:
    own = next((group for group in groups if fnmatchcase(name, group.match)), None)  # the first that fits counts
    return own is not None and own.lr == 0


def parameters_of(spec: DecoderSpec) -> Iterator[tuple[str, str, float]]:
    """Yield (part, name, size) of all parameters, as `models/transformer.py` calls them: a test holds them together.

    The last norm counts to the head.
    """
    dim, gpt2 = spec.dim, spec.family == "gpt2"
    table = float(spec.vocab_size * dim)
    yield "embedding", "embed.weight", table
    if gpt2:
        yield "embedding", "pos_embed.weight", float(spec.max_seq_len * dim)
    for layer in range(spec.num_layers):
        for name, size in _of_block(spec, layer):
            experts = name.startswith("mlp.experts.")
            yield f"{layer} experts" if experts else f"{layer}", f"blocks.{layer}.{name}", float(size)
    yield "head", "norm.weight", float(dim)
    if gpt2:
        yield "head", "norm.bias", float(dim)
    if not spec.tied:
        yield "head", "head.weight", table


def _of_block(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, int]]:
    dim, kv, gpt2 = spec.dim, spec.num_kv_heads * spec.head_dim, spec.family == "gpt2"
    linear = [("attn.q", dim, dim), ("attn.k", dim, kv), ("attn.v", dim, kv), ("attn.o", dim, dim)]
    part, width = "mlp", spec.ffn_dim
    if layer in spec.moe_layers:
        part, width = "mlp.shared", spec.num_shared_experts * spec.expert_width
        yield "mlp.router.weight", spec.num_experts * dim
        yield "mlp.experts.gate_up", spec.num_experts * 2 * spec.expert_width * dim
        yield "mlp.experts.down", spec.num_experts * dim * spec.expert_width
    if width:
        linear += [(f"{part}.{name}", dim, width) for name in (("up",) if gpt2 else ("gate", "up"))]
        linear += [(f"{part}.down", width, dim)]
    for name, inputs, outputs in linear:
        yield f"{name}.weight", inputs * outputs
        if gpt2:
            yield f"{name}.bias", outputs
    for norm in ("norm1", "norm2"):
        yield f"{norm}.weight", dim
        if gpt2:
            yield f"{norm}.bias", dim
