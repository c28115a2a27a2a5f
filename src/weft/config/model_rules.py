"""What must hold for the shape of a decoder, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weft.config.decoder_shape import BALANCES, FAMILIES, ROUTERS, DecoderSpec
from weft.errors import Problem


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """One thing that must hold for a decoder shape. `text` gives the sentence for a shape that breaks it."""

    field: str
    holds: Callable[[DecoderSpec], bool]
    text: Callable[[DecoderSpec], str]


def shape_rules() -> tuple[ShapeRule, ...]:
    """The rules for decoder shapes whose counts are all positive."""
    return (
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
                f"{spec.dim}/{spec.num_heads}={spec.head_dim} is odd. {_even_width_fix(spec)}"
            ),
        ),
        ShapeRule(
            "rope_theta",
            lambda spec: spec.rope_theta > 1,
            lambda _: "the base of the rotary frequencies must be above 1. Use e.g. 10000.",
        ),
        ShapeRule(
            "rope_scale",
            lambda spec: spec.rope_scale >= 1,
            lambda _: "the factor on rotary wavelengths must be at least 1. Use 1 for no scaling.",
        ),
        ShapeRule(
            "norm_eps",
            lambda spec: 0 < spec.norm_eps < 1,
            lambda _: "the norms need a small positive number. Use e.g. 1e-5.",
        ),
        *_expert_rules(),
    )


def _expert_rules() -> tuple[ShapeRule, ...]:
    """Return the rules of models with experts. Dense models satisfy all of them."""
    return (
        ShapeRule(
            "num_experts",
            lambda spec: spec.num_experts == 0 or spec.family == "llama",
            lambda spec: f"the {spec.family} family has no experts. Use family=llama, or num_experts=0.",
        ),
        ShapeRule(
            "num_experts",
            lambda spec: spec.num_experts != 1,
            lambda _: "a mixture-of-experts layer needs at least 2 experts. Use 2 or more, or 0 for a dense model.",
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
            lambda _: "the output of the experts is multiplied by it, so it must be above 0. Use 1.",
        ),
        ShapeRule(
            "balance_rate",
            lambda spec: 0 < spec.balance_rate < math.inf,
            lambda _: "balancing needs a positive rate. Use e.g. 0.001, or balance=none.",
        ),
        ShapeRule(
            "capacity_factor",
            lambda spec: 0 <= spec.capacity_factor < math.inf,
            lambda _: "a number of at least 0 is needed. Use e.g. 1.25, or 0 to drop no token.",
        ),
    )


def _nearest_divisors(number: int, wanted: int) -> str:
    below = next(candidate for candidate in range(min(wanted, number), 0, -1) if number % candidate == 0)
    above = next(candidate for candidate in range(min(wanted, number), number + 1) if number % candidate == 0)
    return str(below) if below == above else f"{below} or {above}"


def _even_width_fix(spec: DecoderSpec) -> str:
    if spec.dim % 2:
        return f"Use an even model.dim, such as {spec.dim + 1}."
    return f"Use {_nearest_divisors(spec.dim // 2, spec.num_heads)}."


_COUNTS = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len")


def shape_problems(spec: DecoderSpec) -> tuple[Problem, ...]:
    """Return everything that makes a shape unusable; empty when it can be built.

    Fields are dotted: "model.num_heads".
    """
    problems: list[Problem] = []
    if spec.family not in FAMILIES:
        problems.append(shape_problem("family", spec.family, f"not one of {', '.join(FAMILIES)}. Use {FAMILIES[0]}."))
    for name in _COUNTS:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(shape_problem(name, value, "a whole number of at least 1 is needed. Use e.g. 1."))
    problems += _expert_problems(spec)
    if problems:  # the other rules divide by these numbers
        return tuple(problems)
    broken = (rule for rule in shape_rules() if not rule.holds(spec))
    return tuple(shape_problem(rule.field, getattr(spec, rule.field), rule.text(spec)) for rule in broken)


def _expert_problems(spec: DecoderSpec) -> Iterator[Problem]:
    least = {"num_experts": 0, "top_k": 1, "expert_ffn_dim": 0, "num_shared_experts": 0, "first_moe_layer": 0}
    for name, number in {**least, "moe_every": 1}.items():
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < number:
            yield shape_problem(name, value, f"a whole number of at least {number} is needed. Use e.g. {number}.")
    for name, known in (("router", ROUTERS), ("balance", BALANCES)):
        value = getattr(spec, name)
        if value not in known:
            yield shape_problem(name, value, f"not one of {', '.join(known)}. Use {known[0]}.")


def shape_problem(field: str, value: object, text: str) -> Problem:
    """A problem of one field of the [model] section."""
    return Problem(f"model.{field}", f"model.{field}={value}: {text}")
