"""Numerical defects that were measured in another library, each in the form in which it occurred.

Several backwards before a step: only the last contributed. First Adam update: 0.744 of the right one, because creating
the states took a step. Ranks with different branches: a forward with a mixture of two weights. Masters: initialized
from rounded weights.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.parallel.loops import STAGES, fork, laid_out, mlp, plain_weights, rows, weights
from weft.parallel.state.gradients import data_parallel
from weft.train.step.train_step import TrainStep


def three_backwards(plan: str) -> dict[str, torch.Tensor]:
    model, mesh = laid_out(plan, mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        model(rows(index, mesh.rank)).pow(2).mean().backward()
    optimizer.step()
    return weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_all_backwards_before_a_step_contribute(plan, ranks2):
    model = mlp()
    for index in range(3):
        model(rows(index)).pow(2).mean().backward()
    want = {name: param.detach() - 0.1 * param.grad for name, param in model.named_parameters()}
    for got in ranks2.run(three_backwards, plan + " precision=fp64"):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def noise(index: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(index))


def mean_square(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.float().pow(2).sum(), output.numel()


def train_bf16(plan: str, num_steps: int, lr: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return masters before and after training. All ranks have all rows, so that means equal one process's."""
    model, mesh = laid_out(plan, wide())
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    step = TrainStep(model, optimizer, mean_square, mesh)
    for index in range(num_steps):
        step(noise(index))
    return before, weights(model)


def reference_bf16(num_steps: int, lr: float) -> nn.Module:
    """Train with bf16 forward and backward, fp32 masters of the unrounded weights, and plain AdamW."""
    master = wide()
    optimizer = torch.optim.AdamW(master.parameters(), lr=lr, weight_decay=0.01)
    for index in range(num_steps):
        rounded = copy.deepcopy(master).bfloat16()
        rounded(noise(index).bfloat16()).float().pow(2).mean().backward()
        for param, other in zip(master.parameters(), rounded.parameters(), strict=True):
            param.grad = other.grad.float()
        optimizer.step()
        optimizer.zero_grad()
    return master


PLANS = ["precision=bf16", *(plan + " precision=bf16" for plan in STAGES)]


def run(plan: str, request: pytest.FixtureRequest, *args: object) -> list:
    ranks = request.getfixturevalue("ranks2") if "=2" in plan else None
    return ranks.run(train_bf16, plan, *args) if ranks else [train_bf16(plan, *args)]


@pytest.mark.parametrize("plan", PLANS)
def test_first_adam_update_has_full_size(plan, request):
    want, first = plain_weights(reference_bf16(1, 1e-2)), plain_weights(wide())
    for before, after in run(plan, request, 1, 1e-2):
        ours = torch.cat([(after[name] - before[name]).flatten() for name in want])
        theirs = torch.cat([(want[name] - first[name]).flatten() for name in want])
        assert float(ours @ theirs / (theirs @ theirs)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("plan", PLANS)
def test_masters_start_unrounded_and_stay_close_to_the_reference(plan, request):
    want, first = plain_weights(reference_bf16(5, 1e-3)), plain_weights(wide())
    for before, after in run(plan, request, 5, 1e-3):
        for name, weight in first.items():
            assert torch.equal(before[name], weight), name
            # Rounding the initial weights would cost 4.9e-4. A different sign for one element in 4 steps costs less.
            assert float((after[name] - want[name]).abs().mean()) < 2e-5, name


def branch_by_rank(plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, mesh = laid_out(plan, fork())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(
        model,
        optimizer,
        lambda output, batch: (output.square().sum(), output.numel()),
        mesh,
        forward=lambda model, batch: model(batch, left=mesh.rank == 0),
    )
    return [step(rows(index, mesh.rank)).loss for index in range(3)], weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_ranks_with_different_branches_train_the_right_weights(plan, ranks2):
    model, losses = fork(), []
    for index in range(3):
        loss = sum(model(rows(index, rank), left=rank == 0).square().sum() for rank in (0, 1)) / 16
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    for got_losses, got in ranks2.run(branch_by_rank, plan + " precision=fp64"):
        assert got_losses == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(got, plain_weights(model), rtol=1e-11, atol=1e-13)


def uneven_microbatches(plan: str) -> dict[str, torch.Tensor]:
    model, mesh = laid_out(plan, mlp())
    engine, optimizer = data_parallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    engine.adopt(optimizer)
    for _ in range(2):
        engine.begin_step()
        for index in range(1 + 2 * mesh.rank):
            with engine.microbatch(last=index == 2 * mesh.rank):
                model(rows(index, mesh.rank)).square().sum().backward()
        engine.finish()
        engine.scale(1 / 8)
        optimizer.step()
        engine.publish()
    assert engine.norm() > 0
    return weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_ranks_may_have_different_numbers_of_microbatches(plan, ranks2):
    model = mlp()
    for _ in range(2):
        model.zero_grad()
        (sum(model(rows(i, rank)).square().sum() for rank in (0, 1) for i in range(1 + 2 * rank)) / 8).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    for got in ranks2.run(uneven_microbatches, plan + " precision=fp64"):
        torch.testing.assert_close(got, plain_weights(model), rtol=1e-11, atol=1e-13)
