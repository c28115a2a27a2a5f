"""Where the time and the memory of a plan go, as text: a waterfall of the step and bars of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.planner.measured import lesson_words
from weft.planner.search import Candidate, Question, estimated
from weft.planner.tell.basis import band_words
from weft.spec.rules import check
from weft.units import format_bytes, format_count, format_seconds

#: What each term of a step is, for people.
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
#: Where kernels wait for the host for at least this share of a step, the answer says what CUDA graphs would change.
_WAITS = 0.05


def explain(one: Candidate, hour_price: float | None = None) -> str:
    """Tell the whole story of one candidate. hour_price: dollars of one device for one hour."""
    return "\n".join([*headline(one, hour_price), "", *waterfall(one), "", *memory_bars(one)])


def headline(one: Candidate, hour_price: float | None = None) -> list[str]:
    """Plan, step time, throughput, utilisation, price, energy."""
    job, cluster = one.question.job, one.question.cluster
    tokens, unit = job.tokens, one.question.unit
    cost = one.cost(hour_price)
    money = [] if cost.price is None else [f"${_short(cost.price * 1e9 / tokens)} per billion {unit}"]
    energy = [] if cost.energy_kwh is None else [f"{_short(cost.energy_kwh * 1e9 / tokens)} kWh per billion {unit}"]
    waiting = [] if one.built else ["note    Weft does not run this plan yet (see docs/reference/rules.md)"]
    slow = f"note    all devices have equal work, so each rate and size here is the least of {cluster}"
    return [
        f"plan    {one.plan}",
        f"job     {one.question.model.name}, {format_count(job.shape.num_params)} parameters, on {cluster}; "
        f"{one.question.work}, {one.microbatch} in a pass",
        f"speed   {format_seconds(one.step_s)} a step, {format_count(one.tokens_per_s)} {unit}/s "
        f"({format_count(one.tokens_per_s / cluster.num_devices)} per device)",
        f"MFU     {one.mfu:.1%} counting full attention, {one.causal_mfu:.1%} counting causal attention; "
        "without recompute",
        *([f"cost    {', '.join([*money, *energy])}"] if money or energy else []),
        *band_words(one),
        *_learned(one.question),
        *_with_graphs(one),
        *([slow] if cluster.kinds else []),
        *waiting,
    ]


def _learned(question: Question) -> list[str]:
    """Which profile is in it, and what runs taught that."""
    profile = question.profile
    if profile is None:
        return []
    lines = [f"        the profile of {profile.machine.device}, measured {profile.made}"]
    return lines + ([f"        {words}"] if (words := lesson_words(profile)) else [])


def _with_graphs(one: Candidate) -> list[str]:
    """What the plan would take with CUDA graphs, where kernels wait for the host. The search tries none: no GPU has yet
    shown that they gain anything."""
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


def waterfall(one: Candidate) -> list[str]:
    """The parts of the step, one after another, as a falling bar."""
    rows = sorted(((name, value) for name, value in one.terms.items() if value > 0), key=lambda row: -row[1])
    lines = [f"step    {format_seconds(one.step_s)}"]
    done = 0.0
    for name, value in rows:
        left, width = _cells(done, one.step_s), _cells(done + value, one.step_s) - _cells(done, one.step_s)
        bar = f"{' ' * left}{'█' * width or '▏'}"
        lines.append(f"  {TERM_WORDS.get(name, name):<40} {format_seconds(value):>8} {value / one.step_s:>6.1%}  {bar}")
        done += value
    return lines


def memory_bars(one: Candidate) -> list[str]:
    """Memory of the fullest rank by class, against what the device has."""
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
    """Return 'fits (97 %)', 'may not fit (60 %)' or 'does not fit'."""
    percent = f"{min(probability, 0.999):.0%}" if probability < 0.995 else "> 99%"
    if probability >= 0.9:
        return f"fits ({percent})"
    return f"may not fit ({percent})" if probability >= 0.1 else "does not fit"


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(name, before, after) of what differs by more than a thousandth of the whole, the largest change first."""
    whole = max(sum(before.values()), sum(after.values()), 1e-12)
    rows = [(name, before.get(name, 0.0), after.get(name, 0.0)) for name in _names(before, after)]
    return sorted((row for row in rows if abs(row[2] - row[1]) > whole / 1000), key=lambda row: -abs(row[2] - row[1]))


def _names(*tables: Mapping[str, float]) -> Iterable[str]:
    return dict.fromkeys(name for table in tables for name in table)


def _cells(value: float, whole: float) -> int:
    return round(_WIDTH * min(value, whole) / whole)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
