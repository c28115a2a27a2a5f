"""Enumeration of all legal plans with given values of the fields, pruned by the rules.

Fields are decided one after another. A rule that reads decided fields only decides for all plans that agree in them,
so it prunes the branch. A rule that reads an undecided field is checked again when that field is decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from weft.config.plan import AXES, MISSING, OpenPlan, Plan, Undecided, plan_fields
from weft.config.rules.plan_rules import RULES
from weft.config.rules.rule import Facts, Rule, UnknownFact

Choices = Mapping[str, Sequence[object]]
#: A rule without a verdict, and the field that it asked for in vain; "" before it was asked.
_Waiting = tuple[Rule, str]


class _Values(OpenPlan):
    """The plan of the fields decided so far."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, object]):
        super().__init__()
        self._values = values

    def decided(self, name: str) -> Any:
        return self._values.get(name, MISSING)


def legal_plans(choices: Choices, facts: Facts, rules: Sequence[Rule] = RULES) -> Iterator[Plan]:
    """Yield all plans whose fields have one of their `choices`, and that break none of the rules, in a fixed order.

    Args:
        choices: by field; other fields have their default.
        facts: facts that rules may read. The mesh axes are pruned by the number of ranks as they are decided.
        rules: the rules to check.
    """
    usual = Plan()
    columns: list[tuple[str, list[object]]] = []
    for name in plan_fields():
        # Through Plan, so that values are in their normal form, as rules expect them.
        given = choices.get(name, (getattr(usual, name),))
        columns.append((name, [getattr(Plan(**cast(Any, {name: value})), name) for value in given]))
    values: dict[str, object] = {}
    yield from _decide(columns, values, facts, [(rule, "") for rule in rules])


def _decide(
    columns: Sequence[tuple[str, list[object]]], values: dict[str, object], facts: Facts, rules: list[_Waiting]
) -> Iterator[Plan]:
    if not columns:
        yield Plan(**cast(Any, values))
        return
    (name, choices), rest = columns[0], columns[1:]
    for value in choices:
        values[name] = value
        open_rules = _open_rules(values, facts, rules) if _fits(values, facts) else None
        if open_rules is not None:
            yield from _decide(rest, values, facts, open_rules)
    del values[name]


def _open_rules(values: Mapping[str, object], facts: Facts, rules: list[_Waiting]) -> list[_Waiting] | None:
    """Return the rules without a verdict, or None if a rule is broken for all remaining choices."""
    plan = cast(Plan, _Values(values))
    waiting: list[_Waiting] = []
    for rule, field in rules:
        if field and field not in values:
            waiting.append((rule, field))
            continue
        try:
            if rule.predicate(plan, facts):
                return None
        except UnknownFact:
            continue
        except Undecided as unknown:
            waiting.append((rule, str(unknown)))
    return waiting


def _fits(values: Mapping[str, object], facts: Facts) -> bool:
    """Return True if the axes decided so far divide the number of ranks. This prunes earlier than their product."""
    try:
        rest = facts.world_size
    except UnknownFact:
        return True
    for axis in AXES:
        size = cast(int, values.get(axis, 1))
        if rest % size:
            return False
        rest //= size
    return True
