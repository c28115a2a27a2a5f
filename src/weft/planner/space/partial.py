"""Tables of partial plans, and vectorized evaluation of plan rules on them.

A table has a code for each field and row, and the values of the codes. A rule is evaluated once for each combination of
the fields that it reads, which are recorded while its predicate runs. So every rule, including new ones, can prune a
million plans without a vectorized implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import MISSING, PLAN_FIELDS, OpenPlan, Plan, Undecided
from weft.config.rules.rule import Facts, Rule, UnknownFact

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Verdicts of a rule on a row.
KEPT, BROKEN, OPEN = 0, 1, 2

#: Combinations of fields are renumbered without gaps once there are more than this number.
_MOST_KEYS = 2**18


#: A number for each row that identifies its combination of some fields; and a row for each number, in ascending order.
Keys = tuple[Rows, dict[int, int]]


@dataclass(frozen=True, slots=True)
class PartialPlans:
    """Rows of partial plans. A field of `Plan` that is missing is not assigned yet.

    Attributes:
        codes: code of each row, by field.
        levels: values of the codes, by field.
        keyed: cached results of `_keys` by fields, since many rules read the same fields.
    """

    codes: Mapping[str, NDArray[np.int32]]
    levels: Mapping[str, Sequence[Any]]
    keyed: dict[tuple[str, ...], Keys] = field(default_factory=dict[tuple[str, ...], Keys], repr=False, compare=False)

    def __len__(self) -> int:
        return len(next(iter(self.codes.values())))

    def __getitem__(self, rows: Mask | Rows) -> PartialPlans:
        return PartialPlans({name: codes[rows] for name, codes in self.codes.items()}, self.levels)

    def values(self, field: str, dtype: Any = np.int64) -> NDArray[Any]:
        """Return the values of one field, row by row."""
        return np.asarray(self.levels[field], dtype=dtype)[self.codes[field]]

    def row(self, index: int) -> dict[str, Any]:
        """Return the values of one row by field."""
        return {name: self.levels[name][codes[index]] for name, codes in self.codes.items()}

    def with_values(self, field: str, values: NDArray[Any]) -> PartialPlans:
        """Return the table with another field, from its values."""
        levels, codes = np.unique(values, return_inverse=True)
        return PartialPlans({**self.codes, field: codes.astype(np.int32)}, {**self.levels, field: levels.tolist()})

    @classmethod
    def product(cls, levels: Mapping[str, Sequence[Any]]) -> PartialPlans:
        """Return every combination of the given values."""
        grids = np.meshgrid(*(np.arange(len(values), dtype=np.int32) for values in levels.values()), indexing="ij")
        return cls({name: grid.ravel() for name, grid in zip(levels, grids, strict=True)}, dict(levels))


#: A row of a table.
Place = tuple[PartialPlans, int]


class _Watched(OpenPlan):
    """Plan that reads its fields from a row of tables on access.

    There are many thousands of rows, and a rule reads few of their fields.
    """

    __slots__ = ("_places",)

    def __init__(self, *places: Place):
        super().__init__()
        self._places = places

    def decided(self, name: str) -> Any:
        for table, row in self._places:
            codes = table.codes.get(name)
            if codes is not None:
                return table.levels[name][codes[row]]
        return MISSING


#: Verdicts of a rule, by the values of the fields that it reads.
Said = dict[tuple[Any, ...], int]


@dataclass(frozen=True, slots=True)
class RuleReader:
    """Context for rules, and for each rule the fields that it has read and its verdicts so far.

    A search evaluates each rule on dozens of tables, and a rule nearly always reads the same fields. So rows are
    grouped by these fields, and each combination of values is evaluated once.
    """

    facts: Facts
    reads: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    said: dict[tuple[Any, ...], Said] = field(default_factory=dict[tuple[Any, ...], Said])

    def fields(self, rule: Rule) -> set[str]:
        """Return the fields that a rule has read so far. The returned set is updated when it reads others."""
        return self.reads.setdefault(rule.name, set())

    def verdicts_by(self, rule: Rule, fields: Sequence[str], *tables: PartialPlans) -> Said:
        """Return the dict of a rule's verdicts, by the values of the given fields, for the caller to fill.

        Tables with the same assigned fields share it.
        """
        decided = tuple(tuple(table.codes) for table in tables)
        return self.said.setdefault((rule.name, tuple(fields), *decided), {})


def verdicts(rule: Rule, table: PartialPlans, reader: RuleReader) -> NDArray[np.uint8]:
    """Return KEPT, BROKEN or OPEN for each row. OPEN means that the rule reads a field that is not assigned yet."""
    found, key, _ = _by_key(rule, table, reader)
    return found[key]


def _by_key(rule: Rule, table: PartialPlans, reader: RuleReader) -> tuple[NDArray[np.uint8], Rows, set[int]]:
    """Return the verdict of each combination of fields, each row's combination (a number), and the set of verdicts."""
    known, facts = reader.fields(rule), reader.facts
    while True:
        read = known.intersection(table.codes)
        fields = [name for name in table.codes if name in read]
        key, places = _keys(table, fields)
        said = reader.verdicts_by(rule, fields, table)
        found = np.full(max(places, default=0) + 1, OPEN, dtype=np.uint8)
        for (each, place), values in zip(places.items(), _values(table, fields, places), strict=True):
            verdict = said.get(values)
            if verdict is None:
                plan = _Watched((table, place))
                verdict = _ask(rule, plan, facts)
                if not plan.reads <= read:
                    known |= plan.reads
                    break
                said[values] = verdict
            found[each] = verdict
        else:
            return found, key, set(found[list(places)].tolist())


def _values(table: PartialPlans, fields: Sequence[str], places: Mapping[int, int]) -> list[tuple[Any, ...]]:
    if not fields:
        return [()] * len(places)
    rows = list(places.values())
    codes = {name: table.codes[name][rows].tolist() for name in fields}
    return list(zip(*([table.levels[name][code] for code in codes[name]] for name in fields), strict=True))


def _ask(rule: Rule, plan: _Watched, facts: Facts) -> int:
    try:
        return BROKEN if rule.predicate(plan, facts) else KEPT  # pyright: ignore[reportArgumentType]  # stands in for a Plan
    except Undecided:
        return OPEN
    except UnknownFact:
        return KEPT


def _keys(table: PartialPlans, fields: Sequence[str]) -> Keys:
    """Return a number for each row that identifies its combination of `fields`, and a row for each number.

    Numbers are in ascending order.
    """
    known = table.keyed.get(tuple(fields))
    if known is not None:
        return known
    if not fields:
        return np.zeros(len(table), dtype=np.int64), {0: 0} if len(table) else {}
    key, span = np.zeros(len(table), dtype=np.int64), 1
    for name in fields:
        key, span = key * len(table.levels[name]) + table.codes[name], span * len(table.levels[name])
        if span > _MOST_KEYS:
            levels, key = np.unique(key, return_inverse=True)
            span = len(levels)
    first = np.full(span, -1, dtype=np.int64)
    first[key] = np.arange(len(key))
    numbers = np.flatnonzero(first >= 0)
    found = table.keyed[tuple(fields)] = key, dict(zip(numbers.tolist(), first[numbers].tolist(), strict=True))
    return found


def broken(
    rules: Iterable[Rule], table: PartialPlans, reader: RuleReader
) -> tuple[list[tuple[Rule, Mask]], list[Rule]]:
    """Return a mask of rows for each rule that some row breaks, and the rules that are still undecided.

    Each row is only in the mask of the first rule that it breaks. A rule is undecided if it reads an unassigned field
    of a row that breaks no earlier rule.
    """
    found: list[tuple[Rule, Mask]] = []
    still_open: list[Rule] = []
    alive = np.ones(len(table), dtype=bool)
    for rule in rules if len(table) else ():
        by_key, key, said = _by_key(rule, table, reader)
        if BROKEN in said:
            mask = (by_key == BROKEN)[key] & alive
            if mask.any():
                found.append((rule, mask))
                alive &= ~mask
        if OPEN in said and (not found or (by_key == OPEN)[key][alive].any()):  # in most tables no row is removed yet
            still_open.append(rule)
    return found, still_open


def as_plan(values: Mapping[str, Any]) -> Plan:
    """Return a complete plan from a row, with defaults for fields that are not assigned."""
    return Plan(**{name: value for name, value in values.items() if name in PLAN_FIELDS})


@dataclass(frozen=True, slots=True)
class Crossed:
    """Verdicts of a rule on every row of one table combined with every row of another.

    Attributes:
        left, right: index of each row's verdicts in `grid`.
        grid: verdict of each pair of different field values.
    """

    left: Rows
    right: Rows
    grid: NDArray[np.uint8]

    def rows(self, part: slice) -> Mask:
        """Return a mask [left, right] of pairs that break the rule, for some left rows and all right rows."""
        return self.grid[self.left[part]][:, self.right] == BROKEN


def crossed(rule: Rule, left: PartialPlans, right: PartialPlans, reader: RuleReader) -> Crossed:
    """Compute a rule's verdicts on every pair of rows, once for each combination of the fields that it reads."""
    known, facts = reader.fields(rule), reader.facts
    while True:
        read = set(known)
        of_left, of_right = ([name for name in table.codes if name in read] for table in (left, right))
        (left_key, left_places), (right_key, right_places) = _keys(left, of_left), _keys(right, of_right)
        said = reader.verdicts_by(rule, (*of_left, *of_right), left, right)
        grid = np.full((int(left_key.max()) + 1, int(right_key.max()) + 1), KEPT, dtype=np.uint8)
        rights = list(zip(right_places.items(), _values(right, of_right, right_places), strict=True))
        for (one, place), values in zip(left_places.items(), _values(left, of_left, left_places), strict=True):
            for (other, beside), more in rights:
                verdict = said.get(values + more)
                if verdict is None:
                    plan = _Watched((right, beside), (left, place))
                    said[values + more] = verdict = _ask(rule, plan, facts)
                    known |= plan.reads
                grid[one, other] = verdict
            if not known <= read:
                break
        else:
            return Crossed(left_key, right_key, grid)
