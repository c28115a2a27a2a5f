"""Selection of plans adapts to what a model rejects."""

from __future__ import annotations

from weft.config.plan import Plan
from weft.verify.matrix import layout_of, legal
from weft.verify.subject import Sweep, techniques_of


def run(sweep: Sweep, refuses: set[str]) -> tuple[list[Plan], list[Plan]]:
    """Return (passed, rejected) plans for a model that rejects every plan with one of these techniques."""
    passed, refused = [], []
    for plan in sweep.plans():
        if techniques_of(plan) & refuses:
            sweep.refuse(plan, "no place for it")
            refused.append(plan)
        else:
            passed.append(plan)
    return passed, refused


def test_techniques_of_a_plan():
    plan = Plan.parse("dp_replicate=2 tp=2 sp=on cp=2 cp_mode=ring zero=0 accumulation=4 precision=bf16 recompute=full")
    assert techniques_of(plan) == {"tp", "sp", "cp", "cp_mode=ring", "accumulation=4", "recompute=full"}
    assert techniques_of(Plan.parse("dp_replicate=2")) == frozenset()


def test_few_plans_are_spent_on_rejections_and_all_other_layouts_are_tried():
    every = legal(4, passes=(1, 2), precision=("fp32",))
    passed, refused = run(Sweep(every), {"tp", "cp", "pp"})
    assert {"tp"} in [techniques_of(plan) for plan in refused]
    assert len(refused) <= 12
    left = {layout_of(plan) for plan in every if not techniques_of(plan) & {"tp", "cp", "pp"}}
    assert {layout_of(plan) for plan in passed} == left
    assert len(set(passed)) == len(passed)


def test_without_rejections_every_layout_is_tried_at_least_once():
    every = legal(2, passes=(1, 2), precision=("fp32",))
    passed, refused = run(Sweep(every), set())
    assert not refused
    assert {layout_of(plan) for plan in passed} == {layout_of(plan) for plan in every}
    assert len(passed) < len(every) / 3


def test_rejected_samples_are_replaced():
    every = legal(2, passes=(1, 2), precision=("fp32",))
    for seed in range(3):
        refuses = {"tp", "cp", "pp", "recompute=full"}
        passed, refused = run(Sweep(every, limit=6, seed=seed), refuses)
        assert len([plan for plan in passed if techniques_of(plan) > {"zero=2"} or len(techniques_of(plan)) > 1]) <= 6
        assert 6 <= len(passed) <= 6 + len(refused) + 5


def test_sweep_ends_if_the_model_rejects_everything():
    every = [plan for plan in legal(2, passes=(1,), precision=("fp32",)) if techniques_of(plan)]
    sweep = Sweep(every)
    for tried, plan in enumerate(sweep.plans(), start=1):
        sweep.refuse(plan, "no place for it")
        assert tried < 30
    assert not sweep.allowed()


def test_parts_add_up_to_the_full_selection():
    every = legal(2, passes=(1, 2), precision=("fp32",))
    seen: list[set[Plan]] = []
    for number in (1, 2, 3):
        sweep, tried = Sweep(every), set[Plan]()
        for plan in sweep.part(number, 3):
            if techniques_of(plan) & {"cp"}:
                sweep.refuse(plan, "no place for it")
            tried.add(plan)
        seen.append(tried)
    probed = set.intersection(*seen)
    assert all(one & other == probed for one in seen for other in seen if one is not other)
    whole = {layout_of(plan) for plan in every if "cp" not in techniques_of(plan)}
    assert {layout_of(plan) for plan in set.union(*seen) if "cp" not in techniques_of(plan)} == whole


def test_model_without_microbatches_keeps_all_other_techniques():
    """Like a model whose batch norms span all samples of a step: other techniques of such a plan are not at fault."""
    every = legal(2, passes=(1, 2), precision=("fp32",))
    sweep = Sweep(every)
    passed, refused = [], 0
    for plan in sweep.plans():
        if plan.accumulation > 1:
            sweep.refuse(plan, "no place for it")
            refused += 1
        else:
            passed.append(plan)
    assert refused == 1
    assert sweep.reasons() == {"accumulation=2": "no place for it"}
    assert {layout_of(plan) for plan in passed} == {layout_of(plan) for plan in every if plan.accumulation == 1}
