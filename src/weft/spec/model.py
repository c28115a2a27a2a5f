"""What a model is made of, without torch: shapes of the known families, and parameter counts of any model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.errors import ConfigError, ModelError, Problem, did_you_mean

if TYPE_CHECKING:
    from weft.spec.config import ModelSection

FAMILIES = ("llama", "gpt2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape of one decoder transformer.

    family: "llama" (RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases) or
    "gpt2" (learned positions, LayerNorm, GELU, biases).
    ffn_dim: width of the feed-forward hidden layer. num_kv_heads: key-value heads (num_heads = no grouping).
    max_seq_len: longest sequence; the size of the position table in the gpt2 family.
    tied: the output head shares the embedding's weight.
    rope_theta: base of the rotary frequencies (llama family).
    rope_scale: how far the low rotary frequencies are stretched, as Llama 3.1 does from a context of 8192 tokens;
    1 leaves them as they are.
    norm_eps: added to the mean square (or the variance) inside the norms.
    """

    family: str = "llama"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_seq_len: int
    tied: bool = False
    rope_theta: float = 10_000.0
    rope_scale: float = 1.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One repeated block or single part of a model, by module path ("blocks.*" for a repeated one)."""

    path: str
    num_params: int  # parameters of one instance
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the planner knows of a model. Parameters shared by several modules are counted once."""

    name: str
    layers: tuple[LayerSpec, ...]
    shape: DecoderSpec | None = None

    @property
    def num_params(self) -> int:
        """All parameters, each counted once."""
        return sum(layer.num_params * layer.count for layer in self.layers)

    @classmethod
    def named(cls, name: str) -> ModelSpec:
        """Parameter counts of a named size, by formula. Raises ModelError for a name that is not known."""
        return cls.of_decoder(decoder_spec(name), name)

    @classmethod
    def of_decoder(cls, spec: DecoderSpec, name: str = "Decoder") -> ModelSpec:
        """Parameter counts of any decoder shape, by formula."""
        return cls(name=name, layers=tuple(_decoder_layers(spec)), shape=spec)


def _decoder_layers(spec: DecoderSpec) -> Iterator[LayerSpec]:
    bias = 1 if spec.family == "gpt2" else 0
    norm = spec.dim * (1 + bias)
    kv_dim = spec.num_kv_heads * spec.head_dim
    query_and_output = 2 * (spec.dim + bias) * spec.dim
    attention = query_and_output + 2 * (spec.dim + bias) * kv_dim
    if spec.family == "gpt2":
        ffn = (spec.dim + bias) * spec.ffn_dim + (spec.ffn_dim + bias) * spec.dim
    else:
        ffn = 3 * spec.dim * spec.ffn_dim
    yield LayerSpec("embed", spec.vocab_size * spec.dim)
    if spec.family == "gpt2":
        yield LayerSpec("pos_embed", spec.max_seq_len * spec.dim)
    yield LayerSpec("blocks.*", 2 * norm + attention + ffn, spec.num_layers)
    yield LayerSpec("norm", norm)
    if not spec.tied:
        yield LayerSpec("head", spec.vocab_size * spec.dim)


@dataclass(frozen=True, slots=True)
class NamedSize:
    """A size that has a name. open_vocab: the vocabulary is the tokenizer's, whatever `spec` says."""

    name: str
    spec: DecoderSpec
    open_vocab: bool = False


def _llama(
    dim: int, num_layers: int, num_heads: int, num_kv_heads: int, ffn_dim: int, vocab_size: int, max_seq_len: int
) -> DecoderSpec:
    return DecoderSpec(
        family="llama",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=ffn_dim,
        max_seq_len=max_seq_len,
    )


def _llama3(dim: int, num_layers: int, num_heads: int, ffn_dim: int, scale: float = 1.0) -> DecoderSpec:
    base = _llama(dim, num_layers, num_heads, 8, ffn_dim, 128_256, 8192 if scale == 1 else 131_072)
    return replace(base, rope_theta=500_000.0, rope_scale=scale)


def _gpt2(dim: int, num_layers: int, num_heads: int, vocab_size: int = 50_257, max_seq_len: int = 1024) -> DecoderSpec:
    return DecoderSpec(
        family="gpt2",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_dim=4 * dim,
        max_seq_len=max_seq_len,
        tied=True,
    )


def named_sizes() -> tuple[NamedSize, ...]:
    """Every size that Weft knows, small ones first."""
    return (
        # Made for this project: heads and layers split evenly by 2 and 4, so that every plan can be tried on them.
        NamedSize("tiny", replace(_llama(256, 6, 8, 4, 768, 4096, 1024), tied=True), open_vocab=True),
        NamedSize("gpt2-tiny", _gpt2(256, 6, 8, 4096), open_vocab=True),
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
        # Brown et al. 2020 (arXiv 2005.14165), table 2.1; its sparse attention layers are dense here.
        NamedSize("gpt3-175b", _gpt2(12_288, 96, 96, max_seq_len=2048)),
        # There is no 405B before Llama 3.1, which stretched the context.
        NamedSize("llama3-405b", _llama3(16_384, 126, 128, 53_248, scale=8)),
    )


def model_names() -> tuple[str, ...]:
    """Names of the sizes, small ones first."""
    return tuple(size.name for size in named_sizes())


def decoder_spec(name: str) -> DecoderSpec:
    """Shape of a named size. Raises ModelError for a name that is not known."""
    return _named_size(name).spec


def _named_size(name: str) -> NamedSize:
    for size in named_sizes():
        if size.name == name:
            return size
    hint = did_you_mean(name, model_names()) or f" Known: {', '.join(model_names())}."
    raise ModelError(f"model.name={name}: no size has this name.{hint}")


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """One thing that must hold for a decoder shape. `text` gives the sentence for a shape that breaks it."""

    field: str
    holds: Callable[[DecoderSpec], bool]
    text: Callable[[DecoderSpec], str]


_COUNTS = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len")


def shape_rules() -> tuple[ShapeRule, ...]:
    """The rules for decoder shapes whose counts are all positive."""
    return (
        ShapeRule(
            "num_heads",
            lambda spec: spec.dim % spec.num_heads == 0,
            lambda spec: (
                f"the heads share dim={spec.dim} evenly, and {spec.dim} is not a multiple of {spec.num_heads}. "
                f"Use {_nearest_divisors(spec.dim, spec.num_heads)}."
            ),
        ),
        ShapeRule(
            "num_kv_heads",
            lambda spec: spec.num_heads % spec.num_kv_heads == 0,
            lambda spec: (
                f"key-value heads are shared by equal groups of the {spec.num_heads} heads, and {spec.num_heads} "
                f"is not a multiple of {spec.num_kv_heads}. Use {_nearest_divisors(spec.num_heads, spec.num_kv_heads)}."
            ),
        ),
        ShapeRule(
            "num_heads",
            lambda spec: spec.family != "llama" or spec.dim % spec.num_heads != 0 or spec.head_dim % 2 == 0,
            lambda spec: (
                f"rotary positions turn pairs, and the head width {spec.dim}/{spec.num_heads}={spec.head_dim} is odd. "
                f"{_even_width_fix(spec)}"
            ),
        ),
        ShapeRule(
            "rope_theta",
            lambda spec: spec.rope_theta > 1,
            lambda _: "the base of the rotary frequencies is above 1. Use e.g. 10000.",
        ),
        ShapeRule(
            "rope_scale",
            lambda spec: spec.rope_scale >= 1,
            lambda _: "rotary frequencies are stretched by 1 (not at all) or more. Use 1.",
        ),
        ShapeRule(
            "norm_eps",
            lambda spec: 0 < spec.norm_eps < 1,
            lambda _: "the norms need a small positive number. Use e.g. 1e-5.",
        ),
    )


def shape_problems(spec: DecoderSpec) -> tuple[Problem, ...]:
    """Everything that makes a shape unusable; empty when it can be built. Fields are dotted: "model.num_heads"."""
    problems: list[Problem] = []
    if spec.family not in FAMILIES:
        problems.append(_problem("family", spec.family, f"not one of {', '.join(FAMILIES)}. Use {FAMILIES[0]}."))
    for name in _COUNTS:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(_problem(name, value, "a whole number of at least 1 is needed. Use e.g. 1."))
    if problems:  # the other rules divide by these numbers
        return tuple(problems)
    broken = (rule for rule in shape_rules() if not rule.holds(spec))
    return tuple(_problem(rule.field, getattr(spec, rule.field), rule.text(spec)) for rule in broken)


def resolve_decoder(section: ModelSection, tokenizer_vocab: int) -> DecoderSpec:
    """The shape that a [model] section asks for: a named size with single fields changed.

    tokenizer_vocab: entries of the tokenizer. Sizes that leave their vocabulary open take it; for all others it is
    the least that the vocabulary may be. Raises ConfigError with every problem found.
    """
    try:
        size = _named_size(section.name)
    except ModelError as error:
        raise ConfigError([Problem("model.name", str(error))]) from None
    spec = _with_overrides(size, section, tokenizer_vocab)
    problems = list(shape_problems(spec))
    if spec.family == "gpt2" and section.rope_theta is not None:
        text = "the gpt2 family has a table of positions and no rotary frequencies. Leave it out."
        problems.append(_problem("rope_theta", section.rope_theta, text))
    if spec.vocab_size < tokenizer_vocab:
        typed = section.vocab_size is not None
        owner = "" if typed else f" (of {section.name})"
        text = (
            f"the tokenizer has {tokenizer_vocab} entries, and each needs a row of the embedding{owner}. "
            f"Use model.vocab_size={tokenizer_vocab}, or a tokenizer of at most {spec.vocab_size} entries."
        )
        problems.append(_problem("vocab_size", spec.vocab_size, text))
    if problems:
        raise ConfigError(problems)
    return spec


def _with_overrides(size: NamedSize, section: ModelSection, tokenizer_vocab: int) -> DecoderSpec:
    known = {field.name for field in dataclasses.fields(DecoderSpec)}
    changes: dict[str, object] = {name: value for name, value in section if name in known and value is not None}
    if size.open_vocab:
        changes.setdefault("vocab_size", tokenizer_vocab)
    # A size without grouping stays without it when only the number of heads is changed.
    if size.spec.num_kv_heads == size.spec.num_heads and "num_heads" in changes:
        changes.setdefault("num_kv_heads", changes["num_heads"])
    if changes.get("family") == "gpt2":
        changes["rope_scale"] = 1.0
    return replace(size.spec, **changes)  # pyright: ignore[reportArgumentType]


def _problem(field: str, value: object, text: str) -> Problem:
    return Problem(f"model.{field}", f"model.{field}={value}: {text}")


def _nearest_divisors(number: int, wanted: int) -> str:
    below = next(candidate for candidate in range(min(wanted, number), 0, -1) if number % candidate == 0)
    above = next(candidate for candidate in range(min(wanted, number), number + 1) if number % candidate == 0)
    return str(below) if below == above else f"{below} or {above}"


def _even_width_fix(spec: DecoderSpec) -> str:
    if spec.dim % 2:
        return f"Use an even model.dim, such as {spec.dim + 1}."
    return f"Use {_nearest_divisors(spec.dim // 2, spec.num_heads)}."
