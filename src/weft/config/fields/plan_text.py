"""Parsing of a plan's text, and the values of fields that searches and tests try."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from weft.config.fields.layout import common_divisors
from weft.config.fields.plan_values import (
    LARGEST,
    Integer,
    ListKind,
    PlanField,
    Schema,
    SearchFacts,
    number_of,
    numbered,
)
from weft.errors import PlanError, Problem, did_you_mean, shown

_COUNTS = re.compile(r"[1-9][0-9]{0,5}(\+[1-9][0-9]{0,5})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Counts(ListKind):
    """Positive integers, one for each pipeline stage. The planner's column has a number for each list, and 0 for ()."""

    dtype: str = "int64"

    def read(self, value: object) -> object:
        if isinstance(value, str) and value != "none" and not _COUNTS.fullmatch(value):
            return value
        return ListKind.read(self, value)

    def part(self, text: str) -> object:
        """Return the integer that a text of digits names."""
        return int(text)

    def check(self, name: str, value: object) -> tuple[int, ...]:
        counts = cast(tuple[object, ...], value) if isinstance(value, tuple) else (None,)
        if all(isinstance(count, int) and not isinstance(count, bool) and 0 < count <= LARGEST for count in counts):
            return cast(tuple[int, ...], counts)
        rule = f"each stage has a whole number of blocks, at least 1. Use e.g. {name}=3+4+4+3, or leave it out."
        raise PlanError([Problem.of(name, shown(cast(object, value)), rule)])

    def words(self) -> str:
        return "whole numbers joined by `+`"

    def schema(self) -> Schema:
        counts: Schema = {"type": "array", "items": {"type": "integer", "minimum": 1}}
        return {"anyOf": [counts, {"type": "string", "pattern": f"^(none|{_COUNTS.pattern})$"}]}

    def encode(self, value: Any) -> tuple[float, ...]:
        return (number_of(value) if value else 0,)

    def decode(self, *numbers: Any) -> tuple[int, ...]:
        return numbered(numbers[0]) if numbers[0] else ()


#: Value of `shares` that is measured before the first step. It is written "auto".
MEASURED_SHARES = (0,)


#: Shares with counts, as in "64x3+64x1"; the largest number of shares, and of equal ones that are written out.
_REPEATED = re.compile(r"([1-9][0-9]{0,5}x)?[1-9][0-9]{0,8}(\+([1-9][0-9]{0,5}x)?[1-9][0-9]{0,8})*", re.ASCII)
_MOST_SHARES, _LONG = 1_000_000, 5


@dataclass(frozen=True, slots=True)
class ShareList(Counts):
    """Positive integers, one for each rank; MEASURED_SHARES is written "auto". measured: True if it is allowed."""

    measured: bool = True

    def read(self, value: object) -> object:
        if isinstance(value, str) and _REPEATED.fullmatch(value):
            parts = [part.rpartition("x") for part in value.split("+")]
            if sum(int(count or 1) for count, _, _ in parts) <= _MOST_SHARES:
                return tuple(int(share) for count, _, share in parts for _ in range(int(count or 1)))
        return MEASURED_SHARES if value == "auto" and self.measured else Counts.read(self, value)

    def check(self, name: str, value: object) -> tuple[int, ...]:
        try:
            is_auto = self.measured and value in ("auto", MEASURED_SHARES)
            return MEASURED_SHARES if is_auto else Counts.check(self, name, value)
        except PlanError:
            rule = f"each {'data-parallel ' if self.measured else ''}rank has a whole number, at least 1. Use e.g. "
            last = f", or {name}=auto" if self.measured else ", or leave it out"
            raise PlanError([Problem.of(name, shown(value), f"{rule}{name}=3+3+1+1{last}.")]) from None

    def write(self, value: Any) -> str:
        if value == MEASURED_SHARES:
            return "auto"
        runs = [(share, len(list(run))) for share, run in itertools.groupby(value)]
        return "+".join(f"{count}x{share}" if count >= _LONG else "+".join([str(share)] * count)
                        for share, count in runs) or "none"  # fmt: skip

    def words(self) -> str:
        return (
            f"{Counts.words(self)}, with a count for equal ones (`64x3+64x1`){', or `auto`' if self.measured else ''}"
        )

    def schema(self) -> Schema:
        return {"anyOf": [Counts.schema(self), {"type": "string", "pattern": f"^(auto|{_REPEATED.pattern})$"}]}


def is_auto(text: str) -> bool:
    """Return True if the planner chooses the plan: "auto", or "auto" followed by fixed fields ("auto zero=3")."""
    return text.split()[:1] == ["auto"]


def split_plan(text: str) -> tuple[dict[str, object], list[Problem]]:
    """Return the items of a plan's text as a table of unchecked values, and the problems found.

    "tp=2 zero=3" -> {"tp": "2", "zero": "3"}. Problems are items without a value, repeated fields, and "auto".
    """
    table: dict[str, object] = {}
    problems: list[Problem] = []
    if is_auto(text):
        rule = "auto works only for a run of `weft train`, and an explicit plan is needed here. Use e.g."
        return table, [Problem("", f"plan=auto: {rule} 'dp_replicate=*'.")]
    for word in text.split():
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            rule = "a plan consists of name=value fields. Write e.g. 'dp_replicate=4 precision=bf16'."
            problems.append(Problem(name, f"plan field {word!r}: {rule}"))
        elif name in table:
            problems.append(Problem(name, f"plan field {name!r} is set twice in {text!r}. Keep one."))
        else:
            table[name] = value
    return table, problems


def read_values(
    source: str | Mapping[str, object], known: Mapping[str, PlanField]
) -> tuple[dict[str, Any], str | None]:
    """Return the values of a plan's text or table in normal form, and the axis that is `*`, or None.

    Raise PlanError with every mistake found.
    """
    table, problems = split_plan(source) if isinstance(source, str) else (source, [])
    problems += unknown_fields(table, known)
    values: dict[str, Any] = {}
    stars = [name for name, value in table.items() if value == "*"]
    for name, value in table.items():
        if name in known and name not in stars:
            kind = known[name].kind
            try:
                values[name] = kind.check(name, kind.read(value))
            except PlanError as error:
                problems += error.problems
    axes = [name for name, field in known.items() if isinstance(field.kind, Integer) and field.kind.star]
    if len(stars) > 1 or not set(stars) <= set(axes):
        where = f"{' and '.join(stars)} have '*'" if len(stars) > 1 else f"{stars[0]}=*"
        rule = "only one mesh axis can take the remaining ranks. Use '*' once, on dp_replicate."
        problems.append(Problem(stars[-1], f"{where}: {rule}"))
    if problems:
        raise PlanError(problems)
    return values, stars[0] if stars else None


#: Names of settings in other tools, and the corresponding plan setting.
_ELSEWHERE = {
    "dp": " Write dp_shard=N (states are shared out) or dp_replicate=N (copies).",
    "fsdp": " Write dp_shard=N zero=3.",
    "mbs": " Write accumulation=N or microbatches=N; a microbatch is what the global batch leaves.",
    "micro_batch": " Write accumulation=N or microbatches=N; a microbatch is what the global batch leaves.",
    "vpp": " Write schedule=interleaved virtual_stages=N.",
    "dtype": " Write precision=bf16.",
}


def unknown_fields(names: Iterable[str], known: Collection[str]) -> list[Problem]:
    """Return one problem for each name that is not a field."""
    every = f" Known: {', '.join(known)}."
    return [
        Problem(name, f"unknown plan field {name!r}.{_ELSEWHERE.get(name) or did_you_mean(name, known) or every}")
        for name in names
        if name not in known
    ]


# Values of fields that searches, refinement and tests try.

#: Fractions of saved activations and optimizer states that are tried: coarse steps, and fine ones.
_BUDGETS = ("75%", "50%", "25%")
_FINE_BUDGETS = tuple(f"{percent}%" for percent in range(95, 5, -5))
SHARES = ("optimizer:0.5", "activations:0.5")
FINE_SHARES = tuple(f"{name}:{eighth / 8:g}" for name in ("optimizer", "activations") for eighth in range(1, 8))
#: Numbers of stages per rank that are tried for interleaved schedules.
_DEEP = (2, 3, 4, 5, 6, 8, 10, 12)


def schedules(facts: SearchFacts) -> list[tuple[str, int]]:
    """Return the schedules to try, each with a number of virtual stages."""
    deep = [stages for stages in _DEEP if 2 * stages <= facts.layers]
    straight = [(name, 1) for name in ("gpipe", "1f1b", "zb_h1")]
    v_shaped = [(name, 2) for name in ("zb_v", "dualpipe_v")]
    return [*straight, *v_shaped, *((name, stages) for name in ("interleaved", "zb_interleaved") for stages in deep)]


def recomputes(facts: SearchFacts) -> tuple[str, ...]:
    """Return the policies to try. Flash attention stores no scores, so that a policy for them is not needed."""
    return ("none", "selective", "full", *(() if facts.flash else ("attention",)))


def recomputes_near(plan: Any, facts: SearchFacts, fine: bool) -> Iterator[str]:
    """Yield values that recompute some layers: by a budget, and in a pipeline by a number of blocks."""
    if plan.pp == 1:
        yield from _FINE_BUDGETS if fine else _BUDGETS
        if fine and plan.recompute.endswith("%"):
            percent = int(plan.recompute[:-1])
            yield from (f"{each}%" for each in range(max(1, percent - 4), min(99, percent + 4) + 1))
        return
    most = -(-facts.layers // plan.pp)
    counts = {round(most * eighth / 8) for eighth in (range(1, 8) if fine else (4,))}
    if fine and plan.recompute_blocks:
        counts |= {plan.recompute_blocks + step for step in (-2, -1, 1, 2)}
    for count in sorted(counts & set(range(1, most))):
        yield from (f"{policy}:{count}" for policy in ("full", "selective"))


def orders_near(plan: Any, facts: SearchFacts, fine: bool) -> Iterator[tuple[str, ...]]:
    """Yield orders of the axes in use: all orders of up to three axes, else those with two neighbors swapped."""
    now = tuple(axis for axis in plan.axis_order if getattr(plan, axis) > 1)
    if len(now) <= 3:
        yield from itertools.permutations(now)
        return
    for index in range(len(now) - 1):
        yield (*now[:index], now[index + 1], now[index], *now[index + 2 :])


def sizes_tried(num_ranks: int, passes: Sequence[int]) -> Sequence[int]:
    """Return every size of an axis that divides the number of ranks."""
    return common_divisors(num_ranks)
