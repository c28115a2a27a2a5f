"""A decoder as widths and counts, dense or with experts, and the parameter count of each of its parts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from weft.config.shapes.decoder_shape import EXPERT_FIELDS, DecoderSpec, shape_problems
from weft.errors import ConfigError, ModelError, Problem, did_you_mean

if TYPE_CHECKING:
    from weft.config.run_config import ModelSection


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWidths:
    """Widths and counts of a decoder, in values, not bytes.

    Attributes:
        head_dim: width of one head; heads x head_dim may differ from hidden. Of latent attention: the part without
            rotary positions.
        ffn: width of the feed-forward layer (0 if every layer has experts).
        gated: True for two up projections (SwiGLU), else one.
        tied: True if the head shares the embedding's weight.
        biases: True if linear layers have biases.
        layer_norm: True for LayerNorm (always one kernel), else RMSNorm.
        learned_positions: rows of the position table (0: rotary or no positions).
        num_experts, top_k, expert_ffn: sizes of the layers with experts.
        shared_ffn: width of the shared experts, which every token uses.
        dense_layers: number of layers without experts in a model with experts, else 0.
        window: tokens that a windowed layer attends to (0: all).
        windowed_layers: number of layers with the window.
        q_rank, kv_rank: widths of the latent vectors of queries and of keys and values (0: not latent).
        rope_dim: the part of a head with rotary positions, in latent attention.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    layer_norm: bool = False
    learned_positions: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    window: int = 0
    windowed_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    @classmethod
    def of_decoder(cls, spec: DecoderSpec) -> Self:
        """Return the shape of one of Weft's own decoders."""
        gpt2, mixture = spec.family == "gpt2", spec.num_experts > 0
        return cls(
            vocab=spec.vocab_size,
            hidden=spec.dim,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            ffn=spec.ffn_dim,
            gated=not gpt2,
            tied=spec.tied,
            biases=gpt2,
            layer_norm=gpt2,
            learned_positions=spec.max_seq_len if gpt2 else 0,
            num_experts=spec.num_experts,
            top_k=spec.top_k if mixture else 0,
            expert_ffn=spec.expert_width if mixture else 0,
            shared_ffn=spec.num_shared_experts * spec.expert_width if mixture else 0,
            dense_layers=spec.num_layers - len(spec.moe_layers) if mixture else 0,
        )

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers if self.num_experts else 0

    @property
    def attention_params(self) -> int:
        """Number of parameters of one layer's attention projections (query, key, value, output)."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.kv_rank:
            down = self.hidden * (self.q_rank + self.kv_rank + self.rope_dim)
            queries = (self.q_rank or self.hidden) * self.heads * (self.head_dim + self.rope_dim)
            return down + queries + 2 * self.kv_rank * width + width * self.hidden
        biases = (width + 2 * kv_width + self.hidden) if self.biases else 0
        return self.hidden * (2 * width + 2 * kv_width) + biases

    @property
    def norm_params(self) -> int:
        """Number of parameters of one layer's two norms."""
        return 2 * self.hidden * (2 if self.biases else 1)

    def mlp_params(self, width: int) -> int:
        """Return the number of parameters of a feed-forward part of the given width."""
        biases = (width + self.hidden) if self.biases else 0
        return (3 if self.gated else 2) * self.hidden * width + biases

    @property
    def dense_layer_params(self) -> int:
        """Number of parameters of one layer without experts."""
        return self.attention_params + self.norm_params + self.mlp_params(self.ffn)

    @property
    def moe_shared_params(self) -> int:
        """Number of parameters of one layer with experts, without the experts."""
        router = self.hidden * self.num_experts
        return self.attention_params + self.norm_params + self.mlp_params(self.shared_ffn) + router

    @property
    def expert_params(self) -> int:
        """Number of parameters of one expert."""
        return self.mlp_params(self.expert_ffn)

    @property
    def moe_layer_params(self) -> int:
        """Number of parameters of one layer with experts, including all experts."""
        return self.moe_shared_params + self.num_experts * self.expert_params

    @property
    def table_params(self) -> int:
        """Number of parameters of the embedding table, equal to the number for the head."""
        return self.vocab * self.hidden

    @property
    def last_norm_params(self) -> int:
        """Number of parameters of the norm before the head."""
        return self.norm_params // 2

    @property
    def num_params(self) -> int:
        """Number of all parameters; shared ones are counted once."""
        ends = self.table_params * (1 if self.tied else 2) + self.learned_positions * self.hidden
        layers = (self.layers - self.moe_layers) * self.dense_layer_params + self.moe_layers * self.moe_layer_params
        return ends + layers + self.last_norm_params


# Model specifications without torch: shapes of the built-in families, and parameter counts of any model.


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One repeated block or single part of a model, by module path ("blocks.*" for a repeated one)."""

    path: str
    num_params: int  # parameters of one instance
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's parameter counts for the planner. Parameters shared by several modules are counted once."""

    name: str
    layers: tuple[LayerSpec, ...]
    shape: DecoderSpec | None = None

    @property
    def num_params(self) -> int:
        """Number of all parameters; shared ones are counted once."""
        return sum(layer.num_params * layer.count for layer in self.layers)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one token uses: all except the experts that it is not routed to."""
        if self.shape is None:
            return self.num_params
        widths = DecoderWidths.of_decoder(self.shape)
        return self.num_params - widths.moe_layers * max(0, widths.num_experts - widths.top_k) * widths.expert_params

    @classmethod
    def named(cls, name: str) -> ModelSpec:
        """Return the spec of a named size, with parameter counts computed from its shape.

        Raises:
            ModelError: for an unknown name.
        """
        return cls.of_decoder(decoder_spec(name), name)

    @classmethod
    def of_decoder(cls, spec: DecoderSpec, name: str = "Decoder") -> ModelSpec:
        """Return the spec of a decoder, with parameter counts computed from its shape."""
        return cls(name=name, layers=tuple(_decoder_layers(spec)), shape=spec)


def _decoder_layers(spec: DecoderSpec) -> Iterator[LayerSpec]:
    widths, moe_layers = DecoderWidths.of_decoder(spec), spec.moe_layers
    yield LayerSpec("embed", widths.table_params)
    if widths.learned_positions:
        yield LayerSpec("pos_embed", widths.learned_positions * spec.dim)
    dense_layers = [layer for layer in range(spec.num_layers) if layer not in moe_layers]
    kinds = [(dense_layers, widths.dense_layer_params), (list(moe_layers), widths.moe_layer_params)]
    for layers, num_params in sorted(kinds):
        if layers:
            yield LayerSpec(_block_path(layers, spec.num_layers), num_params, len(layers))
    yield LayerSpec("norm", widths.last_norm_params)
    if not spec.tied:
        yield LayerSpec("head", widths.table_params)


def _block_path(layers: list[int], num_layers: int) -> str:
    """Return the path of identical blocks: "blocks.*" for all, "blocks.0" for one, else "blocks.{1-3,5}"."""
    if len(layers) == num_layers:
        return "blocks.*"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"blocks.{names[0]}" if len(layers) == 1 else f"blocks.{{{','.join(names)}}}"


@dataclass(frozen=True, slots=True)
class NamedSize:
    """A named model size. open_vocab: True if the vocabulary comes from the tokenizer, and not from `spec`."""

    name: str
    spec: DecoderSpec
    open_vocab: bool = False


def _llama(
    dim: int, num_layers: int, num_heads: int, num_kv_heads: int, ffn_dim: int, vocab_size: int, max_seq_len: int
) -> DecoderSpec:
    return DecoderSpec(
        family="llama", vocab_size=vocab_size, dim=dim, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, ffn_dim=ffn_dim, max_seq_len=max_seq_len,
    )  # fmt: skip


def _llama3(dim: int, num_layers: int, num_heads: int, ffn_dim: int, scale: float = 1.0) -> DecoderSpec:
    base = _llama(dim, num_layers, num_heads, 8, ffn_dim, 128_256, 8192 if scale == 1 else 131_072)
    return replace(base, rope_theta=500_000.0, rope_scale=scale)


def _gpt2(dim: int, num_layers: int, num_heads: int, vocab_size: int = 50_257, max_seq_len: int = 1024) -> DecoderSpec:
    return DecoderSpec(
        family="gpt2", vocab_size=vocab_size, dim=dim, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_heads, ffn_dim=4 * dim, max_seq_len=max_seq_len, tied=True,
    )  # fmt: skip


def _mixtral(dim: int, num_layers: int, num_heads: int, ffn_dim: int, vocab_size: int, max_seq_len: int) -> DecoderSpec:
    base = _llama(dim, num_layers, num_heads, 8, ffn_dim, vocab_size, max_seq_len)
    return replace(base, rope_theta=1e6, num_experts=8, top_k=2)


def named_sizes() -> tuple[NamedSize, ...]:
    """Return every built-in size, Weft's own small ones first."""
    tiny_moe = replace(
        _llama(256, 6, 8, 4, 512, 4096, 1024), tied=True, num_experts=8, expert_ffn_dim=256, num_shared_experts=1
    )
    deepseek_moe = replace(
        _llama(2048, 28, 16, 16, 10_944, 102_400, 4096), norm_eps=1e-6, first_moe_layer=1, num_experts=64, top_k=6,
        expert_ffn_dim=1408, num_shared_experts=2, normalise_top_k=False,
    )  # fmt: skip
    return (
        # Made for this project: heads and layers divide evenly by 2 and 4, so that every plan can be tried on them.
        NamedSize("tiny", replace(_llama(256, 6, 8, 4, 768, 4096, 1024), tied=True), open_vocab=True),
        NamedSize("gpt2-tiny", _gpt2(256, 6, 8, 4096), open_vocab=True),
        NamedSize("moe-tiny", tiny_moe, open_vocab=True),
        NamedSize("small", replace(_llama(512, 8, 8, 4, 1536, 4096, 2048), tied=True), open_vocab=True),
        # Radford et al. 2019, table 2.
        NamedSize("gpt2", _gpt2(768, 12, 12)),
        NamedSize("gpt2-medium", _gpt2(1024, 24, 16)),
        NamedSize("gpt2-large", _gpt2(1280, 36, 20)),
        NamedSize("gpt2-xl", _gpt2(1600, 48, 25)),
        # Grattafiori et al. 2024 (arXiv 2407.21783), table 3, and the model cards of Llama 3.2.
        NamedSize("llama3.2-1b", replace(_llama3(2048, 16, 32, 8192, scale=32), tied=True)),
        NamedSize("llama3.2-3b", replace(_llama3(3072, 28, 24, 8192, scale=32), tied=True)),
        # Touvron et al. 2023 (arXiv 2307.09288).
        NamedSize("llama2-7b", _llama(4096, 32, 32, 32, 11_008, 32_000, 4096)),
        NamedSize("llama3-8b", _llama3(4096, 32, 32, 14_336)),
        NamedSize("llama2-13b", _llama(5120, 40, 40, 40, 13_824, 32_000, 4096)),
        NamedSize("llama2-70b", _llama(8192, 80, 64, 8, 28_672, 32_000, 4096)),
        NamedSize("llama3-70b", _llama3(8192, 80, 64, 28_672)),
        # Dai et al. 2024 (arXiv 2401.06066), and the published config of the 16B model.
        NamedSize("deepseek-moe-16b", deepseek_moe),
        # Jiang et al. 2024 (arXiv 2401.04088), table 1, and the model card of 8x22B.
        NamedSize("mixtral-8x7b", _mixtral(4096, 32, 32, 14_336, 32_000, 32_768)),
        NamedSize("mixtral-8x22b", _mixtral(6144, 56, 48, 16_384, 32_000, 65_536)),
        # Brown et al. 2020 (arXiv 2005.14165), table 2.1; its sparse attention layers are dense here.
        NamedSize("gpt3-175b", _gpt2(12_288, 96, 96, max_seq_len=2048)),
        # Llama 3.0 had no 405B; Llama 3.1 has, with its extended context.
        NamedSize("llama3-405b", _llama3(16_384, 126, 128, 53_248, scale=8)),
    )


def model_names() -> tuple[str, ...]:
    """Return the names of the built-in sizes, in the order of `named_sizes`."""
    return tuple(size.name for size in named_sizes())


def size_hides(source: str) -> str:
    """Return a note for users if `source` is the name of both a built-in size and a file or folder, else "".

    The size takes precedence, so that a folder with that name does not change the meaning of a command.
    """
    if source not in model_names() or not os.path.exists(source):
        return ""
    return f"model={source}: Weft uses the size of that name. Write ./{source} for the folder."


def decoder_spec(name: str) -> DecoderSpec:
    """Return the shape of a named size.

    Raises:
        ModelError: for an unknown name.
    """
    return _named_size(name).spec


def _named_size(name: str) -> NamedSize:
    for size in named_sizes():
        if size.name == name:
            return size
    hint = did_you_mean(name, model_names()) or f" Known: {', '.join(model_names())}."
    raise ModelError(f"model.name={name}: no size has this name.{hint}")


def resolve_decoder(section: ModelSection, tokenizer_vocab: int) -> DecoderSpec:
    """Return the shape of a [model] section: a named size with some fields changed.

    tokenizer_vocab: entries of the tokenizer. They set the vocabulary of sizes that do not define one, and are the
    minimum for others.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        size = _named_size(section.name)
    except ModelError as error:
        raise ConfigError([Problem("model.name", str(error))]) from None
    spec = _with_overrides(size, section, tokenizer_vocab)
    problems = list(shape_problems(spec))
    if spec.family == "gpt2" and section.rope_theta is not None:
        text = "the gpt2 family has learned positions and no rotary frequencies. Leave it out."
        problems.append(Problem.of("model.rope_theta", section.rope_theta, text))
    if not spec.num_experts:
        for name, value in section:
            if name in EXPERT_FIELDS and value is not None:
                text = "the model has no experts. Use model.num_experts=8 with it, or leave it out."
                problems.append(Problem.of(f"model.{name}", value, text))
    if spec.vocab_size < tokenizer_vocab:
        owner = "" if section.vocab_size is not None else f" (of {section.name})"
        text = (
            f"the tokenizer has {tokenizer_vocab} entries, and each needs a row of the embedding{owner}. "
            f"Use model.vocab_size={tokenizer_vocab}, or a tokenizer of at most {spec.vocab_size} entries."
        )
        problems.append(Problem.of("model.vocab_size", spec.vocab_size, text))
    if problems:
        raise ConfigError(problems)
    return spec


def _with_overrides(size: NamedSize, section: ModelSection, tokenizer_vocab: int) -> DecoderSpec:
    known = {field.name for field in dataclasses.fields(DecoderSpec)}
    changes: dict[str, object] = {name: value for name, value in section if name in known and value is not None}
    if size.open_vocab:
        changes.setdefault("vocab_size", tokenizer_vocab)
    # A size without grouped heads stays so if only the number of heads is changed.
    if size.spec.num_kv_heads == size.spec.num_heads and "num_heads" in changes:
        changes.setdefault("num_kv_heads", changes["num_heads"])
    if changes.get("family") == "gpt2":
        changes["rope_scale"] = 1.0
    return replace(size.spec, **changes)  # pyright: ignore[reportArgumentType]  # checked by shape_problems
