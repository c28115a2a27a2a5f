"""Rules asked of many plans that are alike: a rule reads few fields, and what it said of their values it says again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

from weft.spec.plan import MISSING, PLAN_FIELDS, OpenPlan, Plan
from weft.spec.rules import Facts, Rule


class _Watched(OpenPlan):
    """A plan that notes which of its fields are read."""

    __slots__ = ("_plan",)

    def __init__(self, plan: Plan):
        super().__init__()
        self._plan = plan

    def decided(self, name: str) -> Any:
        return getattr(self._plan, name) if name in PLAN_FIELDS else MISSING


_all_values = operator.attrgetter(*PLAN_FIELDS)


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

    def near(self, plan: Plan) -> Callable[[Plan], bool]:
        """Return a function that says whether a plan near this one keeps all the rules.

        It asks those rules alone that read what differs: the others say what they say of this plan.

        Args:
            plan: to which others are near.
        """
        broken = [known for known in self._known if known.is_broken(plan, self._facts)]
        before = _all_values(plan)

        def allows(other: Plan) -> bool:
            values = zip(PLAN_FIELDS, before, _all_values(other), strict=True)
            changed = {name for name, one, another in values if one is not another and one != another}
            if any(changed.isdisjoint(known.fields) for known in broken):
                return False
            asked = (known for known in self._known if not changed.isdisjoint(known.fields))
            return not any(known.is_broken(other, self._facts) for known in asked)

        return allows
