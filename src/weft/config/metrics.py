"""Metrics of runs and machines and alert conditions over them: data types, grammar, and the standard alerts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, cast, overload

from weft.errors import did_you_mean
from weft.units import parse_bytes, parse_seconds

#: What metrics describe. run: one value for all ranks. rank: one value for each rank. host: one for each machine.
Owner = Literal["run", "rank", "host"]

_SERIES = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*)(?:\{([^{}]*)\})?")
_PLAIN = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One kind of metric.

    Attributes:
        name: dotted, as in conditions and events.
        unit: "s", "bytes", "ratio", ... or "" for a plain number.
        label: name of the label that distinguishes its values, such as "phase", or "" for a single value.
        owner: the object that the metric describes: "run", "rank" or "host".
        grows: True for a total that only increases during a run.
        worse: the bad direction, or "".
    """

    name: str
    unit: str
    help: str
    _: KW_ONLY
    label: str = ""
    owner: Owner = "run"
    grows: bool = False
    worse: Literal["high", "low", ""] = ""

    @property
    def exported(self) -> str:
        """Return the name for Prometheus and OpenTelemetry: one prefix, base units, "_total" for increasing totals."""
        unit = {"bytes/s": "bytes_per_second", "s": "seconds", "W": "watts", "C": "celsius", "Hz": "hertz"}
        unit["J"] = "joules"
        stem = _PLAIN.sub("_", self.name.removesuffix("_s") if self.unit == "s" else self.name)
        suffix = unit.get(self.unit, self.unit if self.unit in ("bytes", "ratio") else "")
        for ending in ("_bytes_per_s", "_bytes", "_per_s"):
            if suffix.startswith("bytes") and stem.endswith(ending):
                stem = stem.removesuffix(ending)
        if stem.endswith("_per_s"):
            stem = f"{stem.removesuffix('_per_s')}_per_second"
        more = suffix if not stem.endswith(suffix) else ""
        return "_".join(part for part in ("weft", stem, more, "total" if self.grows else "") if part)


def series(name: str, label: str = "") -> str:
    """Return a metric's name with its label, such as "phase_s{forward}", or without a label, such as "step_s"."""
    return f"{name}{{{label}}}" if label else name


def split_series(text: str) -> tuple[str, str]:
    """Return (name, label) of a text such as "phase_s{forward}"; the label may be "".

    Raises:
        ValueError: if the text is neither `name` nor `name{label}`.
    """
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} names no metric. Write a name such as loss, or phase_s{{forward}}")
    return match[1], match[2] or ""


# All metrics of a run: the only list, used by events, sinks, alerts, the dashboard and the docs.

_TRAINING = (
    MetricSpec("loss", "", "Mean training loss of the step, before its update.", worse="high"),
    MetricSpec("lr", "", "Learning rate of the step."),
    MetricSpec("grad_norm", "", "Global norm of the gradient before clipping.", worse="high"),
    MetricSpec("update_ratio", "ratio", "Norm of a step's update over the norm of the trained weights, every "
               "monitor.update_ratio_every steps.", worse="high"),
    MetricSpec("loss_scale", "", "Factor on the loss in fp16.", worse="low"),
    MetricSpec("skipped_steps", "", "Steps whose update was left out.", grows=True, worse="high"),
    MetricSpec("step", "", "Steps done.", grows=True),
    MetricSpec("eval.loss", "", "Mean loss of the last evaluation.", worse="high"),
    MetricSpec("eval.metric", "", "A metric of the last evaluation.", label="metric"),
)  # fmt: skip
_REWARDS = (
    MetricSpec("rl.reward", "", "Mean reward of a step's completions, by function.", label="function", worse="low"),
    MetricSpec("rl.reward_std", "", "Standard deviation of these rewards.", label="function"),
    MetricSpec("rl.reward_errors", "", "Completions of a step without a valid reward.", worse="high"),
    MetricSpec("rl.length", "", "Mean number of sampled tokens of a step's completions."),
    MetricSpec("rl.length_max", "", "Largest number of sampled tokens."),
    MetricSpec("rl.truncated", "ratio", "Share of completions that grpo.max_tokens ended.", worse="high"),
    MetricSpec("rl.entropy", "", "Mean -log p of the sampled tokens, an estimate of the entropy, in nats."),
    MetricSpec("rl.kl", "", "Mean KL divergence from the reference or the teacher per token, in nats."),
    MetricSpec("rl.clipped", "ratio", "Share of tokens whose loss is clipped.", worse="high"),
    MetricSpec("rl.mismatch", "", "Mean of |log p(trainer) - log p(sampler)| over sampled tokens.", worse="high"),
    MetricSpec("rl.mismatch_max", "", "Maximum of |log p(trainer) - log p(sampler)| in a step.", worse="high"),
)  # fmt: skip
_SPEED = (
    MetricSpec("step_s", "s", "Seconds of one step.", worse="high"),
    MetricSpec("tokens_per_s", "", "Throughput of all ranks in the run's unit, such as tokens.", worse="low"),
    MetricSpec("samples_per_s", "", "Samples per second, over all ranks.", worse="low"),
    MetricSpec("mfu", "ratio", "Share of the devices' peak FLOP/s that the model uses.", worse="low"),
    MetricSpec("phase_s", "s", "Seconds of a step by phase: forward, backward, data, reduce, optimizer, wait.",
               label="phase", owner="rank"),
    MetricSpec("exposed_s", "s", "Seconds of a step that the computation waited for other ranks, by axis.",
               label="axis", owner="rank", worse="high"),
    MetricSpec("sent_bytes", "bytes", "Bytes of a step that collectives moved, by axis.", label="axis", owner="rank"),
    MetricSpec("data_wait_s", "s", "Seconds of a step that a rank waited for data.", owner="rank", worse="high"),
    MetricSpec("busy_s", "s", "Seconds of a step in which a rank computed without waiting for others.", owner="rank",
               worse="high"),
    MetricSpec("rank.lag", "ratio", "A rank's busy seconds over the median of the others of its pipeline stage; above "
               "1 they wait for it.", owner="rank", worse="high"),
    MetricSpec("rank.silent", "", "Ranks that have not reported for three intervals (monitor.every).", worse="high"),
)  # fmt: skip
_MEMORY = (
    MetricSpec("memory.bytes", "bytes", "Memory of a rank's device by class: weights, gradients, optimizer, rest "
               "(activations and buffers), peak.", label="class", owner="rank", worse="high"),
    MetricSpec("process.memory_bytes", "bytes", "Resident memory of a rank's process.", owner="rank", worse="high"),
    MetricSpec("process.cpu", "", "CPU cores that a rank's process keeps busy.", owner="rank"),
)  # fmt: skip
_GPU = (
    MetricSpec("gpu.utilization", "ratio", "Share of time in which the GPU ran a kernel.", owner="rank", worse="low"),
    MetricSpec("gpu.memory_bytes", "bytes", "Memory in use on the GPU, of all its users.", owner="rank"),
    MetricSpec("gpu.power", "W", "Power that the GPU draws.", owner="rank"),
    MetricSpec("gpu.temperature", "C", "Temperature of the GPU.", owner="rank", worse="high"),
    MetricSpec("gpu.sm_clock", "Hz", "Clock of the GPU's processors.", owner="rank", worse="low"),
    MetricSpec("gpu.memory_clock", "Hz", "Clock of the GPU's memory.", owner="rank", worse="low"),
    MetricSpec("gpu.throttled", "", "1 while the GPU is slowed down by heat or by its power brake, else 0.",
               owner="rank", worse="high"),
    MetricSpec("gpu.xid_errors", "", "Xid errors of the driver about this GPU.", owner="rank", grows=True,
               worse="high"),
    MetricSpec("gpu.ecc_errors", "", "Uncorrected memory errors of the GPU.", owner="rank", grows=True,
               worse="high"),
    MetricSpec("gpu.nvlink_bytes_per_s", "bytes/s", "NVLink traffic of the GPU, both ways.",
               owner="rank"),
    MetricSpec("gpu.pcie_bytes_per_s", "bytes/s", "PCIe traffic of the GPU, both ways.",
               owner="rank"),
)  # fmt: skip
_HOST = (
    MetricSpec("host.cpu", "ratio", "Share of the machine's CPU time in use.", owner="host"),
    MetricSpec("host.memory_free_bytes", "bytes", "Memory of the machine that programs can still have.", owner="host",
               worse="low"),
    MetricSpec("host.energy_joules", "J", "Energy of a machine's GPUs and CPU packages since the last start.",
               owner="host", grows=True),
    MetricSpec("disk.free_bytes", "bytes", "Free space on the disk of the run folder.", owner="host", worse="low"),
    MetricSpec("disk.read_bytes_per_s", "bytes/s", "Bytes that the machine's disks read.", owner="host"),
    MetricSpec("disk.write_bytes_per_s", "bytes/s", "Bytes that the machine's disks write.", owner="host"),
    MetricSpec("net.sent_bytes_per_s", "bytes/s", "Bytes that the machine sends, without loopback.", owner="host"),
    MetricSpec("net.received_bytes_per_s", "bytes/s", "Bytes that the machine receives, without loopback.",
               owner="host"),
)  # fmt: skip
_ENERGY = (
    MetricSpec("energy.kwh", "kWh", "Energy of the run over all its starts, measured or estimated, with energy.pue.",
               grows=True, worse="high"),
    MetricSpec("energy.watts", "W", "Mean power of the run's devices since the last reading.", worse="high"),
    MetricSpec("energy.j_per_item", "J/item", "Energy per token, or other item of the loss, since the last reading, "
               "with energy.pue.", worse="high"),
)  # fmt: skip
_RUN = (
    MetricSpec("checkpoint.stall_s", "s", "Seconds that training waited for the last save.", worse="high"),
    MetricSpec("checkpoint.durable_s", "s", "Seconds until the last checkpoint was committed.", worse="high"),
    MetricSpec("failures", "", "Failures of ranks since the run began.", grows=True, worse="high"),
    MetricSpec("dropped_figures", "", "Steps whose metrics a rank dropped because its queue was full.", owner="rank",
               grows=True, worse="high"),
    MetricSpec("planned", "", "The planner's estimate of another metric, by its name.", label="figure"),
    MetricSpec("plan.drift", "ratio", ( "Ratio of measured to planned, for a step, its parts and memory. Example in an "
               "alert: " "plan.drift{over dp} > 1.15." ), label="part", worse="high"),
)  # fmt: skip

#: Metrics by name, in the order of the docs.
METRICS: Mapping[str, MetricSpec] = {
    each.name: each for each in (*_TRAINING, *_REWARDS, *_SPEED, *_MEMORY, *_GPU, *_HOST, *_ENERGY, *_RUN)
}
#: Short names that conditions may use, and the full names of their metrics.
SHORT: Mapping[str, str] = {"disk.free": "disk.free_bytes", "host.memory_free": "host.memory_free_bytes"}


#: Events that a condition may test.
EVENTS = ("failure", "held", "go_on", "end", "start", "warning", "checkpoint", "hang", "slow_rank", "shares", "trace")
Operator = Literal[">", ">=", "<", "<="]
Unit = Literal["s", "steps", "evaluations"]


@dataclass(frozen=True, slots=True)
class RunSpan:
    """A time span of a run: a number of seconds, or a number of steps or evaluations."""

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
    """A metric and one of its labels; the label is "" for a metric without labels, or for all labels."""

    name: str
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}{{{self.label}}}" if self.label else self.name


@dataclass(frozen=True, slots=True)
class Compare:
    """A metric compared with a number.

    Of a metric over ranks or machines, the largest value is compared for ">", and the smallest for "<".

    Attributes:
        of: "" compares with a value, "plan" with a multiple of the planned value, "median" with a multiple of the
            median over the span `over`, "sigma" with the median of that span's newest values, plus (for "<": minus) a
            multiple of the deviation.
        hold: time for which the comparison must be true.
    """

    series: Series
    operator: Operator
    value: float
    of: Literal["", "plan", "median", "sigma"] = ""
    over: RunSpan | None = None
    hold: RunSpan | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A metric that is not a finite number. state: "nan", "inf", or "not finite" for either."""

    series: Series
    state: Literal["nan", "inf", "not finite"]
    hold: RunSpan | None = None


@dataclass(frozen=True, slots=True)
class NoImprovement:
    """A metric without a new best value over a span.

    `by` is the minimum improvement, as a fraction if `relative`.
    """

    series: Series
    way: Literal["higher", "lower"]
    span: RunSpan
    by: float = 0.0
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Trend:
    """A metric that rises or falls over a span by at least an amount, a fraction of its initial value if `relative`."""

    series: Series
    rises: bool
    by: float
    relative: bool
    span: RunSpan


@dataclass(frozen=True, slots=True)
class Missing:
    """A metric without a value for a span of time while the run trains."""

    series: Series
    span: RunSpan


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the run."""

    event: str


@dataclass(frozen=True, slots=True)
class Every:
    """All of several conditions."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Any_:
    """At least one of several conditions."""

    parts: tuple[Condition, ...]


Condition = Compare | State | NoImprovement | Trend | Missing | Happened | Every | Any_


# The grammar of conditions: six kinds of clauses, joined by "and" and "or". No config text is evaluated as code.

#: Maximum number of values that a span may need, since they are kept in memory.
_MOST_READINGS = 100_000
_LONGEST_S = 30 * 86400.0
_EXAMPLE = "'eval.loss no better for 3 evaluations' or 'gpu.temperature > 87 for 60s'"
_FORMS_TEXT = (
    "METRIC > VALUE [sigma over 200 steps | of median over 200 steps | of plan] [for 60s], METRIC is nan, METRIC no "
    "better for 3 evaluations, METRIC rises by 20% over 1h, no METRIC for 10m, or event failure, joined by and, or"
)
# Words between braces are part of a label.
_OR, _AND = (re.compile(rf" {word} (?![^{{]*\}})") for word in ("or", "and"))


def parse_condition(text: str) -> Condition:
    """Parse a condition.

    Raises:
        ValueError: if the text is not a condition. The message has the mistake and the fix, not the full text.
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
        clauses: list[Condition] = []
        for clause in _AND.split(part):
            found = ((match, make) for pattern, make in _FORMS if (match := pattern.fullmatch(clause)))
            match, make = next(found, (None, None))
            if match is None or make is None:
                raise ValueError(f"{clause[:40]!r} is no condition. Write {_FORMS_TEXT}")
            clauses.append(make(**match.groupdict()))
        parts.append(clauses[0] if len(clauses) == 1 else Every(tuple(clauses)))
    return parts[0] if len(parts) == 1 else Any_(tuple(parts))


def _compare(metric: str, operator: str, value: str, of: str | None, over: str | None, hold: str | None) -> Compare:
    series, known = _metric(metric)
    basis = (of or "").removeprefix("of ")
    if (over is None) == (basis in ("sigma", "median")):
        raise ValueError("`over` gives the window of sigma and median alone. Write e.g. loss > 6 sigma over 200 steps")
    return Compare(
        series, cast(Operator, operator), _number(value, known), cast(Literal["", "plan", "median", "sigma"], basis),
        _span(over), _span(hold),
    )  # fmt: skip


def _state(metric: str, state: str, hold: str | None) -> State:
    return State(_metric(metric)[0], cast(Literal["nan", "inf", "not finite"], state), _span(hold))


def _no_improvement(metric: str, way: str, span: str, by: str | None) -> NoImprovement:
    series, known = _metric(metric)
    if way == "better" and not known.worse:
        raise ValueError(f"it is unknown whether higher or lower {series} is better. Write 'no higher' or 'no lower'")
    if way == "better":
        way = "lower" if known.worse == "high" else "higher"
    amount, relative = (0.0, False) if by is None else _amount(by, known)
    return NoImprovement(series, cast(Literal["higher", "lower"], way), _span(span), amount, relative)


def _trend(metric: str, way: str, by: str, span: str) -> Trend:
    series, known = _metric(metric)
    return Trend(series, way == "rises", *_amount(by, known), _span(span))


def _missing(metric: str, span: str) -> Missing:
    found = _span(span)
    if found.unit != "s":
        raise ValueError(f"{span}: a missing metric has no readings to count. Write a time, e.g. 10m")
    return Missing(_metric(metric)[0], found)


def _happened(event: str) -> Happened:
    if event not in EVENTS:
        raise ValueError(f"there is no event {event!r}.{did_you_mean(event, EVENTS)} Use one of {', '.join(EVENTS)}")
    return Happened(event)


_METRIC, _SPAN = r"(?P<metric>[A-Za-z_][^ {]*(?:\{[^{}]*\})?)", r"[^ ]+(?: (?:steps?|evaluations?))?"
_FOR, _OVER = rf"(?: for (?P<hold>{_SPAN}))?", rf"(?: over (?P<over>{_SPAN}))?"
_FORMS: tuple[tuple[re.Pattern[str], Callable[..., Condition]], ...] = (
    (re.compile(rf"no {_METRIC} for (?P<span>{_SPAN})"), _missing),
    (re.compile(r"event (?P<event>[^ ]+)"), _happened),
    (re.compile(rf"{_METRIC} is (?P<state>nan|inf|not finite){_FOR}"), _state),
    (re.compile(rf"{_METRIC} no (?P<way>better|higher|lower) for (?P<span>{_SPAN})(?: by (?P<by>[^ ]+))?"),
     _no_improvement),
    (re.compile(rf"{_METRIC} (?P<way>rises|falls) by (?P<by>[^ ]+) over (?P<span>{_SPAN})"), _trend),
    (re.compile(rf"{_METRIC} (?P<operator>[<>]=?) (?P<value>[^ ]+)(?: (?P<of>sigma|of median|of plan))?{_OVER}{_FOR}"),
     _compare),
)  # fmt: skip


def _metric(word: str) -> tuple[Series, MetricSpec]:
    try:
        name, label = split_series(word)
    except ValueError:
        raise ValueError(f"{word!r} is no metric. Write a name such as loss or gpu.temperature") from None
    name = SHORT.get(name, name)
    if name.startswith("eval.") and name not in METRICS:
        name, label = "eval.metric", name.removeprefix("eval.")
    metric = METRICS.get(name)
    if metric is None:
        hint = did_you_mean(name, [*METRICS, *SHORT])
        raise ValueError(f"there is no metric {name!r}.{hint or ' `weft alerts metrics` lists them.'}".rstrip("."))
    if label and not metric.label:
        raise ValueError(f"{name} has no label, so {{{label}}} means nothing. Write {name}")
    return Series(name, label), metric


def _number(word: str, metric: MetricSpec) -> float:
    is_size = metric.unit.startswith("bytes")
    if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?%?", word, re.IGNORECASE):
        return float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    try:
        return float(parse_bytes(word)) if is_size else parse_seconds(word)
    except ValueError:
        unit = "a size such as 20GiB" if is_size else "a number"
        raise ValueError(f"{unit} is needed in the place of {word!r}") from None


def _amount(word: str, metric: MetricSpec) -> tuple[float, bool]:
    """Return (amount, True if it is a fraction)."""
    value = _number(word, metric)
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
        after_step: first step of a run at which it is evaluated.
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
        "sampler-mismatch", "rl.mismatch > 0.1 for 3 steps", "warning",
        "Sampler and trainer disagree: set dropout in the model's config to 0, use the same precision, or set "
        "grpo.importance_cap=2.",
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
