"""Models with sharded parameters and with partial gradient sums match one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.choice import todays
from tests.parallel.sharded_net import (
    Settings,
    disagree,
    overflows,
    own_loop,
    own_loops,
    partial_calls,
    train,
    train_and_capture,
    train_plans,
    two_kinds_of_experts,
)
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
@pytest.mark.parametrize(
    "plans, ranks",
    [pytest.param(TWO, "ranks2", id="2 ranks"), pytest.param(FOUR, "ranks4", id="4 ranks", marks=pytest.mark.full)],
)
def test_sharded_models_match_one_process(plans, ranks, settings, references, request):
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


@pytest.mark.parametrize("plan", todays(CAPTURES, parts=2))
def test_saved_state_resumes_under_any_plan(plan, ranks4):
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


def test_adafactor_rejects_sharded_matrices(ranks2):
    with pytest.raises(
        CommError, match=r"Adafactor: it needs the full parameter 'blocks\.0\.0\.down', which is sharded over tp"
    ):
        ranks2.run(train, "tp=2 precision=fp64", replace(ADAMW, optimizer="adafactor"))


def test_muon_states_of_sharded_matrices_are_saved_unsharded(ranks4):
    muon = replace(ADAMW, num_steps=2, optimizer="muon")
    saved = train_and_capture("precision=fp64", muon)
    for plan in ("tp=4", "dp_shard=2 tp=2 zero=3"):
        ours = ranks4.run(train_and_capture, f"{plan} precision=fp64", muon)[0]
        _assert_equal(ours, saved)
        again = ranks4.run(train_and_capture, f"{plan} precision=fp64", muon, ours)[3]
        _assert_equal(again, train_and_capture("precision=fp64", muon, saved))


OWN = [
    "tp=4",
    "dp_shard=2 tp=2 zero=1",
    "dp_shard=4 ep=2 zero=2",
    "dp_shard=2 tp=2 zero=3 ep=2",
    "cp=2 dp_shard=2 ep=4 zero=3",
]


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_user_training_loops_match_one_process(num_backwards, ranks4):
    want = own_loop("precision=fp64", num_backwards)
    for found in ranks4.run(own_loops, [f"{plan} precision=fp64" for plan in OWN], num_backwards):
        for plan, weights in found.items():
            wrong_names = [
                name for name in want if not torch.allclose(weights[name], want[name], rtol=RTOL, atol=1e-12)
            ]
            assert not wrong_names, plan


HALF = [
    "dp_shard=2 tp=2 zero=0 ep=2",
    "dp_shard=2 tp=2 zero=1 ep=2",
    "dp_shard=2 tp=2 zero=2 ep=4",
    "dp_shard=2 tp=2 zero=3 ep=4",
]


@pytest.mark.parametrize("precision", todays(["bf16", "fp16"], parts=2))
def test_half_precision_is_close_to_one_process(precision, ranks4):
    """Compare with a bound of a few roundings, since sums have another order."""
    one = train(f"precision={precision}", ADAMW)
    for found in ranks4.run(train_plans, [f"{plan} precision={precision}" for plan in HALF], ADAMW):
        for plan, result in found.items():
            assert result.losses == pytest.approx(one.losses, rel=2**-5), plan
            assert result.grad_norms[0] == pytest.approx(one.grad_norms[0], rel=2**-5), plan
            for name, weight in one.weights.items():
                assert float((result.weights[name] - weight).abs().mean()) < 5e-3, (plan, name)


OFFLOADED = [
    "dp_shard=2 tp=2 zero=1 ep=2 offload=optimizer",
    "dp_shard=2 tp=2 zero=2 ep=4 offload=optimizer:0.5 accumulation=2",
    "dp_shard=2 tp=2 zero=3 ep=2 offload=params",
]


@pytest.mark.filterwarnings("ignore:offload=")
def test_offload_of_sharded_models_matches_one_process(ranks4, references):
    for found in ranks4.run(train_plans, [f"{plan} precision=fp64" for plan in OFFLOADED], ADAMW):
        for plan, result in found.items():
            assert result.largest_difference(references[ADAMW]) < RTOL, plan


def test_zero_3_rejects_experts_with_other_parameters_in_a_module(ranks2):
    with pytest.raises(CommError, match=r"module blocks\.0\.2\.experts: it has parameters that are sharded over ep"):
        ranks2.run(two_kinds_of_experts, "dp_shard=2 ep=2 zero=3 precision=fp64")


def test_different_placements_on_ranks_are_rejected(ranks2):
    with pytest.raises(CommError, match=r"rank 1 built another model than rank 0"):
        ranks2.run(disagree, "tp=2 precision=fp64")


def test_overflow_on_one_rank_skips_the_step_on_all(ranks4):
    plans = [
        "dp_replicate=4",
        "dp_shard=4 zero=1 accumulation=2",
        "dp_shard=4 zero=2",
        "dp_shard=4 zero=3 accumulation=2",
        "dp_replicate=2 dp_shard=2 zero=3 reduce=bf16",
        "dp_replicate=2 dp_shard=2 zero=2 offload=optimizer",
        "tp=4",
        "dp_shard=2 tp=2 zero=2",
        "dp_shard=4 ep=4 zero=1",
        "dp_shard=2 tp=2 zero=3 ep=2",
    ]
    for found in ranks4.run(overflows, plans):
        for plan, (first, second) in zip(plans, found, strict=True):
            assert (first or "").startswith("gradient norm is "), plan
            assert second is None, plan


def test_partial_sums_are_reduced_in_one_bucket(ranks4):
    """Two scales and two routers are reduced in one bucket."""
    for calls in ranks4.run(partial_calls, "dp_shard=2 tp=2 zero=1 precision=fp64"):
        assert calls["dp_replicate*tp"] == 1
