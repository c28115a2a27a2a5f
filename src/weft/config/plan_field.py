"""Description of a plan field: its values, its meaning, and its use in the planner and in tests.

`plan.py` declares each field with its description. Parsing, printing, checks, documentation, the planner's arrays,
search space and moves, and the plans that tests try all read this description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from weft.config.plan_values import Integer, Kind, OneOf, PlanColumn

_KEY = "weft"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFacts:
    """Facts that decide which values are searched.

    layers: number of layers. half_formats: which of bf16 and fp16 the device computes in. flash: attention stores no
    scores.
    """

    layers: int
    half_formats: tuple[str, ...] = ()
    flash: bool = True


#: The values that a search tries.
Searched = Callable[[SearchFacts], Sequence[Any]]
#: Further values near a plan, in round steps or in fine ones.
Nearby = Callable[[Any, SearchFacts, bool], Iterable[Any]]
#: The values that tests try, of a number of ranks and of numbers of passes.
Tried = Callable[[int, Sequence[int]], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanField:
    """One field of the plan.

    kind: reads, checks, prints and encodes its values. default: the value of plans that do not set it.
    help: its meaning, for the documentation.
    needs: axes; if none of them is in use the field has its default.
    searched: the values that the planner enumerates; None: the default, or the user's value. If it decides several
    fields together it has tuples, and these fields name it in `searched_with`.
    nearby: additional values for refinement. tried: values that tests try. divides_work: True if it decides how ranks
    divide the work, and not how one rank does its part.
    asks: restrictions by the model: "" none, "use" it may reject any value but the default, "value" it may reject
    single values.
    probed: True if tests try it alone before they combine it.
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
        """The planner's arrays for it."""
        return self.kind.columns(self.name)

    @property
    def is_axis(self) -> bool:
        """Whether it is the size of a mesh axis, which may be `*`."""
        return isinstance(self.kind, Integer) and self.kind.star

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
    """Declare a field of the plan: `tp: int = described(Integer(), 1, "...", tried=divisors)`; see `PlanField`."""
    values = searched if searched is None or callable(searched) else _always(searched)
    description = PlanField(
        name="", kind=kind, default=default, help=help, needs=needs, searched=values, searched_with=searched_with,
        nearby=nearby, tried=tried if callable(tried) else _always(tried), divides_work=divides_work, asks=asks,
        probed=probed,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={_KEY: description})


def _always(values: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    return lambda *_: values


def descriptions(plan: type[Any]) -> Mapping[str, PlanField]:
    """The described fields of a dataclass by name, in their order."""
    declared = dataclasses.fields(plan)
    found = {each.name: dataclasses.replace(each.metadata[_KEY], name=each.name) for each in declared}
    return MappingProxyType(found)
