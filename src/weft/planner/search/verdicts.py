"""Cached plan rules for many similar plans: a rule reads few fields, and its verdict is reused for equal values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

from weft.config.plan import MISSING, OpenPlan, Plan
from weft.config.rules.rule import Facts, Rule
from weft.planner.search.plan_rows import PLACES, Row, differing


class _Watched(OpenPlan):
    """Plan that records which of its fields are read."""

    __slots__ = ("_row",)

    def __init__(self, row: Row):
        super().__init__()
        self._row = row

    def decided(self, name: str) -> Any:
        place = PLACES.get(name)
        return MISSING if place is None else self._row[place]


def _nothing(row: Row) -> object:
    """Return the key of a rule that has not read any field."""
    return ()


class _Known:
    """Verdicts of one rule, by the values of the fields that it has read so far."""

    __slots__ = ("fields", "more", "rule", "said", "values")

    def __init__(self, rule: Rule, more: Callable[[], None]):
        """Create an empty cache. `more` is called when the rule reads a new field."""
        self.rule, self.more = rule, more
        self.fields: tuple[str, ...] = ()
        self.values: Callable[[Row], object] = _nothing
        self.said: dict[object, bool] = {}

    def is_broken(self, row: Row, facts: Facts) -> bool:
        said = self.said.get(self.values(row))
        return self._ask(row, facts) if said is None else said

    def _ask(self, row: Row, facts: Facts) -> bool:
        watched = _Watched(row)
        broken = self.rule.is_broken(cast(Plan, watched), facts)
        if not watched.reads.issubset(self.fields):  # what was said before goes by too few fields
            self.fields = tuple(sorted(watched.reads.union(self.fields)))
            self.values = operator.itemgetter(*(PLACES[name] for name in self.fields))
            self.said.clear()
            self.more()
        self.said[self.values(row)] = broken
        return broken


class Verdicts:
    """Verdicts of rules on plans, evaluated once for the values that each rule reads.

    Args:
        rules: rules for plans.
        facts: constant facts for the rules.
    """

    def __init__(self, rules: Iterable[Rule], facts: Facts):
        self._readers: dict[frozenset[str], list[_Known]] = {}
        self._known = [_Known(rule, self._readers.clear) for rule in rules]
        self._facts = facts

    def near(self, row: Row) -> Callable[[Row], bool]:
        """Return a function that checks if a plan near this one satisfies all rules.

        It evaluates only rules that read a differing field. The verdicts of the others are the same as for this plan.

        Args:
            row: the plan that others are near to.
        """
        broken = [known for known in self._known if known.is_broken(row, self._facts)]

        def allows(other: Row) -> bool:
            changed = differing(row, other)
            if any(changed.isdisjoint(known.fields) for known in broken):
                return False
            return not any(known.is_broken(other, self._facts) for known in self._readers_of(changed))

        return allows

    def _readers_of(self, changed: frozenset[str]) -> list[_Known]:
        """Return the rules that read any of some fields."""
        found = self._readers.get(changed)
        if found is None:
            found = self._readers[changed] = [known for known in self._known if not changed.isdisjoint(known.fields)]
        return found
