"""Enumerate all plans that satisfy the rules.

Fields are assigned one at a time. A rule that reads only assigned fields applies to all remaining plans, so a broken
rule prunes them. A rule that reads an unassigned field is checked again when that field is assigned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from weft.config.plan import AXES, MISSING, OpenPlan, Plan, Undecided, plan_fields
from weft.config.rules.plan_rules import RULES
from weft.config.rules.rule import Facts, Rule, UnknownFact

Choices = Mapping[str, Sequence[object]]
#: A rule that is not decided yet, and the unassigned field that it reads; "" before its first check.
_Waiting = tuple[Rule, str]


class _Values(OpenPlan):
    """The plan with the fields that are assigned so far."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, object]):
        super().__init__()
        self._values = values

    def decided(self, name: str) -> Any:
        return self._values.get(name, MISSING)


def legal_plans(choices: Choices, facts: Facts, rules: Sequence[Rule] = RULES) -> Iterator[Plan]:
    """Yield all plans whose fields have one of their `choices` and that break none of the rules, in a fixed order.

    Args:
        choices: allowed values by field; other fields have their default.
        facts: context that rules may read. Mesh axes are also pruned by the number of ranks as they are assigned.
        rules: the rules to check.
    """
    usual = Plan()
    columns: list[tuple[str, list[object]]] = []
    for name in plan_fields():
        # Construct a Plan, so that values are in the normal form that rules expect.
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
    """Return the rules that are not decided yet, or None if a rule is broken for all remaining choices."""
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
    """Return True if the assigned axes divide the number of ranks. This prunes before all axes are assigned."""
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
