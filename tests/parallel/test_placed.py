"""Models whose parameters are cut, and those whose gradients are partial sums, train as on one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parallel.placed import Settings, train, train_and_capture, train_plans
from weft.errors import CommError

RTOL = 1e-10
ADAMW, SGD = Settings(), Settings(optimizer="sgd")
TWO = ["tp=2", "cp=2", "cp=2 zero=1", "cp=2 zero=2 accumulation=2"] + [
    f"dp_shard=2 ep=2 zero={zero} accumulation={1 + zero % 2}" for zero in range(4)
]
FOUR = [
    "tp=4",
    "tp=4 ep=2 accumulation=2",
    "dp_replicate=2 tp=2",
    "dp_shard=2 tp=2 zero=1",
    "dp_shard=2 tp=2 zero=2 ep=2 accumulation=2",
    "dp_shard=2 tp=2 zero=2 ep=4 accumulation=2",
    "dp_shard=2 cp=2 zero=1 ep=2",
    "dp_replicate=2 dp_shard=2 ep=2 zero=2 accumulation=2",
    "cp=2 tp=2 ep=2 zero=1",
    "dp_shard=4 ep=2 zero=0",
    "dp_shard=4 ep=4 zero=2",
    "dp_shard=2 tp=2 zero=3",
    "dp_shard=2 tp=2 zero=3 ep=2 accumulation=2",
    "dp_shard=2 tp=2 zero=3 ep=4 accumulation=2 reshard=after_step",
    "cp=2 tp=2 ep=2 zero=3 reshard=after_backward",
    "dp_replicate=2 dp_shard=2 ep=2 zero=3 accumulation=2",
    "dp_shard=4 ep=2 zero=3",
]


@pytest.fixture(scope="module")
def references():
    return {settings: train("precision=fp64", settings) for settings in (ADAMW, SGD)}


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("plans, ranks", [(TWO, "ranks2"), (FOUR, "ranks4")], ids=["2 ranks", "4 ranks"])
def test_cut_models_equal_one_process(plans, ranks, settings, references, request):
    reference = references[settings]
    plans = [f"{plan} precision=fp64" for plan in plans]
    for results in request.getfixturevalue(ranks).run(train_plans, plans, settings):
        for plan, result in results.items():
            assert result.largest_difference(reference) < RTOL, plan


CAPTURES = [
    "dp_shard=2 tp=2 zero=2 ep=2",
    "tp=4",
    "dp_shard=4 ep=4 zero=1",
    "dp_replicate=2 cp=2 zero=2",
    "dp_shard=2 tp=2 zero=3 ep=2",
]


@pytest.mark.parametrize("plan", CAPTURES)
def test_what_one_plan_saves_any_other_takes(plan, ranks4):
    two, four = replace(ADAMW, num_steps=2), replace(ADAMW, num_steps=2)
    saved = train_and_capture("precision=fp64", two)
    ours = ranks4.run(train_and_capture, f"{plan} precision=fp64", two)[0]
    _assert_equal(ours, saved)
    _assert_equal(train_and_capture("precision=fp64", four, ours), train_and_capture("precision=fp64", four, saved))
    other = CAPTURES[CAPTURES.index(plan) - 1]
    again = ranks4.run(train_and_capture, f"{other} precision=fp64", four, ours)[3]
    _assert_equal(again, train_and_capture("precision=fp64", four, saved))


def _assert_equal(ours, theirs):
    for group, tensors in theirs.items():
        assert ours[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(ours[group][name], tensor, rtol=RTOL, atol=1e-12, check_dtype=True)


def test_an_optimizer_that_needs_whole_matrices_refuses_cut_ones(ranks2):
    with pytest.raises(
        CommError, match=r"Muon: it must see the whole of parameter 'blocks\.0\.0\.down', which is cut over tp"
    ):
        ranks2.run(train, "tp=2 precision=fp64", replace(ADAMW, optimizer="muon"))
