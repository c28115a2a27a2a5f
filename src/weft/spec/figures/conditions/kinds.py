"""A condition over figures, as data: what the grammar reads and what alerts are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Events that a condition may wait for.
EVENTS = ("failure", "held", "go_on", "end", "start", "warning", "checkpoint", "hang", "slow_rank", "trace")
Operator = Literal[">", ">=", "<", "<="]
Unit = Literal["s", "steps", "evaluations"]


@dataclass(frozen=True, slots=True)
class RunSpan:
    """A stretch of a run: so many seconds, or readings of a step or an evaluation."""

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
    """A figure beside a number.

    of: the number is a factor on what was planned ("plan"), on the median of a span ("median"), or counts deviations
    above or below it ("sigma"); "": it is a value. For ranks and machines the worst one counts: the greatest for ">",
    the least for "<". hold: it must be so for this long.
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
class Stuck:
    """A figure without a new best for a span.

    way: which way better lies. by: gain that counts, as a share where it is `relative`.
    """

    series: Series
    way: Literal["higher", "lower"]
    span: RunSpan
    by: float = 0.0
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Trend:
    """A figure that rises or falls over a span by an amount, as a share of its start where it is `relative`."""

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
    """All of several conditions at once."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Any_:
    """At least one of several conditions."""

    parts: tuple[Condition, ...]


Condition = Compare | State | Stuck | Trend | Missing | Happened | Every | Any_


def simple_parts(condition: Condition) -> tuple[Condition, ...]:
    """Return the conditions that it is made of, without "and" and "or"."""
    if isinstance(condition, Every | Any_):
        return tuple(inner for part in condition.parts for inner in simple_parts(part))
    return (condition,)
