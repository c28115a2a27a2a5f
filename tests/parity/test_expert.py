"""Expert parallelism matches one process: loss, norm, gradients, weights."""

from __future__ import annotations

import dataclasses

import pytest

from tests.choice import gate_runs, todays
from tests.parity.moe_cases import moe_cases
from weft.verify.parity import ParityResult, train_case, train_cases

RTOL = 1e-10

#: Expert parallelism with recompute, accumulation and offload. tests/parity/test_layouts.py covers every layout.
PLANS = [
    "dp_shard=2 ep=2 zero=1 recompute=full",
    "dp_shard=2 ep=2 zero=3 recompute=selective",
    "dp_shard=2 ep=2 zero=3 recompute=full accumulation=2",
    "dp_shard=2 ep=2 zero=2 recompute=selective accumulation=2",
    "dp_shard=2 ep=2 zero=1 offload=optimizer",
    "tp=2 ep=2 sp=on recompute=selective",
]


@pytest.fixture(scope="module")
def references() -> dict[str, ParityResult]:
    return train_cases("precision=fp64", moe_cases())


@pytest.mark.parametrize("plan", todays(gate_runs(PLANS, 2, 4, 5), parts=2))
def test_expert_parallel_matches_one_process(plan, references, ranks2):
    for results in ranks2.run(train_cases, f"{plan} precision=fp64", moe_cases()):
        for name, result in results.items():
            assert result.largest_difference(references[name]) < RTOL, name


def test_balancing_and_dropping_change_the_results(references):
    """Check that the comparison can fail."""
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


@pytest.mark.parametrize("plan", gate_runs(["dp_shard=2 ep=2 zero=1", "dp_shard=2 ep=2 zero=3"], 1))
def test_half_precision_is_close_to_one_process(plan, ranks2):
    """Compare with a tolerance: sums have another order, and a token may be routed to another expert."""
    cases = moe_cases()
    one = train_cases("precision=bf16", cases)
    for name, result in ranks2.run(train_cases, f"{plan} precision=bf16", cases)[1].items():
        assert result.losses == pytest.approx(one[name].losses, rel=2**-5), name
        assert result.grad_norms[0] == pytest.approx(one[name].grad_norms[0], rel=2**-3), name
