"""Unequal shares of the samples give the results of one process, under every technique that supports them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.choice import gate_runs, todays
from tests.parity.cases import cases
from tests.parity.pipeline_cases import expert_cases
from weft.comm.mesh import build_mesh
from weft.config.partitioning import fastest_shares
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.verify.parity import train_case, train_cases

RTOL = 1e-10

TWO = [
    "dp_replicate=2 shares=3+1",
    "dp_replicate=2 shares=5+2 accumulation=2",
    "dp_shard=2 zero=1 shares=5+3",
    "dp_shard=2 zero=2 shares=1+3 accumulation=3",
    "dp_shard=2 zero=1 shares=1+3 offload=optimizer recompute=full",
    "dp_replicate=2 shares=13+3 offload=activations",
    "dp_shard=2 zero=3 shares=3+1 accumulation=2",
    "dp_shard=2 zero=3 shares=3+1 reshard=after_step accumulation=2",
    "dp_shard=2 zero=3 shares=3+1 reshard=after_backward offload=params",
    pytest.param("dp_shard=2 zero=2 shares=3+1 compile=on", marks=pytest.mark.full),
]
#: Unequal parts of optimizer states and gradients.
SHARDS = [
    "dp_shard=2 zero=1 shard_shares=3+1",
    "dp_shard=2 zero=2 shard_shares=1+3 accumulation=2",
    "dp_shard=2 zero=2 shard_shares=2+5 shares=3+1 offload=optimizer:0.5 recompute=full",
]
FOUR_SHARDS = [
    "dp_shard=4 zero=1 shard_shares=4+1+2+1 shares=2+1+1+2 accumulation=2",
    "dp_replicate=2 dp_shard=2 zero=2 shard_shares=3+1",
    "dp_shard=2 tp=2 sp=on zero=2 shard_shares=3+1",
    "dp_shard=2 pp=2 microbatches=2 zero=1 shard_shares=1+2 shares=3+1",
]
FOUR = [
    "dp_replicate=4 shares=3+3+1+1",
    "dp_replicate=2 dp_shard=2 zero=2 shares=4+3+2+1",
    "dp_replicate=2 dp_shard=2 zero=1 shares=4+3+2+1 order=dp_shard+dp_replicate",
    "dp_replicate=2 tp=2 shares=3+1",
    "dp_shard=2 tp=2 sp=on zero=2 shares=3+1",
    "dp_replicate=2 pp=2 microbatches=2 shares=5+3",
    "dp_shard=2 pp=2 microbatches=3 zero=1 shares=3+1",
    "dp_shard=2 pp=2 microbatches=3 zero=2 shares=3+1",
    "dp_replicate=2 pp=2 microbatches=4 shares=5+3 schedule=zb_h1",
    "dp_shard=2 cp=2 cp_mode=ring zero=1 shares=3+1",
    "dp_shard=2 cp=2 cp_mode=gather zero=2 shares=3+1",
]
EXPERTS = [
    "dp_shard=2 tp=2 ep=2 zero=1 shares=3+1",
    "dp_replicate=2 pp=2 microbatches=4 virtual_stages=2 schedule=interleaved shares=5+3",
    "dp_replicate=2 pp=2 microbatches=4 virtual_stages=2 schedule=zb_v shares=5+3",
    "dp_replicate=2 pp=2 microbatches=4 virtual_stages=2 schedule=dualpipe_v shares=5+3",
    "dp_replicate=2 pp=2 microbatches=4 virtual_stages=2 schedule=zb_interleaved shares=5+3",
]


@pytest.fixture(scope="module")
def references():
    chosen = {name: case for name, case in cases().items() if name in ("decoder", "cnn", "hf-gpt2")}
    return chosen, train_cases("precision=fp64", chosen)


@pytest.fixture(scope="module")
def expert_references():
    return expert_cases(), train_cases("precision=fp64", expert_cases())


def compare(ranks, plan, chosen, expected):
    for results in ranks.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in results.items():
            assert result.largest_difference(expected[name]) < RTOL, name


@pytest.mark.parametrize("plan", todays(TWO, parts=2))
def test_unequal_shares_match_one_process_on_two_ranks(plan, references, ranks2):
    compare(ranks2, plan, *references)


@pytest.mark.parametrize("plan", todays(gate_runs(FOUR, 4, 7), parts=2))
def test_unequal_shares_match_one_process_on_four_ranks(plan, references, ranks4):
    chosen, expected = references
    model_axes = any(f"{axis}=" in plan for axis in ("tp", "cp", "pp"))
    compare(ranks4, plan, {name: one for name, one in chosen.items() if name != "cnn" or not model_axes}, expected)


@pytest.mark.parametrize("plan", gate_runs(EXPERTS, 0))
def test_unequal_shares_match_one_process_with_experts(plan, expert_references, ranks4):
    compare(ranks4, plan, *expert_references)


@pytest.mark.parametrize("plan", todays(SHARDS, parts=2))
def test_unequal_shards_match_one_process_on_two_ranks(plan, references, ranks2):
    compare(ranks2, plan, *references)


def elements_held(plan: str) -> tuple[int, int, int]:
    """Return this rank's elements of optimizer states and of gradients after a step, and those of all weights."""
    mesh, model = build_mesh(Plan.parse(plan)), nn.Sequential(nn.Linear(48, 200), nn.Linear(200, 8))
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, optimizer, lambda output, batch: (output.square().sum(), 4), mesh)
    step(torch.randn(4, 48))
    states = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.ndim)
    grads = sum(tensor.numel() for tensor in step.local_gradients())
    return states, grads, sum(param.numel() for param in model.parameters())


def test_states_and_gradients_of_ranks_are_unequal(ranks2):
    (many, more, weights), (few, less, _) = ranks2.run(elements_held, "dp_shard=2 zero=2 shard_shares=3+1")
    assert many + few == 2 * weights
    assert many == pytest.approx(3 * few, rel=0.05)
    assert more == pytest.approx(3 * less, rel=0.05)


@pytest.mark.parametrize("plan", todays(gate_runs(FOUR_SHARDS, 0, 2), parts=2))
def test_unequal_shards_match_one_process_on_four_ranks(plan, references, ranks4):
    chosen, expected = references
    model_axes = any(f"{axis}=" in plan for axis in ("tp", "pp"))
    compare(ranks4, plan, {name: one for name, one in chosen.items() if name != "cnn" or not model_axes}, expected)


def test_means_of_ranks_would_not_match(references, ranks2):
    """Check that the comparison can fail: a step over half the samples is another step."""
    chosen, expected = references
    other = train_case("precision=fp64", type(chosen["cnn"])(max_grad_norm=0.0))
    assert other.largest_difference(expected["cnn"]) > 1e-4


def test_fastest_shares_are_the_best_of_all():
    """Compare with every division of ten samples over three ranks."""
    for speeds in ([1.0, 0.5, 0.25], [1.0, 1.0, 0.1], [3.0, 2.0, 2.0], [1.0, 0.7, 0.69]):
        best = min(
            max(first / speeds[0], second / speeds[1], (10 - first - second) / speeds[2])
            for first in range(1, 9)
            for second in range(1, 10 - first)
        )
        shares = fastest_shares(10, speeds) or (1, 1, 1)
        unit = 10 // sum(shares)
        assert max(share * unit / speed for share, speed in zip(shares, speeds, strict=True)) == pytest.approx(best)
