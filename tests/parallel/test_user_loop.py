"""A user's training loop, written as for one device, matches one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallel.loops import STAGES, fork, laid_out, mlp, plain_weights, rows, weights
from weft.errors import CommError, ModelError
from weft.parallel.state.gradients import data_parallel

ADAMW = {"lr": 0.05, "weight_decay": 0.1}


def own_loop(plan: str, clip: float, num_backwards: int, num_steps: int = 3) -> tuple[dict, list[float]]:
    model, mesh = laid_out(plan, mlp())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms = []
    for step in range(num_steps):
        for index in range(num_backwards):
            model(rows(10 * step + index, mesh.rank if mesh.world_size > 1 else None)).square().mean().backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    # Model weights equal the trained masters on all ranks.
    for name, param in model.named_parameters():
        assert torch.equal(param, weights(model)[name])
        assert param.grad is None
    return weights(model), norms


def reference(clip: float, num_backwards: int, num_steps: int = 3) -> tuple[dict, list[float]]:
    model, norms = mlp(), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(num_steps):
        for index in range(num_backwards):
            model(rows(10 * step + index)).square().mean().backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return plain_weights(model), norms


@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("plan", STAGES)
def test_user_loop_matches_one_device(plan, clip, num_backwards, ranks2):
    want, want_norms = reference(clip, num_backwards)
    for got, norms in ranks2.run(own_loop, plan + " precision=fp64", clip, num_backwards):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
        assert norms == pytest.approx(want_norms, rel=1e-10)


def test_user_loop_on_one_rank_matches_plain_pytorch():
    torch.testing.assert_close(own_loop("precision=fp64", 0.1, 2), reference(0.1, 2), rtol=1e-12, atol=1e-14)


def without_zero_grad(plan: str) -> dict:
    model, mesh = laid_out(plan, mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        model(rows(index, mesh.rank)).square().mean().backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_gradients_accumulate_without_zero_grad(plan, ranks2):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        model(rows(index)).square().mean().backward()
        optimizer.step()
    got = ranks2.run(without_zero_grad, plan + " precision=fp64")
    torch.testing.assert_close(got[1], plain_weights(model), rtol=1e-10, atol=1e-13)


def uneven_backwards(plan: str, counts: tuple[int, int]) -> dict:
    model, mesh = laid_out(plan, mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for index in range(counts[mesh.rank]):
            model(rows(index, mesh.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("counts", [(3, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("plan", STAGES)
def test_ranks_may_have_different_numbers_of_backwards(plan, counts, ranks2):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for rank in (0, 1):
            for index in range(counts[rank]):
                (model(rows(index, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for got in ranks2.run(uneven_backwards, plan + " precision=fp64", counts):
        torch.testing.assert_close(got, plain_weights(model), rtol=1e-10, atol=1e-13)


def branches_by_rank(plan: str) -> dict:
    model, mesh = laid_out(plan, fork())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(3):
        model(rows(index, mesh.rank), left=(mesh.rank + index) % 2 == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_ranks_may_take_different_branches_in_a_user_loop(plan, ranks2):
    model = fork()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(3):
        for rank in (0, 1):
            (model(rows(index, rank), left=(rank + index) % 2 == 0).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for got in ranks2.run(branches_by_rank, plan + " precision=fp64"):
        torch.testing.assert_close(got, plain_weights(model), rtol=1e-10, atol=1e-13)


def two_optimizers(plan: str) -> dict:
    model, mesh = laid_out(plan, mlp(torch.float32))
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
    for index in range(3):
        model(rows(index, mesh.rank, torch.float32)).square().mean().backward()
        rest.step()
        muon.step()
        rest.zero_grad()
        muon.zero_grad()
    return weights(model)


@pytest.mark.parametrize("plan", STAGES)
def test_muon_and_adamw_share_a_model(plan, ranks2):
    """Muon is adopted after AdamW has stepped, so buckets are laid out again, with AdamW's states."""
    model = mlp(torch.float32)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
    for index in range(3):
        model(rows(index, None, torch.float32)).square().mean().backward()
        for optimizer in (rest, muon):
            optimizer.step()
            optimizer.zero_grad()
    for got in ranks2.run(two_optimizers, plan):
        # Newton-Schulz runs in bf16, which amplifies a gradient's last bit to 2^-9 of the update.
        torch.testing.assert_close(got, plain_weights(model), rtol=0, atol=2e-4)


def bf16_own_loop(plan: str) -> tuple[dict, float]:
    model, mesh = laid_out(plan, mlp(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    before = weights(model)
    for index in range(4):
        model(rows(index, mesh.rank, torch.float32)).float().square().mean().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    after = weights(model)
    return after, max(float((after[name] - before[name]).abs().max()) for name in after)


@pytest.mark.parametrize("plan", STAGES)
def test_bf16_masters_keep_updates_below_bf16_resolution(plan, ranks2):
    for after, moved in ranks2.run(bf16_own_loop, plan + " precision=bf16"):
        assert {weight.dtype for weight in after.values()} == {torch.float32}
        assert 2e-5 < moved < 6e-5  # four steps of 1e-5, which bf16 weights would round to zero


def rejected_calls(plan: str) -> list[str]:
    found = []
    model, mesh = laid_out(plan, mlp(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_parallel(model).adopt(optimizer)
    for action in (
        lambda: optimizer.step(lambda: model(rows(0, mesh.rank, torch.float32)).sum()),
        lambda: data_parallel(model).adopt(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))])),
        lambda: data_parallel(model).adopt(torch.optim.LBFGS(model.parameters())),
        lambda: laid_out(plan, model),
    ):
        try:
            action()
            found.append("")
        except ModelError as error:
            found.append(str(error))
    return found


def test_unsupported_optimizer_calls_are_rejected(ranks2):
    for found in ranks2.run(rejected_calls, "dp_shard=2 zero=1"):
        assert [text.split(":")[0] for text in found] == ["optimizer SGD", "optimizer", "optimizer LBFGS", "model"]


def fp16_own_loop(plan: str) -> str:
    model, mesh = laid_out(plan, mlp(torch.float32))
    with pytest.raises(ModelError) as caught:
        model(rows(0, mesh.rank)).sum().backward()
    return str(caught.value)


def test_fp16_without_loss_scaling_is_rejected(ranks2):
    for text in ranks2.run(fp16_own_loop, "dp_shard=2 zero=1 precision=fp16"):
        assert text == (
            "precision=fp16: its loss must be scaled, and backward() came outside a train step. "
            "Use run.train_step, or precision=bf16."
        )


def different_models(plan: str) -> str:
    from weft.comm.mesh import build_mesh
    from weft.config.plan import Plan
    from weft.parallel.parallelize import parallelize

    mesh = build_mesh(Plan.parse(plan))
    with pytest.raises(CommError) as caught:
        parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + mesh.rank)), mesh)
    return str(caught.value)


def test_different_models_on_ranks_are_reported(ranks2):
    first, second = ranks2.run(different_models, "dp_replicate=2")
    assert first.startswith("model: rank 1 built another model than rank 0. The first difference is tensor number 2")
    assert "'1.weight' with shape (4, 4)" in first
    assert "'1.weight' with shape (5, 4)" in second
