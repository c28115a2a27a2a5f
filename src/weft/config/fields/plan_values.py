"""Kinds of plan values: how each kind is parsed, checked, printed, and encoded for the planner.

A kind is independent of the plan. `PlanField` has the other properties of a field; `plan.py` has the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from weft.config.fields.wire_formats import (
    LARGEST_RANK,
    LARGEST_VALUES,
    LOW_RANK,
    MOST_SHARE,
    SYNCS,
    has_number,
    num_values_sent,
    rank_of,
    sync_of,
)
from weft.errors import PlanError, Problem, did_you_mean, shown

LARGEST = 999_999_999
_SWITCHES = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_WHOLE = re.compile(r"[0-9]{1,18}")
_RANKS = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)

_SYNC_COLUMNS = (("", "uint8"), ("_every", "int64"), ("_fragments", "int64"))

#: JSON Schema of a value.
Schema = dict[str, object]


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """One array of the planner, with one number per plan. dtype: numpy name of its type."""

    name: str
    dtype: str


#: Numbers of values that are encoded as a whole, such as lists. Searches have few of them, which users type.
_NUMBERS: dict[object, int] = {}
_NUMBERED: dict[int, Any] = {}
_NEXT_NUMBER = itertools.count(1)


def number_of(value: object) -> int:
    """Return a number above 0 for a value, for a column of the planner. It is valid in this process."""
    number = _NUMBERS.setdefault(value, next(_NEXT_NUMBER))
    _NUMBERED[number] = value
    return number


def numbered(number: float) -> Any:
    """Return the value with this number."""
    return _NUMBERED[int(number)]


class Kind(ABC):
    """Type of a field's values. `check` returns the normal form, which all other methods accept.

    By default the planner has one array of type `dtype` for a field, or none if `dtype` is "".
    """

    dtype: str = ""

    def read(self, value: object) -> object:
        """Convert a value from text or a table to the field's type if possible; `check` rejects other values."""
        return value

    @abstractmethod
    def check(self, name: str, value: object) -> Any:
        """Return the value of the field `name` in its normal form. Raise PlanError for an invalid value."""

    def write(self, value: Any) -> str:
        """Return the value as text, in the form in which users type it."""
        return str(value)

    @abstractmethod
    def words(self) -> str:
        """Return a description of the allowed values, for the documentation."""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the JSON Schema of the value in a TOML table."""

    def columns(self, name: str) -> tuple[PlanColumn, ...]:
        """Return the planner's arrays for the field `name`; () if estimates do not depend on the field."""
        return (PlanColumn(name, self.dtype),) if self.dtype else ()

    def encode(self, value: Any) -> tuple[float, ...]:
        """Return the value as one number for each of the planner's columns."""
        return (value,) if self.dtype else ()

    def decode(self, *numbers: Any) -> Any:
        """Return the value that `encode` encoded as these numbers."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """An integer. rule: the limits, for error messages. star: True if `*` may be used for the remaining ranks."""

    low: int = 1
    high: int = LARGEST
    rule: str = ""
    star: bool = False
    dtype: str = "int64"

    def read(self, value: object) -> object:
        return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else value

    def check(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            size = f"a whole number from {self.low} to {self.high} is needed. Use {name}={self.low} to leave it out."
            raise PlanError([Problem.of(name, shown(value), self.rule or size)])
        return value

    def words(self) -> str:
        most = "" if self.high == LARGEST else f" to {self.high}"
        return f"a whole number from {self.low}{most}{', or `*`' if self.star else ''}"

    def schema(self) -> Schema:
        whole: Schema = {"type": "integer", "minimum": self.low, "maximum": self.high}
        return {"anyOf": [whole, {"const": "*"}]} if self.star else whole

    def decode(self, *numbers: Any) -> int:
        return int(numbers[0])


@dataclass(frozen=True, slots=True)
class PassCount(Integer):
    """Number of microbatches of a step.

    The planner has one column `num_micro` for `microbatches` (pp > 1) or `accumulation`, and none for this field.
    """

    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """True or False."""

    dtype: str = "bool"

    def read(self, value: object) -> object:
        return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value

    def check(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise PlanError([Problem.of(name, shown(value), f"this is a switch. Use {name}=on or {name}=off.")])
        return value

    def write(self, value: Any) -> str:
        return "on" if value else "off"

    def words(self) -> str:
        return "`on`, `off`"

    def schema(self) -> Schema:
        return {"type": "boolean"}

    def decode(self, *numbers: Any) -> bool:
        return bool(numbers[0])


@dataclass(frozen=True, slots=True)
class OneOf(Kind):
    """One of several names.

    Attributes:
        open: the name that leaves the choice to Weft. It is resolved before a plan is encoded.
        codes: the names that the planner encodes, if different.
        instead: the name to use for a name in `codes` that no plan has.
    """

    known: Sequence[str]
    open: str = ""
    codes: tuple[str, ...] = ()
    instead: str = ""
    dtype: str = "uint8"

    def check(self, name: str, value: object) -> str:
        if self.instead and value in self.codes and value not in self.known:
            rule = f"the planner estimates published runs in it, and Weft does not run it yet: {', '.join(self.known)}"
            raise PlanError([Problem.of(name, value, f"{rule}. Use {name}={self.instead}.")])
        return choice(name, value, self.known)

    def words(self) -> str:
        return listed(self.known)

    def schema(self) -> Schema:
        return {"enum": list(self.known)}

    def encode(self, value: Any) -> tuple[float, ...]:
        return (0 if value == self.open else (self.codes or self.known).index(value),)

    def decode(self, *numbers: Any) -> str:
        return (self.codes or self.known)[int(numbers[0])]


@dataclass(frozen=True, slots=True)
class Compression(OneOf):
    """A lossy wire format, by name; low-rank formats include the rank, and top-k formats the fraction of values."""

    def check(self, name: str, value: object) -> str:
        kind = value.partition(":")[0] if isinstance(value, str) else ""
        rule = ""
        if kind == LOW_RANK and rank_of(str(value)) is None:
            rule = f"its rank is a whole number from 1 to {LARGEST_RANK}. Use {name}={LOW_RANK}:4."
        if kind == LARGEST_VALUES and num_values_sent(str(value)) is None:
            rule = f"the share of values that are sent is above 0 and at most {MOST_SHARE}. Use {name}={kind}:0.02."
        if rule:
            raise PlanError([Problem.of(name, shown(value), rule)])
        return choice(name, value, self.known)

    def words(self) -> str:
        ranks = f"`{LOW_RANK}:R` with a rank R from 1 to {LARGEST_RANK}"
        return f"{listed(self._names())}, {ranks}, `{LARGEST_VALUES}:X` with a share X to {MOST_SHARE}"

    def schema(self) -> Schema:
        patterns = (f"^{LOW_RANK}:[1-9][0-9]?$", rf"^{LARGEST_VALUES}:0\.[0-9]{{1,6}}$")
        return {"anyOf": [{"enum": self._names()}, *({"type": "string", "pattern": each} for each in patterns)]}

    def _names(self) -> list[str]:
        return [word for word in self.known if not has_number(word)]


@dataclass(frozen=True, slots=True)
class ReshardPolicy(OneOf):
    """When gathered parameters are freed. The first name may have a number of ranks, as in "after_forward:8"."""

    def check(self, name: str, value: object) -> str:
        if isinstance(value, str) and value.partition(":")[0] == self.known[0] and ":" in value:
            number = value.partition(":")[2]
            if not _RANKS.fullmatch(number) or number == "1":
                rule = "secondary shards are divided over a number of neighboring ranks, from 2 to 999999. Use "
                raise PlanError(
                    [Problem.of(name, shown(value), f"{rule}{name}={self.known[0]}:8, for 8 ranks on a host.")]
                )
            return value
        return choice(name, value, self.known)

    def words(self) -> str:
        return f"{listed(self.known)}; `{self.known[0]}:N` with a number N of neighboring ranks"

    def schema(self) -> Schema:
        pattern = f"^{self.known[0]}:[1-9][0-9]{{0,5}}$"
        return {"anyOf": [{"enum": list(self.known)}, {"type": "string", "pattern": pattern}]}

    def columns(self, name: str) -> tuple[PlanColumn, ...]:
        return (PlanColumn(name, "uint8"), PlanColumn(f"{name}_within", "int64"))

    def encode(self, value: Any) -> tuple[float, ...]:
        word, _, number = str(value).partition(":")
        return self.known.index(word), int(number or 0)

    def decode(self, *numbers: Any) -> str:
        word = self.known[int(numbers[0])]
        return f"{word}:{int(numbers[1])}" if numbers[1] else word


@dataclass(frozen=True, slots=True)
class SyncEvery(Kind):
    """When replicas synchronize: "step", or a method with a number of steps ("diloco:50") and of fragments ("/4")."""

    def check(self, name: str, value: object) -> str:
        try:
            sync_of(value if isinstance(value, str) else "")
            return str(value)
        except ValueError:
            rule = (
                "it is step, or average:H or diloco:H with H steps from 1 to 999999, and perhaps /N for N fragments, "
                f"at most H. Use {name}=step, or e.g. {name}=diloco:50 or {name}=diloco:50/4."
            )
            raise PlanError([Problem.of(name, shown(value), rule)]) from None

    def words(self) -> str:
        return "`step`, `average:H` or `diloco:H` with a number H of steps, and `/N` for N fragments that are streamed"

    def schema(self) -> Schema:
        pattern = "^(average|diloco):[1-9][0-9]{0,5}(/[1-9][0-9]{0,5})?$"
        return {"anyOf": [{"const": "step"}, {"type": "string", "pattern": pattern}]}

    def columns(self, name: str) -> tuple[PlanColumn, ...]:
        return tuple(PlanColumn(f"{name}{end}", kind) for end, kind in _SYNC_COLUMNS)

    def encode(self, value: Any) -> tuple[float, ...]:
        way, every, fragments = sync_of(value)
        return SYNCS.index(way), every, fragments

    def decode(self, *numbers: Any) -> str:
        way, every, fragments = SYNCS[int(numbers[0])], int(numbers[1]), int(numbers[2])
        return f"{way}:{every}{f'/{fragments}' if fragments else ''}" if numbers[0] else way


def choice(name: str, value: object, known: Sequence[str]) -> str:
    """Return the value if it is one of the allowed names. Raise PlanError otherwise."""
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(str(value), known) if isinstance(value, str) else ""
        rule = f"not one of {', '.join(known)}.{hint or f' Use {name}={known[0]}.'}"
        raise PlanError([Problem.of(name, shown(value), rule)])
    return value


def listed(words: Sequence[str]) -> str:
    """Return the names as text, for the documentation."""
    return ", ".join(f"`{word}`" for word in words)


# Kinds of values that are lists joined by "+": counts, axes, shares.


class ListKind(Kind):
    """Several values, joined by "+"; "none" if empty."""

    def read(self, value: object) -> object:
        if isinstance(value, str):
            return tuple(self.part(part) for part in value.split("+")) if value != "none" else ()
        return tuple(cast(list[object], value)) if isinstance(value, list) else value

    def part(self, text: str) -> object:

        return text

    def write(self, value: Any) -> str:
        return "+".join(map(str, cast(tuple[object, ...], value))) or "none"


@dataclass(frozen=True, slots=True)
class AxisOrder(ListKind):
    """Some of the axes, each once, outermost first. Missing axes have one rank and precede the others."""

    axes: tuple[str, ...]
    dtype: str = "uint8"

    def check(self, name: str, value: object) -> tuple[str, ...]:
        names = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
        for axis in names:
            choice(name, axis, self.axes)
        if len(set(names)) < len(names):
            rule = f"each axis may appear once. Use e.g. {name}=tp+dp_shard, or leave it out."
            raise PlanError([Problem.of(name, "+".join(map(str, names)), rule)])
        return cast(tuple[str, ...], names)

    def words(self) -> str:
        return f"{listed(self.axes)}, joined by `+`"

    def schema(self) -> Schema:
        names: Schema = {"type": "array", "items": {"enum": list(self.axes)}, "uniqueItems": True}
        return {"anyOf": [names, {"type": "string"}]}

    def encode(self, value: Any) -> tuple[float, ...]:
        return (orders(self.axes).index((*(axis for axis in self.axes if axis not in value), *value)),)

    def decode(self, *numbers: Any) -> tuple[str, ...]:
        return orders(self.axes)[int(numbers[0])]


@functools.cache
def orders(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return every order of the axes, the default order first."""
    return tuple(itertools.permutations(axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFacts:
    """Context that decides which values are worth searching.

    Attributes:
        layers: number of layers.
        half_formats: which of bf16 and fp16 the device supports.
        flash: attention stores no scores.
    """

    layers: int
    half_formats: tuple[str, ...] = ()
    flash: bool = True


#: The values that a search tries.
Searched = Callable[[SearchFacts], Sequence[Any]]
#: Additional values near a plan's value, with coarse or fine steps.
Nearby = Callable[[Any, SearchFacts, bool], Iterable[Any]]
#: The values that tests try, from the number of ranks and the numbers of microbatches.
Tried = Callable[[int, Sequence[int]], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanField:
    """One field of the plan.

    Attributes:
        kind: reads, checks, prints and encodes its values.
        default: the value of plans that do not set it.
        help: its meaning, for the documentation.
        needs: axes; if none of them is in use, the field has its default.
        searched: the values that the planner enumerates; None: only the default, or the user's value.
        searched_with: the field whose `searched` contains tuples with the values of this field too, or "".
        nearby: additional values for refinement.
        tried: values that tests try.
        divides_work: True if it decides how ranks divide the work, False if it changes how one rank does its part.
        asks: restrictions by the model: "" none, "use": the model may reject any value but the default, "value": it may
            reject single values.
        probed: True if tests try it alone before they combine it with other fields.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    needs: tuple[str, ...]
    searched: Searched | None
    searched_with: str
    nearby: Nearby | None
    tried: Tried
    divides_work: bool
    asks: str
    probed: bool

    @property
    def columns(self) -> tuple[PlanColumn, ...]:
        """The planner's arrays for the field."""
        return self.kind.columns(self.name)

    @property
    def auto_value(self) -> str:
        """The value that leaves the choice to the planner, or ""."""
        return self.kind.open if isinstance(self.kind, OneOf) else ""


def described(
    kind: Kind,
    default: Any,
    help: str,
    *,
    tried: Tried | Sequence[Any],
    needs: tuple[str, ...] = (),
    searched: Searched | Sequence[Any] | None = None,
    searched_with: str = "",
    nearby: Nearby | None = None,
    divides_work: bool = True,
    asks: str = "",
    probed: bool = False,
) -> Any:
    """Declare a field of the plan: `tp: int = described(Integer(), 1, "...")`. `PlanField` explains the arguments."""
    description = PlanField(
        name="", kind=kind, default=default, help=help, needs=needs, nearby=nearby, divides_work=divides_work,
        searched=searched if searched is None or callable(searched) else lambda _: searched, asks=asks,
        searched_with=searched_with, tried=tried if callable(tried) else lambda _, passes: tried, probed=probed,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={"weft": description})


def descriptions(plan: type[Any]) -> Mapping[str, PlanField]:
    """Return the `PlanField` descriptions of a dataclass by field name, in order."""
    declared = dataclasses.fields(plan)
    return MappingProxyType(
        {each.name: dataclasses.replace(each.metadata["weft"], name=each.name) for each in declared}
    )
