"""Experts over ranks compute what one process computes: loss, norm, gradients, weights."""

from __future__ import annotations

import dataclasses

import pytest

from tests.parity.moe_cases import hugging_face_moe_cases, moe_cases, train_moe_cases
from weft.testing import ParityResult, train_case

RTOL = 1e-10

#: (plan, whether Hugging Face's models run it too)
PLANS_2 = [
    ("dp_shard=2 ep=2 zero=0", True),
    ("dp_shard=2 ep=2 zero=1 recompute=full", False),
    ("dp_shard=2 zero=2 accumulation=2", False),
    ("dp_shard=2 ep=2 zero=2 accumulation=4", False),
    ("dp_shard=2 ep=2 zero=3 accumulation=2", True),
    ("dp_shard=2 ep=2 zero=3 recompute=selective", False),
    ("dp_shard=2 ep=2 zero=3 recompute=full", False),
    ("dp_shard=2 ep=2 zero=2 recompute=selective", False),
    ("dp_shard=2 ep=2 zero=1 offload=optimizer", False),
    ("cp=2 ep=2", False),
    ("cp=2 ep=2 zero=3 cp_mode=ring", False),
    ("tp=2", True),
    ("tp=2 ep=2", False),
    ("tp=2 ep=2 sp=on accumulation=2", True),
]
PLANS_4 = [
    ("dp_shard=4 ep=4 zero=0 accumulation=2", False),
    ("dp_shard=4 ep=2 zero=0", False),
    ("dp_shard=4 ep=2 zero=1", True),
    ("dp_shard=4 ep=4 zero=2", False),
    ("dp_shard=4 ep=2 zero=3 accumulation=2", False),
    ("dp_shard=4 ep=4 zero=3", True),
    ("dp_replicate=2 dp_shard=2 ep=2 zero=0", False),
    ("dp_replicate=2 dp_shard=2 ep=2 zero=1 accumulation=2", False),
    ("dp_replicate=2 dp_shard=2 ep=2 zero=2", False),
    ("dp_replicate=2 dp_shard=2 ep=2 zero=3", False),
    ("dp_shard=2 cp=2 ep=4 zero=1", False),
    ("dp_shard=2 cp=2 ep=2 zero=3", True),
    ("dp_shard=2 tp=2 ep=4 zero=1 sp=on", False),
    ("dp_shard=2 tp=2 ep=2 zero=3", False),
    ("tp=2 cp=2 ep=4 sp=on", False),
    ("tp=2 cp=2 ep=2 zero=3", False),
    ("cp=4 ep=2 zero=2 cp_mode=gather", False),
]


@pytest.fixture(scope="module")
def references() -> dict[str, ParityResult]:
    return train_moe_cases("precision=fp64", {**moe_cases(), **hugging_face_moe_cases()})


@pytest.mark.parametrize(("plan", "all_models"), PLANS_2 + PLANS_4)
def test_experts_over_ranks_equal_one_process(plan, all_models, references, request):
    ranks = request.getfixturevalue("ranks2" if (plan, all_models) in PLANS_2 else "ranks4")
    cases = moe_cases() | (hugging_face_moe_cases() if all_models else {})
    for results in ranks.run(train_moe_cases, f"{plan} precision=fp64", cases):
        for name, result in results.items():
            assert result.largest_difference(references[name]) < RTOL, name


def test_what_balances_and_drops_is_seen_in_the_numbers(references):
    """A matrix that could not tell these apart would prove nothing."""
    cases = moe_cases()
    for name, changes in {
        "aux": {"balance": "none"},
        "bias": {"balance": "none"},
        "capacity": {"capacity_factor": 0.0},
        "plain": {"top_k": 1},
    }.items():
        case = cases[name]
        other = dataclasses.replace(case, spec=dataclasses.replace(case.spec, **changes))
        assert references[name].largest_difference(train_case("precision=fp64", other)) > 1e-5, name


@pytest.mark.parametrize("plan", ["dp_shard=2 ep=2 zero=1", "dp_shard=2 ep=2 zero=3"])
def test_half_precision_stays_near_one_process_of_the_same_precision(plan, ranks2):
    """Sums are made in another order; a token near a border between experts may go to another one."""
    cases = moe_cases()
    one = train_moe_cases("precision=bf16", cases)
    for name, result in ranks2.run(train_moe_cases, f"{plan} precision=bf16", cases)[1].items():
        assert result.losses == pytest.approx(one[name].losses, rel=2**-5), name
        assert result.grad_norms[0] == pytest.approx(one[name].grad_norms[0], rel=2**-3), name
