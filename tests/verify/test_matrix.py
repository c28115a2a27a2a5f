"""Selection of plans: complete within its fields, small, and deterministic."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.rules.plan_rules import LASTING
from weft.verify.matrix import LAYOUT_FIELDS, covering, layout_of, legal, pairs, row_of, sample, values_tried

#: Subset of the options of a rank; listing all takes seconds.
FEW = {"recompute": ("none", "full"), "offload": ((), ("optimizer",))}


def test_tried_values_are_values_of_the_fields():
    for name, values in values_tried(4).items():
        assert values
        assert all(getattr(Plan(**{name: value}), name) is not None for value in values)
    assert set(values_tried(2)) == set(PLAN_FIELDS)
    assert set(LAYOUT_FIELDS) < set(PLAN_FIELDS)


def test_newly_legal_plans_are_listed_automatically():
    only = {"order": ((),), "reshard": ("after_forward",)}
    today, some_day = legal(4, **only), legal(4, rules=LASTING, **only)
    assert set(today) < set(some_day)
    assert not any(plan.world_size != 4 for plan in some_day)
    assert {plan.tp for plan in some_day} == {1, 2, 4}
    assert {plan.schedule for plan in some_day if plan.pp > 1} > {"1f1b", "zb_v"}


rows = st.lists(st.fixed_dictionaries({name: st.integers(0, 3) for name in "abcd"}), min_size=1, max_size=60)


@settings(max_examples=40, deadline=None)
@given(rows=rows, seed=st.integers(0, 9))
def test_selection_covers_every_pair(rows, seed):
    groups = [*pairs("abcd"), ("a", "b", "c")]
    chosen = covering(rows, groups, seed)
    assert chosen == covering(rows, groups, seed) == sorted(set(chosen))
    for group in groups:
        seen = {tuple(rows[index][column] for column in group) for index in chosen}
        assert seen == {tuple(row[column] for column in group) for row in rows}


def test_selection_is_small_and_has_every_layout():
    plans = legal(4, **FEW)
    chosen = [plans[index] for index in covering([row_of(plan) for plan in plans])]
    assert {layout_of(plan) for plan in chosen} == {layout_of(plan) for plan in plans}
    assert len(chosen) < len(plans) / 4


def test_sample_depends_on_its_seed_and_keeps_the_order():
    plans = legal(2)
    assert sample(plans, 5, 1) == sample(plans, 5, 1) != sample(plans, 5, 2)
    assert [plan for plan in plans if plan in sample(plans, 5, 1)] == sample(plans, 5, 1)
    assert sample(plans, 10**6) == plans


def test_listing_plans_does_not_import_torch():
    code = "import sys; from weft.verify import legal; legal(2); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
