"""Sizes of adapters and their frozen base, trained shares of a model, and document mixes, without the model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.config.privacy.largest_draw import most_drawn
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import DecoderWidths
from weft.config.shapes.traced_model import TracedModel
from weft.errors import ConfigError, Problem
from weft.planner.space.shape import Shape
from weft.units import counted, parse_count

if TYPE_CHECKING:
    from weft.config.privacy.section import PrivacySection
    from weft.config.sections import AdapterSection, OptimizerGroup

#: (inputs, outputs) of a linear layer.
Widths = tuple[float, float]
#: Weights of a block, and bytes of a block with its scale. Equal to `models/quantized_linear.py`, which is not imported
#: because it needs torch; a test compares them.
BLOCK = 64
BLOCK_BYTES = {"int8": BLOCK + 4, "nf4": BLOCK // 2 + 4}
#: Bytes moved per dequantized weight by the kernels of `BaseFormat.unpack`. int8: the code is copied (2), converted
#: (5), scaled (8) and rounded (6). nf4: for each half of a byte, a code is extracted (1.5), converted (2.5) and looked
#: up (4), 15 per weight in total; then the halves are joined (8), scaled (8) and rounded (6).
UNPACKED = {"int8": 21.0, "nf4": 37.0}
#: Weights that are dequantized in one chunk, as in `models/quantized_linear.py`.
UNPACKED_AT_ONCE = 2**23
#: Kernel calls to dequantize one weight matrix.
UNPACKS = {"int8": 5, "nf4": 11}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Adapter on an average layer of a model whose other weights are frozen.

    Attributes:
        rank: rank of its matrices.
        width: sum of inputs and outputs of the adapted linear layers.
        products: number of adapted linear layers.
        more: other trained parameters, such as rows of embeddings and modules trained in full.
        base: storage of frozen linear layers: "stored", "int8" or "nf4".
        packed: number of quantized weights in an average layer.
        packed_bytes: bytes of the quantized weights.
        packed_products: number of linear layers with quantized weights.
        largest: weights of the largest quantized matrix.
        fused: one kernel dequantizes a weight matrix, as in bitsandbytes and AutoGPTQ. If False, Weft's eager kernels
            do.
    """

    rank: int
    width: float
    products: float
    more: float = 0.0
    base: str = "stored"
    packed: float = 0.0
    packed_bytes: float = 0.0
    packed_products: float = 0.0
    largest: float = 0.0
    fused: bool = False

    @property
    def params(self) -> float:
        """Number of trained parameters in an average layer."""
        return self.rank * self.width + self.more

    def params_of_rank(self, layers: Any, t: Any) -> Any:
        """Return the number of trained parameters of `layers` layers on one of `t` tensor-parallel ranks.

        One of the two matrices is sharded. Accepts numbers or numpy arrays.
        """
        return layers * self.params * (0.5 + 0.5 / t)

    def unpacking_bytes(self, t: Any, width: Any) -> Any:
        """Return the temporary bytes to dequantize the largest weight of a quantized base on one of `t` ranks.

        They hold the weight in values of `width` bytes, and two values of 4 bytes for each weight of a chunk.
        """
        largest = self.largest / t
        return width * largest + 8.0 * np.minimum(largest, UNPACKED_AT_ONCE)

    @property
    def unpacked_bytes(self) -> float:
        """Memory traffic (bytes) to dequantize the base of an average layer."""
        return self.packed_bytes + 2.0 * self.packed if self.fused else self.packed * UNPACKED.get(self.base, 0.0)

    @property
    def unpack_calls(self) -> float:
        """Kernel calls to dequantize the base of an average layer."""
        return self.packed_products * (1 if self.fused else UNPACKS.get(self.base, 0))

    @classmethod
    def of(cls, spec: DecoderSpec, section: AdapterSection) -> AdapterSize | None:
        """Return the adapter size for one of Weft's decoders, or None if the section requests no adapter."""
        if not section.rank:
            return None
        every = [(layer, *each) for layer in range(spec.num_layers) for each in _products(spec, layer)]
        chosen = [
            (inputs, outputs)
            for layer, path, inputs, outputs in every
            if not section.targets
            or any(
                fnmatchcase(f"blocks.{layer}.{path}", f"{start}{one}")
                for one in section.targets
                for start in ("", "*.")
            )
        ]
        frozen = [(inputs, outputs) for _, _, inputs, outputs in every]
        return cls.of_widths(section.rank, spec.num_layers, chosen, section.base, frozen)

    @classmethod
    def of_widths(
        cls, rank: int, num_layers: int, adapted: Iterable[Widths], base: str = "stored", frozen: Iterable[Widths] = ()
    ) -> AdapterSize:
        """Return the adapter size from the widths of a model's adapted and frozen linear layers.

        Args:
            rank: rank of the adapter.
            num_layers: number of repeated layers, over which sizes are averaged.
            adapted: linear layers with an adapter.
            base: storage of the frozen linear layers.
            frozen: linear layers with frozen weights. Ignored unless `base` is quantized.
        """
        chosen = list(adapted)
        kept = list(frozen) if base in BLOCK_BYTES else []
        return cls(
            rank=rank,
            width=sum(inputs + outputs for inputs, outputs in chosen) / num_layers,
            products=len(chosen) / num_layers,
            base=base,
            packed=sum(inputs * outputs for inputs, outputs in kept) / num_layers,
            # A row of weights ends with a full block.
            packed_bytes=sum(-(-inputs // BLOCK) * BLOCK_BYTES[base] * outputs for inputs, outputs in kept)
            / num_layers,
            packed_products=len(kept) / num_layers,
            largest=max((inputs * outputs for inputs, outputs in kept), default=0.0),
        )

    @classmethod
    def of_shape(cls, shape: DecoderWidths, rank: int, base: str = "stored") -> AdapterSize:
        """Return the adapter size for all linear layers of a decoder except the head, routers and stacked experts."""
        dense = [*attention_products(shape), *feed_forward_products(shape, shape.ffn)] * (
            shape.layers - shape.moe_layers
        )
        moe = [*attention_products(shape), *feed_forward_products(shape, shape.shared_ffn)] * shape.moe_layers
        return cls.of_widths(rank, shape.layers, [*dense, *moe], base, [*dense, *moe])

    @classmethod
    def of_traced(cls, traced: TracedModel, rank: int, base: str = "stored") -> AdapterSize:
        """Return the adapter size for all linear layers of a traced model that may have an adapter."""
        found = [(inputs, outputs) for inputs, outputs, count in traced.linears for _ in range(count)]
        return cls.of_widths(rank, traced.num_layers, found, base, found)


def attention_products(shape: DecoderWidths) -> list[Widths]:
    """Return the inputs and outputs of each linear layer of an attention layer."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if not shape.kv_rank:
        return [(h, q), (h, kv), (h, kv), (q, h)]
    turned = shape.heads * (shape.head_dim + shape.rope_dim)
    low = [(h, shape.q_rank), (shape.q_rank, turned)] if shape.q_rank else [(h, turned)]
    return [*low, (h, shape.kv_rank + shape.rope_dim), (shape.kv_rank, 2 * q), (q, h)]


def feed_forward_products(shape: DecoderWidths, width: int) -> list[Widths]:
    """Return the inputs and outputs of each linear layer of a feed-forward layer of this width."""
    return [*[(shape.hidden, width)] * (2 if shape.gated else 1), (width, shape.hidden)] if width else []


def _products(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, int, int]]:
    dim, q, kv = spec.dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from (("attn.q", dim, q), ("attn.k", dim, kv), ("attn.v", dim, kv), ("attn.o", q, dim))
    part, width = "mlp", spec.ffn_dim
    if layer in spec.moe_layers:
        part, width = "mlp.shared", spec.num_shared_experts * spec.expert_width
        if not width:
            return
    yield from ((f"{part}.{name}", dim, width) for name in (("up",) if spec.family == "gpt2" else ("gate", "up")))
    yield f"{part}.down", width, dim


# Trained share of a decoder if optimizer groups have lr=0.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPart:
    """Trained shares (0 to 1) of the parameters of a model.

    Attributes:
        layers: share in an average layer, without experts.
        most: share in the layer with the largest share.
        experts: share of the experts of all layers.
        embedding, head: shares of embedding and head.
        reach: share of the layers with a backward: those from the first layer with a trained parameter on, or all
            layers if the embedding is trained.
    """

    layers: float = 1.0
    most: float = 1.0
    experts: float = 1.0
    embedding: float = 1.0
    head: float = 1.0
    reach: float = 1.0

    def of_ends(self, embedding: Any, head: Any) -> Any:
        """Return the trained share of the embedding and the head on a rank that has one, both or neither (0)."""
        held = 1.0 * embedding + 1.0 * head
        return (embedding * self.embedding + head * self.head) / (held + (held == 0))

    @classmethod
    def of(cls, spec: DecoderSpec, groups: Sequence[OptimizerGroup]) -> TrainedPart | None:
        """Return the shares of one of Weft's decoders, or None if no group has lr=0."""
        if all(group.lr != 0 for group in groups):
            return None
        sizes: dict[str, list[float]] = {}
        for part, name, size in parameters_of(spec):
            trained, all_of_it = sizes.setdefault(part, [0.0, 0.0])
            own = next((group for group in groups if fnmatchcase(name, group.match)), None)  # the first one applies
            sizes[part] = [trained + size * (own is None or own.lr != 0), all_of_it + size]
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


def parameters_of(spec: DecoderSpec) -> Iterator[tuple[str, str, float]]:
    """Yield (part, name, size) of all parameters, with the names of `models/decoder.py`. A test compares them.

    The last norm counts as part of the head.
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
    dim, gpt2 = spec.dim, spec.family == "gpt2"
    if layer in spec.moe_layers:
        yield "mlp.router.weight", spec.num_experts * dim
        yield "mlp.experts.gate_up", spec.num_experts * 2 * spec.expert_width * dim
        yield "mlp.experts.down", spec.num_experts * dim * spec.expert_width
    for name, inputs, outputs in _products(spec, layer):
        yield f"{name}.weight", inputs * outputs
        if gpt2:
            yield f"{name}.bias", outputs
    for norm in ("norm1", "norm2"):
        yield f"{norm}.weight", dim
        if gpt2:
            yield f"{norm}.bias", dim


# Forwards of a step without gradients, in addition to its own forward and backward: a reference model or a teacher.


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWork:
    """Forwards over a step's sequences without gradients.

    Attributes:
        own: number of forwards of the trained model, for example with its adapter disabled.
        shape: shape of a second, frozen model that is distributed by the same plan, or None.
        other: number of forwards of the second model.
        whole_logits: the loss needs the full logits of both models.
    """

    own: float = 0.0
    shape: Shape | None = None
    other: float = 0.0
    whole_logits: bool = False


# Share of the blocks' matmuls that stays in bf16 under precision=fp8, from `train.bf16_layers`.

_LINEAR = re.compile(r"blocks\.(\d+)\.((?:attn|mlp)\.(?!router).*)\.weight")
_END = re.compile(r"(first|last):(\d+)")
#: Names in transformers of the layers of Weft's decoders.
_ELSEWHERE = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def half_share(spec: DecoderSpec, words: Sequence[str]) -> float:
    """Return the share, 0 to 1, of the FLOPs of linear layers in blocks, without stacked experts, that stays in bf16.

    words: `first:N`, `last:N`, and patterns of paths in Weft's decoders or in the Llama family of transformers.
    """
    kept = whole = 0.0
    for _, name, size in parameters_of(spec) if words else ():
        if not (found := _LINEAR.fullmatch(name)):
            continue
        block, layer = found.groups()
        whole += size
        paths = [f"blocks.{block}.{layer}", f"model.layers.{block}.{_ELSEWHERE.get(layer, layer)}"]
        kept += size * any(_names(word, int(block), paths, spec.num_layers) for word in words)
    return kept / whole if whole else 0.0


def _names(word: str, block: int, paths: Sequence[str], num_blocks: int) -> bool:
    if end := _END.fullmatch(word):
        count = int(end[2])
        return block < count if end[1] == "first" else block >= num_blocks - count
    return any(fnmatchcase(path, word) for path in paths)


# Documents of mixed lengths that are packed into sequences.

_EXAMPLE = "--documents 512:9,8k:1"


@dataclass(frozen=True, slots=True)
class DocumentMix:
    """Distribution of document lengths.

    Attributes:
        counts: (tokens of a document, relative number of such documents), shortest first.
    """

    counts: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str) -> DocumentMix:
        """Return the mix of a text such as "512:9,8k:1": nine documents of 512 tokens for each of 8,000.

        "900" is a mix with one length.

        Raises:
            ConfigError: for any other text, or a length or count that is not above 0.
        """
        found: defaultdict[int, float] = defaultdict(float)
        for part in text.split(","):
            length, colon, count = (each.strip() for each in part.partition(":"))
            try:
                tokens, number = parse_count(length), float(count) if colon else 1.0
            except ValueError:
                tokens, number = 0, 0.0
            if tokens < 1 or not 0 < number < 1e18:
                rule = "a document's tokens and, after a colon, how many there are: numbers above 0, with commas"
                raise ConfigError([Problem("", f"documents={part.strip()}: {rule}. Write e.g. {_EXAMPLE}.")])
            found[tokens] += number
        return cls(tuple(sorted(found.items())))

    def segments(self, seq_len: int) -> Iterator[tuple[int, float]]:
        """Yield (tokens, share of all tokens) of the segments in sequences, shortest first.

        A document longer than a sequence fills full sequences, and its remainder is a separate segment. Other documents
        are assumed not to be split at the end of a sequence.
        """
        tokens: defaultdict[int, float] = defaultdict(float)
        for length, count in self.counts:
            whole, rest = divmod(length, seq_len)
            tokens[seq_len] += count * whole * seq_len
            tokens[rest] += count * rest
        total = sum(tokens.values())
        yield from ((length, held / total) for length, held in sorted(tokens.items()) if held)

    def __str__(self) -> str:
        mean = sum(length * count for length, count in self.counts) / sum(count for _, count in self.counts)
        return f"documents of {counted(round(mean), 'token')} on average"


@dataclass(frozen=True, slots=True)
class PrivateDraws:
    """Draws of a private run.

    Attributes:
        most: samples of the largest draw that a run's steps exceed with probability 1e-6.
        passes: setting of the config.
    """

    most: int
    passes: int

    @classmethod
    def of(cls, section: PrivacySection, batch: int, steps: int) -> PrivateDraws:
        """Return the draws of a config. The number of records is unknown, and the bound holds for any."""
        return cls(most_drawn(batch, 0.0, steps) * max(1, section.unit_records), section.passes)
