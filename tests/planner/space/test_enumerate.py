"""The enumeration has every legal plan of the space, no illegal one, and a reason for each rejected plan."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.config.plan import RECOMPUTES, RESHARDS, SCHEDULES, Plan
from weft.config.rules.plan_rules import LASTING, RULES, check
from weft.planner.search.question import Question
from weft.planner.space.columns import CP_MODES, PRECISIONS, Columns
from weft.planner.space.enumerate import Space, Tally, enumerate_space

WORLDS = (1, 6, 8, 12)
CLUSTERS = {12: "2x6xh100"}


@cache
def enumerated(world: int, built_only: bool = False, fixed: str = "") -> tuple[Question, Space, Columns, Tally]:
    cluster = CLUSTERS.get(world, f"{world}xh100")
    question = Question.of("small", cluster, seq_len=1024, global_batch=48, built_only=built_only, fixed=fixed)
    space = Space.full(question.job, question.cluster, question.fixed)
    tally = Tally(question.facts)
    blocks = enumerate_space(space, question.job, question.cluster, question.rules, tally)
    parts = [part for block in blocks for part in block.chunks(2**16, tally, question.job)]
    return question, space, Columns.concatenate(parts), tally


def row_of(columns: Columns, plan: Plan) -> np.ndarray:
    """Return the rows that are this plan."""
    wanted = {
        **{name: getattr(plan, name) for name in (*plan.axis_sizes(), "ep", "zero", "sp", "compile", "virtual_stages")},
        "num_micro": plan.microbatches_per_step,
        "schedule": SCHEDULES.index(plan.schedule),
        "recompute": RECOMPUTES.index(plan.recompute),
        "reshard": RESHARDS.index(plan.reshard),
        "precision": PRECISIONS.index(plan.precision),
        "cp_mode": CP_MODES.index(plan.cp_mode) if plan.cp > 1 else 0,
        **{f"offload_{name}": plan.offload_share(name) for name in ("optimizer", "params", "activations")},
    }
    alike = np.ones(len(columns), dtype=bool)
    for name, value in wanted.items():
        alike &= getattr(columns, name) == value
    return np.flatnonzero(alike)


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def plans_of_the_space(draw) -> tuple[int, Plan]:
    """Draw any plan for one of the world sizes without the enumeration; most are legal."""
    world = rest = draw(st.sampled_from(WORLDS))
    sizes = {}
    for axis in ("pp", "tp", "cp", "dp_shard"):
        sizes[axis] = draw(st.sampled_from(divisors(rest)))
        rest //= sizes[axis]
    passes = draw(st.sampled_from(divisors(48)))
    _, space, _, _ = enumerated(world)
    schedule, stages = draw(st.sampled_from(space.choices["schedule"])) if sizes["pp"] > 1 else ("1f1b", 1)
    whole = ((0, "after_forward"), *(space.choices["zero"] if sizes["cp"] > 1 else ()))
    shardings = space.choices["zero"] if sizes["dp_shard"] > 1 else whole
    zero, reshard = draw(st.sampled_from(shardings))
    return world, Plan(
        **sizes,
        dp_replicate=rest,
        zero=zero,
        reshard=reshard,
        sp=draw(st.booleans()) and sizes["tp"] > 1,
        schedule=schedule,
        virtual_stages=stages,
        microbatches=passes if sizes["pp"] > 1 else 1,
        accumulation=1 if sizes["pp"] > 1 else passes,
        precision=draw(st.sampled_from(space.choices["precision"])),
        recompute=draw(st.sampled_from(space.choices["recompute"])),
        offload=draw(st.sampled_from(space.choices["offload"])),
        compile=draw(st.booleans()),
        cp_mode=draw(st.sampled_from(space.choices["cp_mode"])) if sizes["cp"] > 1 else "auto",
    )


@settings(deadline=None, max_examples=150)
@given(plans_of_the_space())
def test_random_legal_plans_are_listed_once_and_illegal_ones_never(drawn):
    world, plan = drawn
    question, _, columns, _ = enumerated(world)
    assume(question.job.global_batch // max(1, plan.dp_size * plan.microbatches_per_step) <= 2**18 // 1024)
    assert len(row_of(columns, plan)) == (0 if check(plan, question.facts, LASTING) else 1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("built_only", [True, False])
def test_listed_plans_satisfy_the_rules(world, built_only):
    question, _, columns, _ = enumerated(world, built_only)
    rules = RULES if built_only else LASTING
    for row in np.random.default_rng(0).integers(0, len(columns), 400):
        plan = columns.plan(int(row))
        assert not check(plan, question.facts, rules), plan
        assert plan.world_size == world
        assert columns.microbatch[row] * plan.dp_size * plan.microbatches_per_step == 48


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("built_only", [True, False])
def test_every_plan_is_either_listed_or_has_a_reason(world, built_only):
    question, space, columns, tally = enumerated(world, built_only)
    without_rules = enumerate_space(space, question.job, question.cluster, [], Tally(question.facts))
    refused = sum(each.count for each in tally.refused.values())
    assert sum(block.num_rows for block in without_rules) == len(columns) + refused


@pytest.mark.parametrize("world", WORLDS)
def test_every_reason_has_an_example_that_breaks_the_rule(world):
    question, _, _, tally = enumerated(world, built_only=True)
    for refused in tally.refused.values():
        rule = next(rule for rule in RULES if rule.name == refused.name)
        violation = rule.check(refused.example, question.facts)
        assert violation is not None
        assert refused.message == violation.message


def test_fixed_fields_are_unchanged():
    _, _, columns, _ = enumerated(12, fixed="tp=2 zero=3 recompute=50% offload=optimizer:0.5 precision=fp32")
    assert set(columns.tp) == {2}
    assert set(columns.zero) == {3}
    assert set(columns.activation_budget) == {0.5}
    assert set(columns.offload_optimizer) == {0.5}


def test_narrower_space_is_a_subset():
    question, space, columns, _ = enumerated(12)
    rows = len(columns)
    while (smaller := space.narrower()) is not None:
        blocks = enumerate_space(smaller, question.job, question.cluster, question.rules, Tally(question.facts))
        tally = Tally(question.facts)
        parts = [part for block in blocks for part in block.chunks(2**16, tally, question.job)]
        assert 0 < sum(map(len, parts)) <= rows
        rows = sum(map(len, parts))
        one = parts[0].plan(0)
        assert len(row_of(columns, one)) == 1
        space = smaller
    assert len(space.left_out) == len(set(space.left_out)) > 5


def test_expert_parallel_sizes_divide_the_experts():
    from weft.planner.space.shape import Shape

    shape = Shape(vocab=32_000, hidden=1024, layers=8, heads=16, kv_heads=4, head_dim=64, ffn=0, num_experts=6, top_k=2,
                  expert_ffn=2048)  # fmt: skip
    question = Question.of(shape, "2x6xh100", seq_len=1024, global_batch=48, built_only=False)
    tally = Tally(question.facts)
    space = Space.full(question.job, question.cluster)
    blocks = enumerate_space(space, question.job, question.cluster, question.rules, tally)
    sizes = {int(size) for block in blocks for size in block.meshes.values("ep")}
    assert sizes == {1, 2, 3, 6}
