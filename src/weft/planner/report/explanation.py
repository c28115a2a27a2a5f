"""Explanation of an estimate: sources of its constants, confidence, step time and memory as text.

Every term is attributed to the constant that determines most of it. Error bands are fitted to prediction errors on
published runs, where constants are fitted without the source of the run (`planner/uncertainty.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from weft.config.cluster import ClusterSpec
from weft.config.rules.plan_rules import check
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import ModelSpec
from weft.config.shapes.traced_model import TracedModel
from weft.planner.cost.machine import Fabric, Tables
from weft.planner.measured.corrections import lesson_words
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.generation import GenerationCandidate
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated
from weft.planner.space.shape import Shape
from weft.planner.uncertainty import Band, ErrorContext, error_context, shipped, time_bands, unmeasured
from weft.units import format_bytes, format_count, format_seconds

#: The constant that determines most of each term. Other terms use the links of a scale-up domain, or the network if
#: the cluster has several domains.
DECIDED_BY = {
    "gemm": "gemm_ceiling",
    "recompute": "gemm_ceiling",
    "frozen": "gemm_ceiling",
    "bubble": "gemm_ceiling",
    "attention": "attn_fwd",
    "memory_bound": "memory_eff",
    "host": "host_op_s",
    "tp": "link_eff",
    "cp": "link_eff",
    "ep": "link_eff",
    "contention": "overlap_compute",
    "optimizer": "adam_eff",
    "offload": "host_rate",
    "straggler": "straggler",
}
#: Sources of constants as display text.
RUNGS = {
    "here": "measurements of this machine",
    "table": "measurements of this device type",
    "common": "constants common to all devices",
    "datasheet": "the data sheet alone",
}
#: Share of cases inside the displayed error band.
TOLD = 0.8


def time_by_rung(terms: Mapping[str, float], tables: Tables, cluster: ClusterSpec) -> dict[str, float]:
    """Return the share of the step's time for each source of constants. The shares sum to 1."""
    shares = dict.fromkeys(RUNGS, 0.0)
    far = "link_eff" if cluster.num_devices <= Fabric.of(tables, cluster.devices_per_node).domain else "nic_eff"
    for name, seconds in terms.items():
        rung = tables.rungs.get(DECIDED_BY.get(name, far), "datasheet")
        shares[rung if rung in RUNGS else "datasheet"] += seconds
    return {rung: seconds / sum(shares.values()) for rung, seconds in shares.items() if seconds > 0}


def band_of(one: Candidate, level: float = TOLD) -> Band | None:
    """Return the error band of a candidate's step time, as factors, or None if no similar run was measured.

    A device of unknown memory size has no band, and neither has a CPU host, whose errors have a different distribution.
    """
    if one.question.cluster.device.memory_bytes == 0 or one.question.cluster.device.is_cpu:
        return None
    where = context(one)
    return None if unmeasured(where, one.question.cluster.device.name) else time_bands(where)[level]


def context(one: Candidate) -> ErrorContext:
    """Return the properties of a candidate that determine its expected error."""
    question, plan = one.question, one.plan
    found = error_context(question.job, question.cluster, plan.precision, question.cluster.num_devices)
    return replace(found, graphs=plan.graphs)


def band_words(one: Candidate) -> list[str]:
    """Describe the confidence in the step time: an error band if there are similar runs, and unmeasured properties."""
    shares = time_by_rung(one.terms, one.question.tables, one.question.cluster)
    basis = ", ".join(f"{share:.0%} {RUNGS[rung]}" for rung, share in shares.items() if share >= 0.005)
    if one.question.cluster.device.memory_bytes == 0 or one.question.cluster.device.is_cpu:
        return [f"trust   basis: {basis}"]
    band, where = band_of(one), context(one)
    missing = unmeasured(where, one.question.cluster.device.name)
    lines = [f"trust   no band: {'; '.join(missing)} was ever measured", f"        basis: {basis}"]
    if band is not None:
        known = shipped()
        low, high = (format_seconds(one.step_s * factor) for factor in (band.low, band.high))
        lines = [
            f"trust   {low} to {high} a step: {band.level:.0%} of runs like this were within {band.low - 1:+.0%} to "
            f"{band.high - 1:+.0%} on publishers the model had not seen ({known.runs} runs of {known.sources} sources)",
            f"        basis: {basis}",
        ]
    spec = one.question.cluster.device
    if "here" not in shares and spec.measured_flops and spec.measured_spread > 1:
        least, most = spec.measured_flops / 1e12, spec.measured_flops * spec.measured_spread / 1e12
        lines.append(f"        matrix products reach {least:.0f} to {most:.0f} TFLOP/s, by software, clock and power")
    if "here" not in shares:
        device = one.question.cluster.device.name.rstrip("*")
        others = "; published runs used other software" if where.generation else ""
        lines.append(f"        not yet measured: Weft's own speed on {device}{others} (weft calibrate)")
    return lines


# Time and memory of a plan as text: parts of the step, and bars of memory.

#: Display text of each term of a step.
TERM_WORDS = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "norms, activations, loss",
    "host": "waiting for the host",
    "contention": "compute slowed by overlapped traffic",
    "tp": "tensor-parallel traffic",
    "cp": "context-parallel traffic",
    "ep": "expert-parallel traffic",
    "pp_p2p": "sends between stages",
    "bubble": "pipeline bubble",
    "dp_exposed": "data-parallel traffic, not overlapped",
    "optimizer": "optimizer",
    "recompute": "recompute",
    "offload": "transfers to and from the host",
    "straggler": "waiting for the slowest rank",
    "frozen": "forward passes without gradients",
}
_WIDTH = 32
#: Share of a step in which kernels wait for the host, from which the effect of CUDA graphs is reported.
_WAITS = 0.05


def explain(one: Candidate, hour_price: float | None = None) -> str:
    """Describe one candidate in full. `hour_price` is in dollars per device hour."""
    return "\n".join([*headline(one, hour_price), "", *waterfall(one), "", *memory_bars(one)])


def headline(one: Candidate, hour_price: float | None = None) -> list[str]:
    """Return text lines on plan, job, step time, throughput, utilization, price, energy and confidence, and notes."""
    job, cluster = one.question.job, one.question.cluster
    tokens, unit = job.tokens, one.question.unit
    cost = one.cost(hour_price)
    money = [] if cost.price is None else [f"${_short(cost.price * 1e9 / tokens)} per billion {unit}"]
    energy = [] if cost.energy_kwh is None else [f"{_short(cost.energy_kwh * 1e9 / tokens)} kWh per billion {unit}"]
    lines = list[str]()
    if (profile := one.question.profile) is not None:
        lines.append(f"        the profile of {profile.machine.device}, measured {profile.made}")
        lines += [f"        {words}"] if (words := lesson_words(profile)) else []
    most = " of the rank with the most samples" if one.plan.shares and not one.plan.measures_shares else ""
    waiting = [] if one.built else ["note    Weft does not run this plan yet (see docs/reference/rules.md)"]
    work = "the work of the rank with the most samples" if one.plan.shares else "equal work"
    slow = f"note    all devices have {work}, so each rate and size here is the least of {cluster}"
    return [
        f"plan    {one.plan}",
        f"job     {one.question.model.name}, {format_count(job.shape.num_params)} parameters, on {cluster}; "
        f"{one.question.work}, {one.microbatch} in a pass{most}",
        f"speed   {format_seconds(one.step_s)} a step, {format_count(one.tokens_per_s)} {unit}/s "
        f"({format_count(one.tokens_per_s / cluster.num_devices)} per device)",
        f"MFU     {one.mfu:.1%} counting full attention, {one.causal_mfu:.1%} counting causal attention; "
        "without recompute",
        *([f"cost    {', '.join([*money, *energy])}"] if money or energy else []),
        *band_words(one),
        *lines,
        *_with_graphs(one),
        *([slow] if cluster.kinds else []),
        *waiting,
    ]


def _with_graphs(one: Candidate) -> list[str]:
    """Return a line on the effect of CUDA graphs if kernels wait for the host and graphs make the step faster, else [].

    The search does not try graphs, because no measurement on a GPU has shown a gain yet.
    """
    if one.plan.graphs or one.terms.get("host", 0.0) < _WAITS * one.step_s:
        return []
    plan = one.plan.replace(graphs=True)
    if check(plan, one.question.facts):
        return []
    other = estimated([plan], one.question)[0]
    if other.step_s >= one.step_s:
        return []
    change = f"{format_seconds(other.step_s)} a step ({other.step_s / one.step_s - 1:+.0%})"
    return [
        f"graphs  with graphs=on about {change}, {format_bytes(other.total_bytes)} on the fullest rank; no GPU has "
        "shown this, so the search leaves it to you"
    ]


def sorted_terms(one: Candidate) -> list[tuple[str, float]]:
    """Return the terms of a step above zero, longest first."""
    return sorted(((name, value) for name, value in one.terms.items() if value > 0), key=lambda row: -row[1])


def term_changes(before: Candidate, after: Candidate) -> list[str]:
    """Return the differences between the terms of two steps as text, largest first."""
    return [
        f"{TERM_WORDS.get(name, name)}: {'+' if new >= old else ''}{format_seconds(new - old)}"
        for name, old, new in differences(before.terms, after.terms)
    ]


def waterfall(one: Candidate) -> list[str]:
    """Return the parts of the step as text lines with consecutive bars (a waterfall chart)."""
    return term_bars("step", one.terms, TERM_WORDS)


def term_bars(title: str, terms: Mapping[str, float], words: Mapping[str, str]) -> list[str]:
    """Return the terms above zero as text lines with consecutive bars, the longest first.

    Args:
        title: name of the sum.
        terms: seconds by name.
        words: display texts by name.
    """
    whole, done = sum(terms.values()), 0.0
    lines = [f"{title:<7} {format_seconds(whole)}"]
    for name, value in sorted(((name, value) for name, value in terms.items() if value > 0), key=lambda row: -row[1]):
        left, width = _cells(done, whole), _cells(done + value, whole) - _cells(done, whole)
        bar = f"{' ' * left}{'█' * width or '▏'}"
        lines.append(f"  {words.get(name, name):<40} {format_seconds(value):>8} {value / whole:>6.1%}  {bar}")
        done += value
    return lines


def memory_bars(one: Candidate | GenerationCandidate) -> list[str]:
    """Return text lines with the memory by class of the rank with the highest use, relative to the device's memory."""
    most = one.usable_bytes
    lines = [
        f"memory  {format_bytes(one.total_bytes)} ({format_bytes(one.allocated_bytes)} in tensors) of "
        f"{format_bytes(most)}: {fit_words(one.fits)}"
    ]
    for name, value in one.memory.items():
        if value > 0:
            bar = "█" * _cells(value, most) or "▏"
            lines.append(f"  {name:<40} {format_bytes(value):>8} {value / most:>6.1%}  {bar}")
    return lines


def fit_words(probability: float) -> str:
    """Return text such as 'fits (97%)', 'may not fit (60%)' or 'does not fit'."""
    percent = f"{min(probability, 0.999):.0%}" if probability < 0.995 else "> 99%"
    if probability >= 0.9:
        return f"fits ({percent})"
    return f"may not fit ({percent})" if probability >= 0.1 else "does not fit"


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return (name, before, after) for differences above a thousandth of the total, largest difference first."""
    whole = max(sum(before.values()), sum(after.values()), 1e-12)
    rows = [(name, before.get(name, 0.0), after.get(name, 0.0)) for name in {**before, **after}]
    return sorted((row for row in rows if abs(row[2] - row[1]) > whole / 1000), key=lambda row: -abs(row[2] - row[1]))


def _cells(value: float, whole: float) -> int:
    return round(_WIDTH * min(value, whole) / whole)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


# `weft.search`: returns the best plans as candidates that have `explain`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained(Candidate):
    """Candidate with a method that explains its time and memory."""

    @classmethod
    def of(cls, one: Candidate) -> Explained:
        """Return the same candidate as an `Explained`."""
        return cls(**{each.name: getattr(one, each.name) for each in fields(one)})

    def explain(self, hour_price: float | None = None) -> str:
        """Describe the candidate's time and memory as text. `hour_price` is in dollars per device hour."""
        return explain(self, hour_price)


def search(
    model: str | ModelSpec | DecoderSpec | Shape | TracedModel,
    cluster: str | ClusterSpec,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    fixed: str | Mapping[str, Any] = "",
    built_only: bool = True,
    **options: Any,
) -> Answer[Explained]:
    """Return the best plans for a model on a cluster: `weft.search("llama3-8b", "8xh100")[0].explain()`.

    Args:
        model: a size, a path to a Hugging Face config folder or to a Weft config, a specification, or weft.trace(...).
        cluster: "2x8xh100", a .toml file, or a ClusterSpec.
        seq_len: tokens of a sequence; None uses the config's or a default.
        global_batch: sequences of a step; None uses the config's or a default.
        fixed: plan fields that the search must not change, as text such as "tp=8 precision=bf16" or by name.
        built_only: search only plans that the runtime supports.
        **options: other fields of `Question`.

    Raises:
        ModelError, ConfigError, PlanError: for input that cannot be read.
    """
    question = Question.of(
        model, cluster, seq_len=seq_len, global_batch=global_batch, fixed=fixed, built_only=built_only, **options
    )
    found: Any = answer(question)  # the same answer with other candidates
    ranked, pareto = (tuple(map(Explained.of, plans)) for plans in (found.ranked, found.pareto))
    nearest = None if found.nearest is None else Explained.of(found.nearest)
    return replace(found, ranked=ranked, pareto=pareto, nearest=nearest)
