"""Alert conditions over metrics: their data types, their grammar, and the standard alerts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, overload

from weft.config.metrics import FIGURES, SHORT, Figure, split_series
from weft.errors import did_you_mean
from weft.units import parse_bytes, parse_seconds

#: Events that a condition may wait for.
EVENTS = ("failure", "held", "go_on", "end", "start", "warning", "checkpoint", "hang", "slow_rank", "trace")
Operator = Literal[">", ">=", "<", "<="]
Unit = Literal["s", "steps", "evaluations"]


@dataclass(frozen=True, slots=True)
class RunSpan:
    """A span of a run: seconds, or readings of a step or an evaluation."""

    amount: float
    unit: Unit

    def __str__(self) -> str:
        if self.unit != "s":
            return f"{self.amount:g} {self.unit}"
        for name, seconds in (("d", 86400), ("h", 3600), ("m", 60)):
            if self.amount >= seconds and self.amount % seconds == 0:
                return f"{self.amount / seconds:g}{name}"
        return f"{self.amount:g}s"


@dataclass(frozen=True, slots=True)
class Series:
    """Which figure. label: "" for one without, or for all of its labels."""

    name: str
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}{{{self.label}}}" if self.label else self.name


@dataclass(frozen=True, slots=True)
class Compare:
    """A metric compared with a number.

    of: "" compares with a value; "plan" with a factor on the planned value; "median" with a factor on the median of a
    span; "sigma" with deviations from that median. For ranks and machines the worst series counts: the largest for ">",
    the smallest for "<". hold: time for which the comparison must be true.
    """

    series: Series
    operator: Operator
    value: float
    of: Literal["", "plan", "median", "sigma"] = ""
    over: RunSpan | None = None
    hold: RunSpan | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A figure that is no finite number. state: "nan", "inf", or "not finite" for either."""

    series: Series
    state: Literal["nan", "inf", "not finite"]
    hold: RunSpan | None = None


@dataclass(frozen=True, slots=True)
class NoImprovement:
    """A metric without a new best for a span.

    way: direction of improvement. by: minimum gain, as a fraction if `relative`.
    """

    series: Series
    way: Literal["higher", "lower"]
    span: RunSpan
    by: float = 0.0
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Trend:
    """A metric that rises or falls over a span by an amount, as a fraction of its start if `relative`."""

    series: Series
    rises: bool
    by: float
    relative: bool
    span: RunSpan


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that had no reading for a span of time, while the run trains."""

    series: Series
    span: RunSpan


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the run."""

    event: str


@dataclass(frozen=True, slots=True)
class Every:
    """Conjunction of several conditions."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Any_:
    """At least one of several conditions."""

    parts: tuple[Condition, ...]


Condition = Compare | State | NoImprovement | Trend | Missing | Happened | Every | Any_


# The grammar of conditions: clauses of six forms, joined by "and" and "or". Nothing of a config is evaluated as code.

#: Readings that a span may ask for at most: they are kept in memory.
_MOST_READINGS = 100_000
_LONGEST_S = 30 * 86400.0
_EXAMPLE = "'eval.loss no better for 3 evaluations' or 'gpu.temperature > 87 for 60s'"
_FORMS_TEXT = (
    "METRIC > VALUE [sigma over 200 steps | of median over 200 steps | of plan] [for 60s], METRIC is nan, METRIC no "
    "better for 3 evaluations, METRIC rises by 20% over 1h, no METRIC for 10m, or event failure, joined by and, or"
)
# Words between braces belong to a label.
_OR, _AND = (re.compile(rf" {word} (?![^{{]*\}})") for word in ("or", "and"))


def parse_condition(text: str) -> Condition:
    """Read a condition.

    Raises:
        ValueError: with the mistake and the remedy, without the text and its position.
    """
    if len(text) > 1000:
        raise ValueError("a condition has at most 1000 letters. Make several alerts of it")
    if "(" in text or ")" in text:
        raise ValueError(
            "a condition has no brackets, and `and` binds first. Write a and (b or c) as a and b or a and c"
        )
    text = " ".join(re.sub("([<>]=?)", r" \1 ", text).split())
    if not text:
        raise ValueError(f"a condition is needed. Write e.g. {_EXAMPLE}")
    parts: list[Condition] = []
    for part in _OR.split(text):
        clauses = tuple(_clause(clause) for clause in _AND.split(part))
        parts.append(clauses[0] if len(clauses) == 1 else Every(clauses))
    return parts[0] if len(parts) == 1 else Any_(tuple(parts))


def _clause(text: str) -> Condition:
    for pattern, make in _FORMS:
        if match := pattern.fullmatch(text):
            return make(**match.groupdict())
    raise ValueError(f"{text[:40]!r} is no condition. Write {_FORMS_TEXT}")


def _compare(figure: str, operator: str, value: str, of: str | None, over: str | None, hold: str | None) -> Compare:
    series, known = _figure(figure)
    basis = (of or "").removeprefix("of ")
    if (over is None) == (basis in ("sigma", "median")):
        raise ValueError("`over` gives the window of sigma and median alone. Write e.g. loss > 6 sigma over 200 steps")
    return Compare(
        series, cast(Operator, operator), _number(value, known), cast(Literal["", "plan", "median", "sigma"], basis),
        _span(over), _span(hold),
    )  # fmt: skip


def _state(figure: str, state: str, hold: str | None) -> State:
    return State(_figure(figure)[0], cast(Literal["nan", "inf", "not finite"], state), _span(hold))


def _no_improvement(figure: str, way: str, span: str, by: str | None) -> NoImprovement:
    series, known = _figure(figure)
    if way == "better" and not known.worse:
        raise ValueError(f"it is unknown whether higher or lower {series} is better. Write 'no higher' or 'no lower'")
    if way == "better":
        way = "lower" if known.worse == "high" else "higher"
    amount, relative = (0.0, False) if by is None else _amount(by, known)
    return NoImprovement(series, cast(Literal["higher", "lower"], way), _span(span), amount, relative)


def _trend(figure: str, way: str, by: str, span: str) -> Trend:
    series, known = _figure(figure)
    return Trend(series, way == "rises", *_amount(by, known), _span(span))


def _missing(figure: str, span: str) -> Missing:
    found = _span(span)
    if found.unit != "s":
        raise ValueError(f"{span}: a missing figure has no readings to count. Write a time, e.g. 10m")
    return Missing(_figure(figure)[0], found)


def _happened(event: str) -> Happened:
    if event not in EVENTS:
        raise ValueError(f"there is no event {event!r}.{did_you_mean(event, EVENTS)} Use one of {', '.join(EVENTS)}")
    return Happened(event)


_METRIC, _SPAN = r"(?P<figure>[A-Za-z_][^ {]*(?:\{[^{}]*\})?)", r"[^ ]+(?: (?:steps?|evaluations?))?"
_FOR = rf"(?: for (?P<hold>{_SPAN}))?"
_FORMS: tuple[tuple[re.Pattern[str], Callable[..., Condition]], ...] = (
    (re.compile(rf"no {_METRIC} for (?P<span>{_SPAN})"), _missing),
    (re.compile(r"event (?P<event>[^ ]+)"), _happened),
    (re.compile(rf"{_METRIC} is (?P<state>nan|inf|not finite){_FOR}"), _state),
    (
        re.compile(rf"{_METRIC} no (?P<way>better|higher|lower) for (?P<span>{_SPAN})(?: by (?P<by>[^ ]+))?"),
        _no_improvement,
    ),
    (re.compile(rf"{_METRIC} (?P<way>rises|falls) by (?P<by>[^ ]+) over (?P<span>{_SPAN})"), _trend),
    (
        re.compile(
            rf"{_METRIC} (?P<operator>[<>]=?) (?P<value>[^ ]+)(?: (?P<of>sigma|of median|of plan))?"
            rf"(?: over (?P<over>{_SPAN}))?{_FOR}"
        ),
        _compare,
    ),
)


def _figure(word: str) -> tuple[Series, Figure]:
    try:
        name, label = split_series(word)
    except ValueError:
        raise ValueError(f"{word!r} is no figure. Write a name such as loss or gpu.temperature") from None
    name = SHORT.get(name, name)
    if name.startswith("eval.") and name not in FIGURES:
        name, label = "eval.metric", name.removeprefix("eval.")
    figure = FIGURES.get(name)
    if figure is None:
        hint = did_you_mean(name, [*FIGURES, *SHORT])
        raise ValueError(f"there is no figure {name!r}.{hint or ' `weft alerts figures` lists them.'}".rstrip("."))
    if label and not figure.label:
        raise ValueError(f"{name} has no label, so {{{label}}} means nothing. Write {name}")
    return Series(name, label), figure


def _number(word: str, figure: Figure) -> float:
    is_size = figure.unit.startswith("bytes")
    if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?%?", word, re.IGNORECASE):
        return float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    try:
        return float(parse_bytes(word)) if is_size else parse_seconds(word)
    except ValueError:
        unit = "a size such as 20GiB" if is_size else "a number"
        raise ValueError(f"{unit} is needed in the place of {word!r}") from None


def _amount(word: str, figure: Figure) -> tuple[float, bool]:
    """Return (amount, True if it is a fraction)."""
    value = _number(word, figure)
    if not value > 0:
        raise ValueError(f"{value:g} is no amount to rise or fall by. Write one above 0")
    return value, word.endswith("%")


@overload
def _span(text: str) -> RunSpan: ...
@overload
def _span(text: str | None) -> RunSpan | None: ...
def _span(text: str | None) -> RunSpan | None:
    if text is None:
        return None
    amount, _, unit = text.partition(" ")
    if unit:
        if not re.fullmatch(r"[0-9]{1,9}", amount) or not 1 <= int(amount) <= _MOST_READINGS:
            raise ValueError(f"{text}: a whole number from 1 to {_MOST_READINGS} is needed")
        return RunSpan(float(amount), "steps" if unit.startswith("step") else "evaluations")
    try:
        seconds = parse_seconds(amount) if re.search(r"[a-z]", amount) else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"a span is needed in the place of {amount!r}. Write e.g. 200 steps, 3 evaluations or 10m")
    return RunSpan(seconds, "s")


# The standard alerts, `alerts = "standard"`. Healthy runs never trigger them.

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class StandardAlert:
    """A standard alert.

    Attributes:
        says: advice that follows the alert's message.
        after_step: steps up to this one never trigger it.
    """

    name: str
    when: str
    severity: Severity
    says: str
    after_step: int = 0


STANDARD: tuple[StandardAlert, ...] = (
    StandardAlert(
        "loss-not-finite", "loss is not finite or eval.loss is not finite", "critical",
        "Lower optimizer.lr, or go back with `weft runs rollback RUN`.",
    ),
    StandardAlert(
        "loss-spike", "loss > 8 sigma over 200 steps for 3 steps and loss > 1.1 of median over 200 steps for 3 steps "
        "and loss > 0.001",
        "warning", "If it stays high, go back with `weft runs rollback RUN --skip-data`, or lower optimizer.lr.", 50,
    ),
    StandardAlert(
        "gradient-not-finite", "grad_norm is not finite for 3 steps", "critical",
        "Lower optimizer.lr or optimizer.max_grad_norm, or use bf16.",
    ),
    StandardAlert(
        "no-progress", "eval.loss no better for 10 evaluations", "warning",
        "The evaluation loss no longer falls: stop, lower optimizer.lr, or use more data.",
    ),
    StandardAlert(
        "slow-rank", "rank.lag > 1.15 for 30s", "warning",
        "All ranks wait for this one: look at its GPU's clock and temperature, and at other programs there.",
    ),
    StandardAlert(
        "slower", "tokens_per_s < 0.7 of median over 500 steps for 2m", "warning",
        "Look for other programs, a slow disk or a hot GPU.", 100,
    ),
    StandardAlert(
        "stalled", "no step for 10m", "critical",
        " Weft names the missing rank after launch.warn_after; `logs/` has their stacks.",
    ),
    StandardAlert(
        "rank-silent", "rank.silent > 0 for 1m", "warning", "Its process may be stopped or its machine lost.",
    ),
    StandardAlert(
        "memory-leak", "process.memory_bytes rises by 25% over 30m", "warning",
        "Something keeps growing on the host: a list of tensors, a cache, workers of a data loader.", 100,
    ),
    StandardAlert(
        "memory-short", "host.memory_free_bytes < 1GiB for 30s", "critical", "The kernel may kill a rank soon.",
    ),
    StandardAlert(
        "disk-short", "disk.free < 5GiB", "critical",
        "Saves will fail: delete old checkpoints, or lower checkpoint.keep.",
    ),
    StandardAlert("gpu-hot", "gpu.temperature > 90 for 60s", "warning", "Look at its cooling; its clock will fall."),
    StandardAlert(
        "gpu-throttled", "gpu.throttled > 0 for 60s", "warning", "Heat or the power brake slows this GPU down.",
    ),
    StandardAlert(
        "gpu-error", "gpu.xid_errors > 0 or gpu.ecc_errors > 0", "critical", "Drain this machine and test its GPU.",
    ),
    StandardAlert("failure", "event failure", "critical", "The log of the failed rank has the reason."),
    StandardAlert("held", "event held", "warning", "Check it, and resume it: weft runs resume RUN."),
)  # fmt: skip
