"""Experts over ranks compute what one process computes: loss, norm, gradients, weights, biases."""

from __future__ import annotations

import pytest

from tests.parity.moe_cases import all_moe_cases, train_moe_cases

RTOL = 1e-10

PLANS_2 = [
    "dp_shard=2 ep=2 zero=0",
    "dp_shard=2 ep=2 zero=1",
    "dp_shard=2 ep=1 zero=2",
    "dp_shard=2 ep=2 zero=2",
    "dp_shard=2 ep=2 zero=3",
]
PLANS_4 = [
    "dp_shard=4 ep=4 zero=0",
    "dp_shard=4 ep=2 zero=0",
    "dp_shard=4 ep=2 zero=1",
    "dp_shard=4 ep=4 zero=2",
    "dp_shard=4 ep=2 zero=3",
    "dp_shard=4 ep=4 zero=3",
    "dp_replicate=2 dp_shard=2 ep=2 zero=1",
    "dp_replicate=2 dp_shard=2 ep=2 zero=2",
    "dp_replicate=2 dp_shard=2 ep=2 zero=3",
    "dp_replicate=2 dp_shard=2 ep=2 zero=0",
]


@pytest.fixture(scope="module")
def references():
    return train_moe_cases("precision=fp64", all_moe_cases())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layout", PLANS_2 + PLANS_4)
def test_experts_over_ranks_equal_one_process(layout, accumulation, references, request):
    ranks = request.getfixturevalue("ranks2" if layout in PLANS_2 else "ranks4")
    for results in ranks.run(train_moe_cases, f"{layout} accumulation={accumulation} precision=fp64", all_moe_cases()):
        for name, result in results.items():
            assert result.largest_difference(references[name]) < RTOL, name
