"""AdamW with bf16 or 8-bit moments: unbiased rounding, equal under every plan, and exact resume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.full_state import capture
from tests.parallel.loops import laid_out, mlp, rows, weights
from weft.checkpoint.read import Part
from weft.config.sections import OptimizerSection
from weft.optim.build import build_optimizer
from weft.optim.rounded_adamw import HALF, RoundedAdamW, encode_bytes, exact_moment, noise_at, rounded
from weft.parallel.state.flat_slices import PlacedPart
from weft.train.step.train_step import TrainStep

FORMATS = {"bf16": {torch.bfloat16}, "fp8": {torch.int8, torch.uint8}}


def test_rounding_is_unbiased_and_within_one_step():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))[:, None].expand(-1, 20_000).contiguous()
    noise = noise_at(torch.arange(x.numel()).view(x.shape), (1, 2)) & 0xFFFF
    got = rounded(x, noise).float()
    assert ((got - x).abs() <= x.abs() * 2**-7).all()
    assert len(got[0].unique()) == 2
    torch.testing.assert_close(got.mean(1), x[:, 0], rtol=2**-7 / 20_000**0.5 * 4, atol=0)
    exact = torch.tensor([0.0, 1.0, -2.5, 1e-30]).bfloat16().float()
    assert torch.equal(rounded(exact, torch.full((4,), 0xFFFF, dtype=torch.int32)).float(), exact)


def test_random_bits_differ_by_index_and_key_beyond_32_bits():
    indices = torch.arange(4096)
    bits = [
        noise_at(indices, (1, 2)),
        noise_at(indices, (1, 3)),
        noise_at(indices, (2, 2)),
        noise_at(indices + 2**33, (1, 2)),
    ]
    for index, one in enumerate(bits):
        assert len(one.unique()) > 4090
        for other in bits[:index]:
            assert (one == other).sum() < 3


def test_positions_refer_to_the_full_parameter():
    full = torch.arange(6 * 8 * 2).view(6, 8, 2)
    for part, local in (
        (Part((6, 8, 2)), full),
        (Part((6, 8, 2), 0, ((2, 5),)), full[2:5]),
        (Part((6, 8, 2), 1, ((4, 8),)), full[:, 4:]),
        (Part((6, 8, 2), 1, ((6, 8), (1, 2))), torch.cat([full[:, 6:], full[:, 1:2]], 1)),
    ):
        line = local.reshape(-1)
        placed = PlacedPart("w", part, 3, line.device)
        assert torch.equal(placed.positions(2, 9), line[5:12])


def square(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch)


def trained(plan: str, states: str = "bf16", num_steps: int = 4) -> tuple[dict, dict]:
    model, mesh = laid_out(plan, mlp())
    section = OptimizerSection.model_validate({"states": states, "lr": 0.01})
    step = TrainStep(model, build_optimizer(model.named_parameters(), section, seed=3), square, mesh, max_grad_norm=1.0)
    for index in range(num_steps):
        step(torch.cat([rows(index, rank) for rank in (0, 1)]) if mesh.world_size == 1 else rows(index, mesh.rank))
    return weights(model), capture(model, step.optimizer)["optimizer"]


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_plan_rounds_as_one_process(plan, form, ranks2):
    expected, states = trained("precision=fp64", form)
    assert {state.dtype for name, state in states.items() if "exp_avg" in name} == FORMATS[form]
    for got, theirs in ranks2.run(trained, plan + " precision=fp64", form):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(theirs, states, rtol=0, atol=0)


def test_rounded_adamw_stays_close_to_adamw():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(4000)) for _ in range(2))
    rounding = RoundedAdamW([ours], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    exact = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(100):
        grad = torch.randn(4000, generator=generator) + 0.3
        for param, optimizer in ((ours, rounding), (theirs, exact)):
            param.grad = grad.clone()
            optimizer.step()
    mean_change, error = float((theirs.detach() - 1).abs().mean()), (ours - theirs).detach()
    assert float(error.abs().mean()) < 0.02 * mean_change
    assert abs(float(error.mean())) < 0.002 * mean_change


@pytest.mark.parametrize("form", FORMATS)
def test_resumed_run_continues_the_rounding(form):
    def run(num_steps: int, start: tuple | None = None) -> tuple:
        param = nn.Parameter(torch.ones(100) if start is None else start[0].detach().clone())
        optimizer = RoundedAdamW([param], seed=5, states=form)
        if start is not None:
            optimizer.load_state_dict(copy.deepcopy(start[1].state_dict()))
        for _ in range(num_steps):
            param.grad = param.detach().sin()
            optimizer.step()
        return param, optimizer

    uninterrupted, (resumed, optimizer) = run(4)[0], run(2, run(2))
    assert torch.equal(resumed, uninterrupted)
    (state,) = optimizer.state.values()
    assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == FORMATS[form]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_8_bit_rounding_is_unbiased_and_keeps_every_code(dtype):
    limits = torch.iinfo(dtype)
    codes = torch.arange(max(limits.min, -127), limits.max + 1).to(dtype)
    numbers = exact_moment(codes)
    assert (numbers.diff() > 0).all()
    assert torch.equal(numbers.bfloat16().float(), numbers)
    assert torch.equal(encode_bytes(numbers, 0xFFFF, dtype), codes)
    assert torch.equal(encode_bytes(numbers, HALF, dtype), codes)
    x = torch.rand(50, generator=torch.Generator().manual_seed(0)).add(1e-3)[:, None].expand(-1, 20_000).contiguous()
    noise = noise_at(torch.arange(x.numel()).view(x.shape), (1, 2)) & 0xFFFF
    got = exact_moment(encode_bytes(x, noise, dtype))
    assert len(got[0].unique()) == 2
    torch.testing.assert_close(got.mean(1), x[:, 0], rtol=0.5 / 20_000**0.5 * 4, atol=0)
    assert float(exact_moment(encode_bytes(torch.tensor([1e30]), 0, dtype))) == float(numbers.max())


def fitted(states: str, beta2: float) -> float:
    """Return the mean loss of the last 20 of 200 steps of fitting another network's noisy outputs."""
    torch.manual_seed(0)
    model, teacher = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2))
    section = OptimizerSection.model_validate({"states": states, "lr": 0.01, "betas": (0.9, beta2)})
    optimizer, losses = build_optimizer(model.named_parameters(), section), []
    for _ in range(200):
        x = torch.randn(128, 16)
        target = teacher(x).detach() + 0.3 * torch.randn(128, 8)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("form", FORMATS)
def test_rounded_states_reach_the_fp32_loss(form, beta2):
    assert fitted(form, beta2) == pytest.approx(fitted("fp32", beta2), rel=0.02)


def test_8_bit_states_load_into_other_formats():
    """Check that 8-bit states convert to fp32 exactly, and back."""
    param = nn.Parameter(torch.ones(50))
    ours = RoundedAdamW([param], states="fp8")
    param.grad = torch.randn(50, generator=torch.Generator().manual_seed(0))
    ours.step()
    exact = torch.optim.AdamW([param])
    exact.load_state_dict(ours.state_dict())
    codes = ours.state[param]["exp_avg"].clone()
    assert exact.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(exact.state[param]["exp_avg"], exact_moment(codes))
    back = RoundedAdamW([param], states="fp8")
    back.load_state_dict(exact.state_dict())
    assert torch.equal(encode_bytes(back.state[param]["exp_avg"], HALF, torch.int8), codes)
