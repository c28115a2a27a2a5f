"""Plans as rows of values, in the order of PLAN_FIELDS, and cached verdicts of plan rules on them.

A search creates thousands of rows; few become a Plan. A rule reads few fields, so its verdict is reused for all rows
with equal values of these fields.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from weft.config.plan import AXES, MISSING, PLAN_FIELDS, OpenPlan, Plan
from weft.config.rules.rule import Facts, Rule
from weft.planner.space.columns import Job

#: The values of all plan fields, in order.
Row = tuple[Any, ...]

#: Index of each field in a row.
PLACES = {name: place for place, name in enumerate(PLAN_FIELDS)}
#: Returns the row of a plan.
row_of: Callable[[Plan], Row] = operator.attrgetter(*PLAN_FIELDS)

_ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
#: Fields that have their default unless one of some axes is in use: (name, axes, default).
_NEEDS = tuple((name, frozenset(known.needs), known.default) for name, known in PLAN_FIELDS.items() if known.needs)


def fitted(before: Mapping[str, Any], change: Mapping[str, Any], job: Job) -> Row:
    """Return the row with a change applied, and with other fields adjusted to it.

    Fields that need axes that are not in use get their default, and so do `virtual_stages`, `reshard` and `order` where
    they have no effect. With dp_shard above 1 and ep=1, `zero` is at least 1. `cp_mode` "auto" is resolved.

    Raises:
        PlanError: for a value that its field does not accept.
    """
    found = {**before, **change}
    unused = {axis for axis in AXES if found[axis] == 1}
    for name, needs, default in _NEEDS:
        if needs <= unused:
            found[name] = default
    if found["schedule"] in _ONE_STAGE:
        found["virtual_stages"] = 1
    if found["dp_shard"] > 1 and found["ep"] == 1:
        found["zero"] = max(1, found["zero"])
    if found["zero"] != 3:
        found["reshard"] = PLAN_FIELDS["reshard"].default
    if found["order"]:
        in_use = tuple(axis for axis in AXES if found[axis] > 1)
        if found["order"] == in_use or set(found["order"]) != set(in_use) or found["ep"] > 1:
            found["order"] = ()
    for name, value in found.items():
        if value is not before[name]:
            found[name] = _normal(name, value)
    found["cp_mode"] = job.cp_mode_of(found["cp_mode"], found["cp"], found["tp"])
    return tuple(found.values())


def _normal(name: str, value: Any) -> Any:
    """Return the normalized value of a field. Tuples are cached by their items' types too: (1, 2) == (True, 2)."""
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        return _normal_once(name, items, *map(type, items))
    return _normal_once(name, value) if isinstance(value, str | int) else PLAN_FIELDS[name].kind.check(name, value)


@functools.lru_cache(maxsize=4096, typed=True)
def _normal_once(name: str, value: Any, *types: type) -> Any:
    return PLAN_FIELDS[name].kind.check(name, value)


def values_by_field(rows: Sequence[Row]) -> dict[str, Sequence[Any]]:
    """Return the values of all rows, field by field."""
    return dict(zip(PLAN_FIELDS, zip(*rows, strict=True), strict=True))


def differing(before: Row, after: Row) -> frozenset[str]:
    """Return the fields in which two rows differ."""
    values = zip(PLAN_FIELDS, before, after, strict=True)
    return frozenset([name for name, one, another in values if one is not another and one != another])


class _Watched(OpenPlan):
    """Plan that records which of its fields are read."""

    __slots__ = ("_row",)

    def __init__(self, row: Row):
        super().__init__()
        self._row = row

    def decided(self, name: str) -> Any:
        place = PLACES.get(name)
        return MISSING if place is None else self._row[place]


class _Known:
    """Verdicts of one rule, by the values of the fields that it has read so far."""

    __slots__ = ("fields", "more", "rule", "said", "values")

    def __init__(self, rule: Rule, more: Callable[[], None]):
        """Create an empty cache. `more` is called when the rule reads a new field."""
        self.rule, self.more = rule, more
        self.fields: tuple[str, ...] = ()
        self.values: Callable[[Row], object] = lambda row: ()  # no field was read so far
        self.said: dict[object, bool] = {}

    def is_broken(self, row: Row, facts: Facts) -> bool:
        if (said := self.said.get(self.values(row))) is not None:
            return said
        watched = _Watched(row)
        broken = self.rule.is_broken(cast(Plan, watched), facts)
        if not watched.reads.issubset(self.fields):  # earlier verdicts do not consider all of these fields
            self.fields = tuple(sorted(watched.reads.union(self.fields)))
            self.values = operator.itemgetter(*(PLACES[name] for name in self.fields))
            self.said.clear()
            self.more()
        self.said[self.values(row)] = broken
        return broken


class Verdicts:
    """Verdicts of rules on plans, evaluated once for each combination of the values that a rule reads."""

    def __init__(self, rules: Iterable[Rule], facts: Facts):
        self._readers: dict[frozenset[str], list[_Known]] = {}
        self._known = [_Known(rule, self._readers.clear) for rule in rules]
        self._facts = facts

    def near(self, row: Row) -> Callable[[Row], bool]:
        """Return a function that checks if a plan near this one satisfies all rules.

        It evaluates only rules that read a differing field. Verdicts of other rules are the same as for this plan.
        """
        broken = [known for known in self._known if known.is_broken(row, self._facts)]

        def allows(other: Row) -> bool:
            changed = differing(row, other)
            if any(changed.isdisjoint(known.fields) for known in broken):
                return False
            readers = self._readers.get(changed)
            if readers is None:
                readers = [known for known in self._known if not changed.isdisjoint(known.fields)]
                self._readers[changed] = readers
            return not any(known.is_broken(other, self._facts) for known in readers)

        return allows
