"""torch's optimizers over full bucket slices give the same results, states and hooks as per-parameter steps."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.parallel.loops import laid_out, mlp, plain_weights, rows, weights
from weft.optim.one_pass import AdamRule, Lane, SgdRule, step_lane
from weft.parallel.state.gradients import data_parallel
from weft.train.step.train_step import TrainStep

KINDS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "another": lambda groups: torch.optim.RMSprop(groups, lr=0.01),
}


def groups_of(model: nn.Module) -> list[dict]:
    """Return groups with decay for matrices only, in one bucket with vectors. One vector has another learning rate."""
    params = list(model.parameters())
    vectors = [p for p in params if p.ndim < 2]
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": vectors[1:], "weight_decay": 0.0},
        {"params": vectors[:1], "weight_decay": 0.0, "lr": 0.02},
    ]


def square(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch)


def trained(plan: str, kind: str, num_steps: int = 3) -> tuple[dict, dict]:
    model, mesh = laid_out(plan, mlp())
    step = TrainStep(model, KINDS[kind](groups_of(model)), square, mesh, max_grad_norm=0.3)
    for index in range(num_steps):
        step(rows(index, mesh.rank))
    engine = data_parallel(model)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients()}
    return weights(model), gradients | {"norm": engine.norm()}


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"])
@pytest.mark.parametrize("kind", KINDS)
def test_flat_steps_match_torch_on_one_process(kind, plan, ranks2):
    model = mlp()
    optimizer = KINDS[kind](groups_of(model))
    for index in range(3):
        optimizer.zero_grad()
        batches = [rows(index, rank) for rank in (0, 1)]
        (sum(model(batch).square().sum() for batch in batches) / sum(map(len, batches))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    clipped = {name: param.grad for name, param in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in clipped.values()]).norm()
    for got, gradients in ranks2.run(trained, plan + " precision=fp64", kind):
        torch.testing.assert_close(got, plain_weights(model), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients, clipped | {"norm": norm}, rtol=1e-10, atol=1e-13)


def one_rank(precision: str, kind: str, *, with_hook: bool = False, num_steps: int = 3) -> tuple[dict, TrainStep]:
    model, mesh = laid_out(f"precision={precision}", mlp().float())
    step = TrainStep(model, KINDS[kind](groups_of(model)), square, mesh, max_grad_norm=0.3)
    if with_hook:
        step.optimizer.register_step_pre_hook(lambda *args: None)  # forces torch's step
    for index in range(num_steps):
        step(rows(index, 0).float())
    return weights(model), step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_flat_step_on_one_rank_matches_torch_step(kind, precision):
    got, _ = one_rank(precision, kind)
    expected, step = one_rank(precision, kind, with_hook=True)
    assert not any(one._held for one in data_parallel(step.model)._optimizers.steps.values())
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=1e-8)


def test_states_are_in_torch_format_and_usable_in_a_user_loop():
    _, step = one_rank("fp32", "adamw")
    state = step.optimizer.state_dict()["state"]
    assert {key for one in state.values() for key in one} == {"step", "exp_avg", "exp_avg_sq"}
    assert {float(one["step"]) for one in state.values()} == {3.0}
    model = mlp().float()
    model.load_state_dict(step.model.state_dict())
    optimizer = KINDS["adamw"](groups_of(model))
    optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    for module, chosen in ((step.model, step.optimizer), (model, optimizer)):
        chosen.zero_grad()
        module(rows(3, 0).float()).square().sum().backward()
        chosen.step()
    torch.testing.assert_close(plain_weights(step.model), plain_weights(model), rtol=1e-6, atol=1e-7)
    assert {float(one["step"]) for one in step.optimizer.state_dict()["state"].values()} == {4.0}
    step(rows(4, 0).float())  # counts the step of the user's loop
    assert {float(one["step"]) for one in step.optimizer.state_dict()["state"].values()} == {5.0}


def test_learning_rate_schedulers_and_step_hooks_are_called():
    model, mesh = laid_out("precision=fp32", mlp().float())
    step = TrainStep(model, KINDS["adamw"](groups_of(model)), square, mesh)
    scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda index: 0.5**index)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(rows(0, 0).float())
        scheduler.step()
    hook = step.optimizer.register_step_pre_hook(
        lambda optimizer, *args: seen.append([p.grad is not None for g in optimizer.param_groups for p in g["params"]])
    )
    step(rows(1, 0).float())
    hook.remove()
    assert len(seen) == 1
    assert all(seen[0])  # a user's hook sees gradients


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("steps", ["adam", "sgd"])
def test_gpu_kernels_match_the_cpu_step(steps, decoupled):
    """Run the kernels in Triton's interpreter, which rounds bf16 towards zero."""
    triton = pytest.importorskip("triton")
    triton.knobs.runtime.interpret = True
    from weft.optim import one_pass
    from weft.optim import triton_kernels as triton_steps

    assert triton_steps._adam.__class__.__name__ == "InterpretedFunction"
    generator = torch.Generator().manual_seed(0)
    size = triton_steps.BLOCK + 100
    start = torch.randn(size, generator=generator)
    lanes = []
    for take in (step_lane, one_pass._launch):
        generator.manual_seed(1)
        states = tuple(torch.zeros(size) for _ in range(2 if steps == "adam" else 1))
        lane = Lane(start.clone(), start.bfloat16(), states, torch.zeros(size, dtype=torch.bfloat16))
        for index in range(3):
            lane.grad.copy_(torch.randn(size, generator=generator))
            rule = (
                AdamRule(index + 1, 0.01, 0.9, 0.95, 1e-8, 0.1, decoupled)
                if steps == "adam"
                else SgdRule(0.01, 0.9, 0.1, decoupled)
            )
            take(lane, rule, 0.3)
        lanes.append(lane)
    host, device = lanes
    torch.testing.assert_close(device.master, host.master, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(device.states, host.states, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(device.weights.float(), device.master, rtol=2**-7, atol=0)
