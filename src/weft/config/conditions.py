"""Alert conditions over metrics: their data types, their grammar, and the standard alerts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

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


def simple_parts(condition: Condition) -> tuple[Condition, ...]:
    """Return the conditions that it is made of, without "and" and "or"."""
    if isinstance(condition, Every | Any_):
        return tuple(inner for part in condition.parts for inner in simple_parts(part))
    return (condition,)


# The grammar of conditions, read by hand: nothing of a config is ever evaluated as code.

_TOKEN = re.compile(r"\s*(>=|<=|>|<|\(|\)|[A-Za-z_][A-Za-z0-9_.]*(?:\{[^{}]*\})?|-?[0-9.][^\s()<>]*)")
#: Readings that a span may ask for at most: they are kept in memory.
_MOST_READINGS = 100_000
_LONGEST_S = 30 * 86400.0
_DEEPEST = 20


def parse_condition(text: str) -> Condition:
    """Read a condition.

    Raises:
        ValueError: with the mistake and the remedy, without the text and its position.
    """
    return _Reader(text).whole()


class _Reader:
    """Recursive descent parser of one condition."""

    def __init__(self, text: str):
        if len(text) > 1000:
            raise ValueError("a condition has at most 1000 letters. Make several alerts of it")
        self._words, at = list[str](), 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text[at:].strip()[:20]!r} is no word of a condition. Write e.g. {_EXAMPLE}")
            self._words.append(match[1])
            at = match.end()
        self._at = self._depth = 0

    def whole(self) -> Condition:
        if not self._words:
            raise ValueError(f"a condition is needed. Write e.g. {_EXAMPLE}")
        found = self._any()
        if self._at < len(self._words):
            raise ValueError(
                f"{self._peek()!r} does not belong after what stands before it. Join conditions with and, or"
            )
        return found

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self) -> str:
        word = self._peek()
        self._at += 1
        return word

    def _takes(self, *words: str) -> bool:
        """Consume the given tokens if they come next, and return True."""
        if tuple(self._words[self._at : self._at + len(words)]) != words:
            return False
        self._at += len(words)
        return True

    def _expect(self, *words: str) -> str:
        word = self._take()
        if word not in words:
            known = words[0] if len(words) == 1 else f"one of {', '.join(words)}"
            raise ValueError(f"{known} is needed {f'in the place of {word!r}' if word else 'at the end'}")
        return word

    def _any(self) -> Condition:
        parts = [self._all()]
        while self._takes("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else Any_(tuple(parts))

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._takes("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _one(self) -> Condition:
        if self._takes("("):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise ValueError(f"brackets are nested more than {_DEEPEST} deep. Write a simpler condition")
            inside = self._any()
            self._expect(")")
            self._depth -= 1
            return inside
        if self._takes("event"):
            word = self._take()
            if word not in EVENTS:
                raise ValueError(
                    f"there is no event {word!r}.{did_you_mean(word, EVENTS)} Use one of {', '.join(EVENTS)}"
                )
            return Happened(word)
        if self._takes("no"):
            series, _ = self._figure()
            self._expect("for")
            return Missing(series, self._span(times_only=True))
        series, figure = self._figure()
        return self._test(series, figure)

    def _test(self, series: Series, figure: Figure) -> Condition:
        word = self._take()
        if word in (">", ">=", "<", "<="):
            return self._compare(series, figure, word)
        if word == "is":
            if self._takes("not", "finite"):
                return State(series, "not finite", self._hold())
            state = self._expect("nan", "inf", "not finite")
            return State(series, cast(Literal["nan", "inf"], state), self._hold())
        if word == "no":
            return self._no_improvement(series, figure)
        if word in ("rises", "falls"):
            self._expect("by")
            by, relative = self._amount(figure)
            self._expect("over")
            return Trend(series, word == "rises", by, relative, self._span())
        raise ValueError(
            f"after {series} {f'{word!r} is no test' if word else 'a test is needed'}. Write >, <, 'is nan', "
            f"'no better for', 'rises by' or 'falls by'"
        )

    def _compare(self, series: Series, figure: Figure, operator: Operator) -> Compare:
        value = self._number(figure)
        if self._takes("sigma"):
            self._expect("over")
            return Compare(series, operator, value, "sigma", self._span(), self._hold())
        if self._takes("of"):
            if self._expect("plan", "median") == "plan":
                return Compare(series, operator, value, "plan", None, self._hold())
            self._expect("over")
            return Compare(series, operator, value, "median", self._span(), self._hold())
        return Compare(series, operator, value, hold=self._hold())

    def _no_improvement(self, series: Series, figure: Figure) -> NoImprovement:
        word = self._expect("better", "higher", "lower")
        if word == "better" and not figure.worse:
            raise ValueError(f"nothing says which way {series} is better. Write 'no higher' or 'no lower'")
        way = ("lower" if figure.worse == "high" else "higher") if word == "better" else word
        self._expect("for")
        span = self._span()
        by, relative = self._amount(figure) if self._takes("by") else (0.0, False)
        return NoImprovement(series, cast(Literal["higher", "lower"], way), span, by, relative)

    def _hold(self) -> RunSpan | None:
        return self._span() if self._takes("for") else None

    def _figure(self) -> tuple[Series, Figure]:
        word = self._take()
        if not word:
            raise ValueError(f"a figure is needed at the end. Write e.g. {_EXAMPLE}")
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

    def _number(self, figure: Figure) -> float:
        word = self._take()
        percent = word.endswith("%")
        try:
            return float(word[:-1]) / 100 if percent else float(word)
        except ValueError:
            pass
        try:
            return float(parse_bytes(word)) if figure.unit.startswith("bytes") else parse_seconds(word)
        except ValueError:
            unit = "a size such as 20GiB" if figure.unit.startswith("bytes") else "a number"
            where = f"in the place of {word!r}" if word else "at the end"
            raise ValueError(f"{unit} is needed {where}") from None

    def _amount(self, figure: Figure) -> tuple[float, bool]:
        relative = self._peek().endswith("%")
        value = self._number(figure)
        if not value > 0:
            raise ValueError(f"{value:g} is no amount to rise or fall by. Write one above 0")
        return value, relative

    def _span(self, *, times_only: bool = False) -> RunSpan:
        word = self._take()
        example = "10m" if times_only else "200 steps, 3 evaluations or 10m"
        unit = self._peek()
        if unit in ("step", "steps", "evaluation", "evaluations") and not times_only:
            self._at += 1
            if not re.fullmatch(r"[0-9]{1,9}", word) or not 1 <= int(word) <= _MOST_READINGS:
                raise ValueError(f"{word} {unit}: a whole number from 1 to {_MOST_READINGS} is needed")
            return RunSpan(float(word), "steps" if unit.startswith("step") else "evaluations")
        try:
            seconds = parse_seconds(word) if re.search(r"[a-z]", word) else 0.0
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= _LONGEST_S:
            what = f"in the place of {word!r}" if word else "at the end"
            raise ValueError(f"a span is needed {what}. Write e.g. {example}")
        return RunSpan(seconds, "s")


_EXAMPLE = "'eval.loss no better for 3 evaluations' or 'gpu.temperature > 87 for 60s'"


# The standard alerts, `alerts = "standard"`. Healthy runs never trigger them.

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class StandardAlert:
    """One standard alert. says: advice that follows its message. after_step: the alert ignores earlier steps."""

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
        "Weft names who holds the ranks up after launch.warn_after; `logs/` has their stacks.",
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
    StandardAlert("held", "event held", "warning", "Look at it, and let it go on: weft runs resume RUN."),
)  # fmt: skip
