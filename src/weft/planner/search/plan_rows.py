"""Plans as rows of values, in the order of PLAN_FIELDS. A search creates thousands; few become a Plan."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from weft.config.plan import AXES, PLAN_FIELDS, Plan
from weft.planner.space.columns import Job

#: The values of a plan's fields.
Row = tuple[Any, ...]

#: Index of each field in a row.
PLACES = {name: place for place, name in enumerate(PLAN_FIELDS)}
#: Return the row of a plan.
row_of: Callable[[Plan], Row] = operator.attrgetter(*PLAN_FIELDS)

_ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
#: Fields that need axes: (name, axes, default).
_NEEDS = tuple((name, frozenset(known.needs), known.default) for name, known in PLAN_FIELDS.items() if known.needs)


def plan_of(row: Row) -> Plan:
    """Return the plan of a row with normalized values."""
    return Plan.of_normal(row)


def fitted(before: Mapping[str, Any], change: Mapping[str, Any], job: Job) -> Row:
    """Return the row with the change. Fields of axes that are not in use get their default.

    Args:
        before: values of all fields, in order.
        change: changed values.
        job: model, sequence and batch.

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
    """Return the normalized value of a field. For tuples the element types matter: (1, 2) and (True, 2) are equal."""
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
