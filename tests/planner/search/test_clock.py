"""Simulated pipelines: agreement with closed forms, uneven layers, memory per rank."""

from __future__ import annotations

import pytest

from weft.planner.report.verdict import read_plan
from weft.planner.search.pipeline_clock import best_split, clocked, memory_by_rank, passes, stage_layers, timed_schedule
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated

QUESTION = Question.of("llama3-70b", "8x8xh100", seq_len=8192, global_batch=512, built_only=False)
PLANS = [
    "pp=4 tp=8 dp_shard=2 sp=on zero=1 microbatches=64 precision=bf16 recompute=full",
    "pp=8 tp=8 sp=on microbatches=64 precision=bf16 recompute=full",
    "pp=8 tp=8 sp=on schedule=zb_h1 microbatches=64 precision=bf16 recompute=selective",
    "pp=4 tp=8 dp_shard=2 sp=on zero=1 schedule=interleaved virtual_stages=5 microbatches=64 precision=bf16",
    "pp=4 tp=8 dp_shard=2 sp=on zero=1 schedule=zb_v virtual_stages=2 microbatches=64 precision=bf16",
]


def candidate(text):
    return estimated([read_plan(text, QUESTION)], QUESTION)[0]


@pytest.mark.parametrize("text", PLANS)
def test_simulation_agrees_with_the_closed_form(text):
    one = candidate(text)
    found = clocked(one)
    assert found.clocked
    assert found.step_s == pytest.approx(one.step_s, rel=0.03)
    assert sum(found.terms.values()) == pytest.approx(found.step_s)
    assert sum(found.memory.values()) == pytest.approx(found.total_bytes)
    assert clocked(found) is found


def test_plan_without_pipeline_is_unchanged():
    one = candidate("dp_shard=64 zero=3 precision=bf16")
    assert clocked(one) is one
    assert memory_by_rank(one) == [dict(one.memory)]


def test_bad_split_is_slower_and_uses_the_plans_layers():
    text = "pp=4 tp=8 dp_shard=2 sp=on zero=1 microbatches=64 precision=bf16"
    bad = candidate(f"{text} split=8+24+24+24")
    assert stage_layers(bad) == [8, 24, 24, 24]
    assert clocked(bad).plan.split == (8, 24, 24, 24)
    assert clocked(bad).step_s > clocked(candidate(text)).step_s * 1.1


def test_early_ranks_use_more_memory_and_all_ranks_are_listed():
    ranks = memory_by_rank(candidate("pp=8 tp=8 sp=on microbatches=64 precision=bf16"))
    activations = [each["activations"] for each in ranks]
    assert len(ranks) == 8
    assert activations == sorted(activations, reverse=True)
    assert ranks[-1]["logits"] > 0
    assert ranks[0]["logits"] == 0


def test_plotted_schedule_is_that_of_the_plan():
    schedule, seconds = timed_schedule(candidate(PLANS[3]))
    assert (schedule.name, schedule.num_ranks, schedule.virtual_stages) == ("interleaved", 4, 5)
    assert len(seconds.forward_s) == 20


def test_best_split_has_all_layers():
    one = candidate(PLANS[1])
    assert sum(best_split(one, passes(one))) == 80


def test_recompute_and_offload_by_rank_change_only_their_ranks():
    mesh = "pp=4 microbatches=16 tp=8 sp=on precision=bf16"
    mixed = memory_by_rank(candidate(f"{mesh} recompute=full+none+none+full offload=optimizer:0/1/0/0"))
    full, none = (memory_by_rank(candidate(f"{mesh} recompute={policy}")) for policy in ("full", "none"))
    for rank, like in enumerate((full, none, none, full)):
        assert mixed[rank]["activations"] == pytest.approx(like[rank]["activations"])
        assert mixed[rank]["optimizer"] == pytest.approx(0 if rank == 1 else like[rank]["optimizer"])


def test_slowest_rank_of_unequal_recompute_decides_the_time():
    mesh = "pp=4 microbatches=16 tp=8 sp=on precision=bf16"
    steps = {
        policy: clocked(candidate(f"{mesh} recompute={policy}")).step_s
        for policy in ("none", "none+full+none+none", "full+full+full+full", "full")
    }
    assert steps["none"] < steps["none+full+none+none"] < steps["full+full+full+full"]
    assert steps["full+full+full+full"] == pytest.approx(steps["full"], rel=0.01)
