"""What saving memory costs: offload and budgets are never free, and cost more where more is saved."""

from __future__ import annotations

from itertools import pairwise

import pytest

from weft.planner.moves import estimated
from weft.planner.question import Question
from weft.planner.why_not import read_plan

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


def test_short_transfers_hide_under_compute():
    eighth, whole = candidates(["offload=activations:0.125", "offload=activations"])
    assert eighth.terms["offload"] < whole.terms["offload"] / 8
