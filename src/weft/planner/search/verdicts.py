"""Rules asked of many plans that are alike: a rule reads few fields, and what it said of their values it says again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

from weft.config.plan import MISSING, OpenPlan, Plan
from weft.config.rule import Facts, Rule
from weft.planner.search.plan_rows import PLACES, Row, differing


class _Watched(OpenPlan):
    """A plan that notes which of its fields are read."""

    __slots__ = ("_row",)

    def __init__(self, row: Row):
        super().__init__()
        self._row = row

    def decided(self, name: str) -> Any:
        place = PLACES.get(name)
        return MISSING if place is None else self._row[place]


def _nothing(row: Row) -> object:
    """What is read of a plan before a rule was asked."""
    return ()


class _Known:
    """What one rule said, by the values of the fields that it has read so far."""

    __slots__ = ("fields", "more", "rule", "said", "values")

    def __init__(self, rule: Rule, more: Callable[[], None]):
        """more: called when the rule reads a field that it has not read before."""
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
    """The verdicts of rules on plans, each found once for the values that the rule reads.

    Args:
        rules: that plans are to keep.
        facts: what the rules may look at; it stays the same.
    """

    def __init__(self, rules: Iterable[Rule], facts: Facts):
        self._readers: dict[frozenset[str], list[_Known]] = {}
        self._known = [_Known(rule, self._readers.clear) for rule in rules]
        self._facts = facts

    def near(self, row: Row) -> Callable[[Row], bool]:
        """Return a function that says whether a plan near this one keeps all the rules.

        It asks those rules alone that read what differs: the others say what they say of this plan.

        Args:
            row: of the plan to which others are near.
        """
        broken = [known for known in self._known if known.is_broken(row, self._facts)]

        def allows(other: Row) -> bool:
            changed = differing(row, other)
            if any(changed.isdisjoint(known.fields) for known in broken):
                return False
            return not any(known.is_broken(other, self._facts) for known in self._readers_of(changed))

        return allows

    def _readers_of(self, changed: frozenset[str]) -> list[_Known]:
        """The rules that read any of some fields."""
        found = self._readers.get(changed)
        if found is None:
            found = self._readers[changed] = [known for known in self._known if not changed.isdisjoint(known.fields)]
        return found
