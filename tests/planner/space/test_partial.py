"""Rules evaluated on tables match the rules on each plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spec.plans import plans
from weft.config.cluster import device
from weft.config.plan import Plan, plan_fields
from weft.config.rules.plan_rules import RULES
from weft.config.rules.rule import Facts, Rule, UnknownFact
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.space.partial import BROKEN, KEPT, OPEN, PartialPlans, RuleReader, broken, crossed, verdicts

FACTS = Facts(
    model=decoder_spec("tiny"), world_size=8, global_batch=24, seq_len=256, device=device("v100"), open_axis=None
)


def table_of(some: list[Plan]) -> PartialPlans:
    values = {name: [getattr(plan, name) for plan in some] for name in plan_fields()}
    levels = {name: list(dict.fromkeys(each)) for name, each in values.items()}
    codes = {name: np.array([levels[name].index(value) for value in each]) for name, each in values.items()}
    return PartialPlans(codes, levels)


def is_broken(rule: Rule, plan: Plan, facts: Facts) -> bool:
    try:
        return rule.predicate(plan, facts)
    except UnknownFact:
        return False


def crossed_rows(left: PartialPlans, right: PartialPlans) -> PartialPlans:
    """Return every row of one table with every row of another."""
    rows = {name: np.repeat(codes, len(right)) for name, codes in left.codes.items()}
    rows |= {name: np.tile(codes, len(left)) for name, codes in right.codes.items()}
    return PartialPlans(rows, {**left.levels, **right.levels})


@settings(deadline=None, max_examples=60)
@given(st.lists(plans, min_size=1, max_size=12), st.sampled_from([FACTS, Facts(), Facts(world_size=4)]))
def test_every_rule_on_a_table_matches_each_plan(some, facts):
    table = table_of(some)
    for rule in RULES:
        found = verdicts(rule, table, RuleReader(facts))
        assert [code == BROKEN for code in found] == [is_broken(rule, plan, facts) for plan in some], rule.name
        assert OPEN not in found


@settings(deadline=None, max_examples=30)
@given(st.lists(plans, min_size=1, max_size=6), st.lists(plans, min_size=1, max_size=6))
def test_every_rule_on_crossed_tables_matches_each_pair(some, others):
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "microbatches", "accumulation", "schedule")
    left, right = table_of(some), table_of(others)
    left = PartialPlans({name: left.codes[name] for name in axes}, left.levels)
    rest = [name for name in plan_fields() if name not in axes]
    right = PartialPlans({name: right.codes[name] for name in rest}, right.levels)
    for rule in RULES:
        found = crossed(rule, left, right, RuleReader(FACTS)).rows(slice(0, len(some)))
        for row, one in enumerate(some):
            for column, other in enumerate(others):
                plan = one.replace(**{name: getattr(other, name) for name in rest})
                assert found[row, column] == is_broken(rule, plan, FACTS), rule.name


def test_rule_stays_open_until_all_its_fields_are_set():
    rule = next(rule for rule in RULES if rule.name == "zero-needs-shard")
    table = PartialPlans.product({"zero": [0, 3]})
    assert verdicts(rule, table, RuleReader(FACTS)).tolist() == [KEPT, OPEN]
    found, still_open = broken([rule], table, RuleReader(FACTS))
    assert found == []
    assert still_open == [rule]


def test_plan_that_breaks_several_rules_is_counted_once():
    table = table_of([Plan(tp=3, sp=True, dp_shard=2), Plan(dp_replicate=8)])
    found, _ = broken(RULES, table, RuleReader(FACTS))
    masks = np.array([mask for _, mask in found])
    assert masks.sum(axis=0).tolist() == [1, 0]


def test_values_and_crosses_keep_the_rows():
    left = PartialPlans.product({"tp": [1, 2]}).with_values("cp", np.array([5, 3]))
    both = crossed_rows(left, PartialPlans.product({"zero": [0, 1, 2]}))
    assert len(both) == 6
    assert both.row(4) == {"tp": 2, "cp": 3, "zero": 1}
    assert both.values("cp").tolist() == [5, 5, 5, 3, 3, 3]


@pytest.mark.parametrize("rows", [1, 50_000])
def test_rule_is_evaluated_once_per_combination_of_its_fields(rows):
    asked = []
    rule = Rule(
        name="counts",
        field="tp",
        reason="",
        predicate=lambda plan, facts: bool(asked.append(plan.tp)) or plan.tp == 2,
        finding=lambda plan, facts: "",
        remedy=lambda plan, facts: "",
    )
    table = PartialPlans.product({"tp": [1, 2], "cp": list(range(1, rows + 1))})
    assert (verdicts(rule, table, RuleReader(FACTS)) == BROKEN).sum() == rows
    assert len(asked) <= 3
