"""Plans as rows of values, in the order of PLAN_FIELDS: a search makes and judges thousands, and few become a Plan."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from weft.config.plan import AXES, PLAN_FIELDS, Plan
from weft.planner.space.columns import Job

#: The values of a plan's fields.
Row = tuple[Any, ...]

#: The place of each field in a row.
PLACES = {name: place for place, name in enumerate(PLAN_FIELDS)}
#: The row of a plan.
row_of: Callable[[Plan], Row] = operator.attrgetter(*PLAN_FIELDS)

_ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
#: Fields that need axes, with those.
_NEEDS = tuple((name, frozenset(known.needs), known.default) for name, known in PLAN_FIELDS.items() if known.needs)


def plan_of(row: Row) -> Plan:
    """The plan of a row, whose values are in their normal form."""
    return Plan.of_normal(row)


def fitted(before: Mapping[str, Any], change: Mapping[str, Any], job: Job) -> Row:
    """The row with the change; what belongs to an axis that is not in use goes back to its default.

    before: values by field, all of them in order. Raises PlanError for a value that its field does not take.
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
    """A value of a field in its normal form. Of lists the types count too: (1, 2) and (True, 2) are equal."""
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        return _normal_once(name, items, *map(type, items))
    return _normal_once(name, value) if isinstance(value, str | int) else PLAN_FIELDS[name].kind.check(name, value)


@functools.lru_cache(maxsize=4096, typed=True)
def _normal_once(name: str, value: Any, *types: type) -> Any:
    return PLAN_FIELDS[name].kind.check(name, value)


def values_by_field(rows: Sequence[Row]) -> dict[str, Sequence[Any]]:
    """The values of all rows, field by field."""
    return dict(zip(PLAN_FIELDS, zip(*rows, strict=True), strict=True))


def differing(before: Row, after: Row) -> frozenset[str]:
    """The fields in which two rows differ."""
    values = zip(PLAN_FIELDS, before, after, strict=True)
    return frozenset([name for name, one, another in values if one is not another and one != another])
