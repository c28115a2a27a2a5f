"""Branching enumeration of legal plans equals checking every combination."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.legal_plans import legal_plans
from weft.config.plan import AXES, RESHARDS, SCHEDULES, Plan
from weft.config.rules.plan_rules import LASTING, RULES, check
from weft.config.rules.rule import Facts
from weft.config.shapes.model_spec import decoder_spec

VALUES = {
    **dict.fromkeys((*AXES, "ep"), (1, 2)),
    "zero": (0, 1, 2, 3),
    "reshard": RESHARDS,
    "sp": (False, True),
    "schedule": SCHEDULES[:3],
    "virtual_stages": (1, 2),
    "microbatches": (1, 3),
    "accumulation": (1, 3),
    "recompute": ("none", "full"),
    "offload": ((), ("optimizer",), ("params",), ("activations",)),
    "compile": (False, True),
}
FACTS = (
    Facts(),
    Facts(world_size=2),
    Facts(world_size=4, global_batch=6, seq_len=33, model=decoder_spec("tiny")),
    Facts(world_size=1, global_batch=5),
)


def checked_one_by_one(choices, facts, rules):
    every = itertools.product(*choices.values())
    plans = [Plan(**dict(zip(choices, values, strict=True))) for values in every]
    return {plan for plan in plans if not check(plan, facts, rules)}


@settings(max_examples=25, deadline=None)
@given(names=st.sets(st.sampled_from(sorted(VALUES)), max_size=7), facts=st.sampled_from(FACTS), built=st.booleans())
def test_legal_plans_equal_checking_each_combination(names, facts, built):
    rules = RULES if built else LASTING
    choices = {name: VALUES[name] for name in names}
    found = list(legal_plans(choices, facts, rules))
    assert len(found) == len(set(found))
    assert set(found) == checked_one_by_one(choices, facts, rules)


def test_values_are_normalized():
    [plan] = legal_plans({"offload": (("activations", "optimizer"),)}, Facts())
    assert plan.offload == ("optimizer", "activations")


def test_rule_on_undecided_fields_is_checked_later():
    plans = list(legal_plans({"dp_shard": (2,), "zero": (0, 1)}, Facts(), LASTING))
    assert [plan.zero for plan in plans] == [1]


@pytest.mark.parametrize("num_ranks", [6, 8])
def test_axes_are_pruned_by_the_number_of_ranks(num_ranks):
    choices = dict.fromkeys(AXES, range(1, num_ranks + 1))
    plans = list(legal_plans({**choices, "zero": (0, 1)}, Facts(world_size=num_ranks), LASTING))
    assert plans
    assert all(plan.world_size == num_ranks for plan in plans)
