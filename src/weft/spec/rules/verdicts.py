"""Rules asked of many plans that are alike: a rule reads few fields, and what it said of their values it says again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

from weft.spec.plan import MISSING, PLAN_FIELDS, OpenPlan, Plan
from weft.spec.rules.rule import Facts, Rule


class _Watched(OpenPlan):
    """A plan that notes which of its fields are read."""

    __slots__ = ("_plan",)

    def __init__(self, plan: Plan):
        super().__init__()
        self._plan = plan

    def decided(self, name: str) -> Any:
        return getattr(self._plan, name) if name in PLAN_FIELDS else MISSING


def _nothing(plan: Plan) -> object:
    """What is read of a plan before a rule was asked."""
    return ()


class _Known:
    """What one rule said, by the values of the fields that it has read so far."""

    __slots__ = ("fields", "rule", "said", "values")

    def __init__(self, rule: Rule):
        self.rule = rule
        self.fields: tuple[str, ...] = ()
        self.values: Callable[[Plan], object] = _nothing
        self.said: dict[object, bool] = {}

    def is_broken(self, plan: Plan, facts: Facts) -> bool:
        said = self.said.get(self.values(plan))
        return self._ask(plan, facts) if said is None else said

    def _ask(self, plan: Plan, facts: Facts) -> bool:
        watched = _Watched(plan)
        broken = self.rule.is_broken(cast(Plan, watched), facts)
        if not watched.reads.issubset(self.fields):  # what was said before goes by too few fields
            self.fields = tuple(sorted(watched.reads.union(self.fields)))
            self.values = operator.attrgetter(*self.fields)
            self.said.clear()
        self.said[self.values(plan)] = broken
        return broken


class Verdicts:
    """The verdicts of rules on plans, each found once for the values that the rule reads.

    Args:
        rules: that plans are to keep.
        facts: what the rules may look at; it stays the same.
    """

    def __init__(self, rules: Iterable[Rule], facts: Facts):
        self._known = [_Known(rule) for rule in rules]
        self._facts = facts

    def allow(self, plan: Plan) -> bool:
        """Return whether a plan keeps all the rules."""
        facts = self._facts
        return not any(known.is_broken(plan, facts) for known in self._known)
