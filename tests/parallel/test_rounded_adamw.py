"""AdamW with moments in bf16: right on average, the same under every plan, and exact to resume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.parallel.loops import laid_out, mlp, rows, weights
from tests.whole_state import capture
from weft.checkpoint.parts import Part
from weft.optim import build_optimizer
from weft.optim.rounded_adamw import RoundedAdamW, noise_at, rounded
from weft.parallel.local_tensors import PlacedPart
from weft.spec.config import OptimizerSection
from weft.train.step import TrainStep

SECTION = OptimizerSection(states="bf16", lr=0.01)


def test_rounding_is_right_on_average_and_never_far():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))[:, None].expand(-1, 20_000).contiguous()
    noise = noise_at(torch.arange(x.numel()).view(x.shape), (1, 2)) & 0xFFFF
    got = rounded(x, noise).float()
    assert ((got - x).abs() <= x.abs() * 2**-7).all()
    assert len(got[0].unique()) == 2
    torch.testing.assert_close(got.mean(1), x[:, 0], rtol=2**-7 / 20_000**0.5 * 4, atol=0)
    exact = torch.tensor([0.0, 1.0, -2.5, 1e-30]).bfloat16().float()
    assert torch.equal(rounded(exact, torch.full((4,), 0xFFFF, dtype=torch.int32)).float(), exact)


def test_bits_differ_by_place_key_and_beyond_32_bits():
    places = torch.arange(4096)
    bits = [
        noise_at(places, (1, 2)),
        noise_at(places, (1, 3)),
        noise_at(places, (2, 2)),
        noise_at(places + 2**33, (1, 2)),
    ]
    for index, one in enumerate(bits):
        assert len(one.unique()) > 4090
        for other in bits[:index]:
            assert (one == other).sum() < 3


def test_positions_are_those_of_the_whole():
    whole = torch.arange(6 * 8 * 2).view(6, 8, 2)
    for part, local in (
        (Part((6, 8, 2)), whole),
        (Part((6, 8, 2), 0, ((2, 5),)), whole[2:5]),
        (Part((6, 8, 2), 1, ((4, 8),)), whole[:, 4:]),
        (Part((6, 8, 2), 1, ((6, 8), (1, 2))), torch.cat([whole[:, 6:], whole[:, 1:2]], 1)),
    ):
        line = local.reshape(-1)
        placed = PlacedPart("w", part, 3, line.device)
        assert torch.equal(placed.positions(2, 9), line[5:12])


def square(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch)


def trained(plan: str, num_steps: int = 4) -> tuple[dict, dict]:
    model, mesh = laid_out(plan, mlp())
    step = TrainStep(model, build_optimizer(model.named_parameters(), SECTION, seed=3), square, mesh, max_grad_norm=1.0)
    for index in range(num_steps):
        step(torch.cat([rows(index, rank) for rank in (0, 1)]) if mesh.world_size == 1 else rows(index, mesh.rank))
    return weights(model), capture(model, step.optimizer)["optimizer"]


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=3"])
def test_every_plan_rounds_as_one_process(plan, ranks2):
    expected, states = trained("precision=fp64")
    assert {state.dtype for name, state in states.items() if "exp_avg" in name} == {torch.bfloat16}
    for got, theirs in ranks2.run(trained, plan + " precision=fp64"):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(theirs, states, rtol=0, atol=0)


def test_it_follows_adamw():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(4000)) for _ in range(2))
    rounding = RoundedAdamW([ours], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    exact = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(100):
        grad = torch.randn(4000, generator=generator) + 0.3
        for param, optimizer in ((ours, rounding), (theirs, exact)):
            param.grad = grad.clone()
            optimizer.step()
    moved, off = float((theirs.detach() - 1).abs().mean()), (ours - theirs).detach()
    assert float(off.abs().mean()) < 0.02 * moved
    assert abs(float(off.mean())) < 0.002 * moved


def test_a_resumed_run_rounds_on():
    def run(num_steps: int, start: tuple | None = None) -> tuple:
        param = nn.Parameter(torch.ones(100) if start is None else start[0].detach().clone())
        optimizer = RoundedAdamW([param], seed=5)
        if start is not None:
            optimizer.load_state_dict(copy.deepcopy(start[1].state_dict()))
        for _ in range(num_steps):
            param.grad = param.detach().sin()
            optimizer.step()
        return param, optimizer

    straight, (resumed, optimizer) = run(4)[0], run(2, run(2))
    assert torch.equal(resumed, straight)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
