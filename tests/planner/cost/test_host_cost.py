"""What saving memory costs: offload and budgets are never free, and cost more where more is saved."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from weft.memory.policy import cheapest_choice
from weft.planner.cost.layer import layer_costs
from weft.planner.cost.machine import Fabric
from weft.planner.cost.recompute import menu, replay_s
from weft.planner.report.verdict import read_plan
from weft.planner.search.best_plans import host_message
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated
from weft.planner.space.columns import Columns


def test_a_replay_stops_before_what_backward_does_not_ask_for():
    """Of a layer's forward: no last product, nor the sum after it; a stack that makes all of it makes these too."""
    plans = [read_plan(f"tp=8 precision=bf16 {word}", QUESTION) for word in ("", "sp=on")]
    columns = Columns.of(plans, QUESTION.job)
    fabric = Fabric.of(QUESTION.tables, QUESTION.cluster.devices_per_node)
    costs = layer_costs(QUESTION.job, columns, QUESTION.tables, fabric)
    early = replay_s(QUESTION.job, columns, costs)
    whole_job = replace(QUESTION.job, stack=replace(QUESTION.job.stack, replay_stops=False))
    whole = replay_s(whole_job, columns, costs)
    assert (costs.last_f > 0.15 * costs.gemm_f).all()
    assert (costs.tp_f > 0).all()
    assert whole["full"] - early["full"] == pytest.approx(costs.last_f + costs.tp_f * [0.5, 0.25])
    assert early["selective"] == pytest.approx(whole["selective"])


QUESTION = Question.of("llama3-8b", "8xh100", seq_len=8192, global_batch=128, built_only=False)
BASE = "dp_shard=8 zero={zero} accumulation=16 precision=bf16"


def candidates(words, zero=1):
    base = BASE.format(zero=zero)
    return estimated([read_plan(f"{base} {word}", QUESTION) for word in words], QUESTION)


@pytest.mark.parametrize(
    ("words", "zero"),
    [
        (["", "offload=optimizer:0.25", "offload=optimizer:0.5", "offload=optimizer"], 1),
        (["", "offload=activations:0.25", "offload=activations:0.5", "offload=activations"], 1),
        (["", "offload=params:0.5", "offload=params"], 3),
        (["recompute=none", "recompute=90%", "recompute=60%", "recompute=30%", "recompute=10%"], 1),
    ],
)
def test_the_more_memory_is_saved_the_more_time_it_takes(words, zero):
    found = candidates(words, zero)
    for less, more in pairwise(found):
        assert more.total_bytes < less.total_bytes
        assert more.step_s >= less.step_s
    assert found[-1].step_s > found[0].step_s


def test_a_budget_lies_between_the_policies():
    none, half, selective, full = candidates(["", "recompute=15%", "recompute=selective", "recompute=full"])
    assert none.terms["recompute"] == 0
    assert selective.terms["recompute"] < half.terms["recompute"] < full.terms["recompute"]


def test_offloaded_activations_cost_time_even_where_their_transfers_hide():
    none, eighth = candidates(["", "offload=activations:0.125"])
    assert eighth.step_s > none.step_s


def test_short_transfers_hide_under_compute():
    eighth, whole = candidates(["offload=activations:0.125", "offload=activations"])
    assert eighth.terms["offload"] < whole.terms["offload"] / 8


def test_a_budget_costs_what_the_runtime_would_choose():
    """The knapsack of `memory/budget.py` over the layers' menus, against the estimate's lower hull."""
    for plan in ("recompute=80%", "recompute=50%", "recompute=30%", "recompute=20GiB"):
        one = candidates([plan])[0]
        job = one.question.job
        columns = Columns.of([one.plan], job)
        fabric = Fabric.of(one.question.tables, one.question.cluster.devices_per_node)
        options = menu(job, columns, layer_costs(job, columns, one.question.tables, fabric))
        listed = [(int(each.kept[0]), float(each.seconds[0])) for each in options]
        whole = listed[0][0] * job.shape.layers
        budget = int(whole * float(plan[10:-1]) / 100) if plan.endswith("%") else 20 * 2**30
        choice = cheapest_choice([listed] * job.shape.layers, budget)
        assert choice is not None
        chosen = sum(listed[index][1] for index in choice) * one.plan.accumulation
        # A layer more or less with the next option is all that whole layers add.
        grain = max(seconds for _, seconds in listed) * one.plan.accumulation
        assert chosen - grain <= one.terms["recompute"] <= chosen + 1e-9


def test_selective_recompute_keeps_what_products_make():
    none, selective, full = candidates(["", "recompute=selective", "recompute=full"])
    assert none.total_bytes > selective.total_bytes > full.total_bytes
    assert 0 < selective.terms["recompute"] < full.terms["recompute"] / 3


def test_recompute_of_some_blocks_lies_between_none_and_all():
    words = ["", "recompute=full:8", "recompute=full:24", "recompute=full:32", "recompute=full"]
    none, eight, most, every, full = candidates(words)
    assert none.total_bytes > eight.total_bytes > most.total_bytes > every.total_bytes
    assert every.total_bytes == full.total_bytes
    assert eight.terms["recompute"] == pytest.approx(full.terms["recompute"] * 8 / 32)


def test_a_host_has_only_so_much_memory():
    """Eight ranks that keep a 405B model's states in one host's memory: more than it can pin."""
    words = "dp_shard=8 zero=3 accumulation=8 precision=bf16 recompute=full offload=params"
    for model, fits_there in (("llama3-405b", False), ("llama3-8b", True)):
        asked = Question.of(model, "8xh100", seq_len=8192, global_batch=64, built_only=False)
        found = estimated([read_plan(words, asked)], asked)[0]
        assert found.host_limit == 0.6 * 256 * 2**30
        assert (0 < found.host_bytes <= found.host_limit) == fits_there
        assert fits_there or found.fits == 0
    assert "host's memory; its share that may be pinned is 154 GiB" in host_message(1e12, 0.6 * 256 * 2**30)
