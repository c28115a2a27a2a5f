"""The shape of one decoder transformer, and its rules as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import Problem

FAMILIES = ("llama", "gpt2")
ROUTERS = ("softmax", "sigmoid")
BALANCES = ("aux_loss", "bias", "none")
#: Fields that are used only by models with experts.
EXPERT_FIELDS = (
    "top_k", "expert_ffn_dim", "num_shared_experts", "first_moe_layer", "moe_every", "router", "normalise_top_k",
    "route_scale", "balance", "balance_rate", "capacity_factor",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape of one decoder transformer.

    Attributes:
        family: "llama" (RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases) or "gpt2" (learned positions,
            LayerNorm, GELU, biases).
        num_kv_heads: key-value heads; equal to num_heads for no grouping.
        ffn_dim: width of the feed-forward hidden layer.
        max_seq_len: longest sequence; the size of the position table in the gpt2 family.
        tied: the output head shares the embedding's weight.
        rope_theta: base of the rotary frequencies (llama family).
        rope_scale: factor by which the wavelengths of low rotary frequencies are stretched, as Llama 3.1 does from a
            context of 8192 tokens; 1 leaves them unchanged.
        norm_eps: added to the mean square (or the variance) inside the norms.
        num_experts: experts of a mixture-of-experts layer, each a SwiGLU (llama family); 0 for a dense model.
        top_k: experts per token.
        expert_ffn_dim: hidden width of one expert; 0: ffn_dim.
        num_shared_experts: number of experts that all tokens use.
        first_moe_layer, moe_every: from layer first_moe_layer on, every moe_every-th layer has experts; the others are
            dense.
        router: function of the scores: "softmax" over the experts, or "sigmoid" of each.
        normalise_top_k: divide the chosen scores by their sum.
        route_scale: factor on the scores after that.
        balance: "aux_loss" adds balance_rate times the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17);
            "bias" moves each expert's selection bias by balance_rate a step (arXiv 2408.15664); "none".
        capacity_factor: an expert accepts at most this many times its even share of a sequence, and later tokens skip
            it; 0: no token is dropped.
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
    num_experts: int = 0
    top_k: int = 2
    expert_ffn_dim: int = 0
    num_shared_experts: int = 0
    first_moe_layer: int = 0
    moe_every: int = 1
    router: str = "softmax"
    normalise_top_k: bool = True
    route_scale: float = 1.0
    balance: str = "aux_loss"
    balance_rate: float = 0.001
    capacity_factor: float = 0.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def expert_width(self) -> int:
        """Hidden width of one expert."""
        return self.expert_ffn_dim or self.ffn_dim

    @property
    def moe_layers(self) -> range:
        """Indices of the layers that have experts; empty in a dense model."""
        return range(self.first_moe_layer, self.num_layers if self.num_experts else 0, self.moe_every)


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """A requirement on decoder shapes.

    `text` is the message with the rule and the fix, or a function that returns it for a shape.
    """

    field: str
    holds: Callable[[DecoderSpec], bool]
    text: str | Callable[[DecoderSpec], str]


#: The rules for decoder shapes whose counts are all positive.
SHAPE_RULES: tuple[ShapeRule, ...] = (
    ShapeRule(
        "num_heads",
        lambda spec: spec.dim % spec.num_heads == 0,
        lambda spec: f"it must divide model.dim={spec.dim}. Use {_nearest_divisors(spec.dim, spec.num_heads)}.",
    ),
    ShapeRule(
        "num_kv_heads",
        lambda spec: spec.num_heads % spec.num_kv_heads == 0,
        lambda spec: (
            f"it must divide model.num_heads={spec.num_heads}. Use "
            f"{_nearest_divisors(spec.num_heads, spec.num_kv_heads)}."
        ),
    ),
    ShapeRule(
        "num_heads",
        lambda spec: spec.family != "llama" or spec.dim % spec.num_heads != 0 or spec.head_dim % 2 == 0,
        lambda spec: (
            "rotary positions rotate pairs of features, and the head width "
            f"{spec.dim}/{spec.num_heads}={spec.head_dim} is odd. Use "
            + (
                f"an even model.dim, such as {spec.dim + 1}."
                if spec.dim % 2
                else f"{_nearest_divisors(spec.dim // 2, spec.num_heads)}."
            )
        ),
    ),
    ShapeRule(
        "rope_theta",
        lambda spec: spec.rope_theta > 1,
        "the base of the rotary frequencies must be above 1. Use e.g. 10000.",
    ),
    ShapeRule(
        "rope_scale",
        lambda spec: spec.rope_scale >= 1,
        "the factor on rotary wavelengths must be at least 1. Use 1 for no scaling.",
    ),
    ShapeRule("norm_eps", lambda spec: 0 < spec.norm_eps < 1, "the norms need a small positive number. Use e.g. 1e-5."),
    # Rules of models with experts. Dense models satisfy all of them.
    ShapeRule(
        "num_experts",
        lambda spec: spec.num_experts == 0 or spec.family == "llama",
        lambda spec: f"the {spec.family} family has no experts. Use family=llama, or num_experts=0.",
    ),
    ShapeRule(
        "num_experts",
        lambda spec: spec.num_experts != 1,
        "a mixture-of-experts layer needs at least 2 experts. Use 2 or more, or 0 for a dense model.",
    ),
    ShapeRule(
        "top_k",
        lambda spec: spec.num_experts < 2 or spec.top_k <= spec.num_experts,
        lambda spec: (
            f"a token cannot be routed to more than the {spec.num_experts} experts. Use 1 to {spec.num_experts}."
        ),
    ),
    ShapeRule(
        "first_moe_layer",
        lambda spec: spec.num_experts == 0 or spec.first_moe_layer < spec.num_layers,
        lambda spec: (
            f"the {spec.num_layers} layers are numbered from 0, so none would have experts. Use 0 to "
            f"{spec.num_layers - 1}."
        ),
    ),
    ShapeRule(
        "route_scale",
        lambda spec: 0 < spec.route_scale < math.inf,
        "the output of the experts is multiplied by it, so it must be above 0. Use 1.",
    ),
    ShapeRule(
        "balance_rate",
        lambda spec: 0 < spec.balance_rate < math.inf,
        "balancing needs a positive rate. Use e.g. 0.001, or balance=none.",
    ),
    ShapeRule(
        "capacity_factor",
        lambda spec: 0 <= spec.capacity_factor < math.inf,
        "a number of at least 0 is needed. Use e.g. 1.25, or 0 to drop no token.",
    ),
)


def _nearest_divisors(number: int, wanted: int) -> str:
    below = next(candidate for candidate in range(min(wanted, number), 0, -1) if number % candidate == 0)
    above = next(candidate for candidate in range(min(wanted, number), number + 1) if number % candidate == 0)
    return str(below) if below == above else f"{below} or {above}"


_COUNTS = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len")
#: Minimum values of counts in models with experts.
_EXPERT_COUNTS = {
    "num_experts": 0, "top_k": 1, "expert_ffn_dim": 0, "num_shared_experts": 0, "first_moe_layer": 0, "moe_every": 1,
}  # fmt: skip


def shape_problems(spec: DecoderSpec) -> tuple[Problem, ...]:
    """Return all reasons why a shape is invalid, by dotted key ("model.num_heads"); () if it is valid."""
    problems: list[Problem] = []
    for name, least in {**dict.fromkeys(_COUNTS, 1), **_EXPERT_COUNTS}.items():
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            rule = f"a whole number of at least {least} is needed. Use e.g. {least}."
            problems.append(Problem.of(f"model.{name}", value, rule))
    for name, known in (("family", FAMILIES), ("router", ROUTERS), ("balance", BALANCES)):
        value = getattr(spec, name)
        if value not in known:
            problems.append(Problem.of(f"model.{name}", value, f"not one of {', '.join(known)}. Use {known[0]}."))
    if problems:  # the other rules divide by these numbers
        return tuple(problems)
    return tuple(
        Problem.of(
            f"model.{rule.field}",
            getattr(spec, rule.field),
            rule.text if isinstance(rule.text, str) else rule.text(spec),
        )
        for rule in SHAPE_RULES
        if not rule.holds(spec)
    )
