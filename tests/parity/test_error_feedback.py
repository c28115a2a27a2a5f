"""Error feedback of int4 and low-rank compression: the error is added exactly once, under any plan and resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.choice import todays
from tests.parity.cases import LLAMA
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_slices
from weft.comm.mesh import build_mesh
from weft.comm.wire import low_rank
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.states.model_state import resume, state_slices
from weft.train.states.state_io import rank_group
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, local_microbatches, several_buckets

CASE = DecoderCase(LLAMA, num_steps=4)
INT4 = " compress=int4"
LOW = " compress=powersgd:1"
STAGES = ("dp_replicate=2", "dp_shard=2", "dp_shard=2 zero=1")
FOUR = (
    "dp_replicate=2 dp_shard=2 zero=3",
    "dp_replicate=2 dp_shard=2 zero=3 reshard=after_step accumulation=2",
    "dp_replicate=2 dp_shard=2 zero=2",
    "dp_replicate=4",
    "dp_replicate=2 tp=2 zero=1",
    "dp_shard=4 zero=1",
)


@pytest.fixture
def small(ranks2, ranks4) -> Iterator[None]:
    """Lower the size limit of low-rank compression, so that a small model's matrices are compressed."""
    for pool in (ranks2, ranks4):
        pool.run(set_least_numel, 32)
    yield
    for pool in (ranks2, ranks4):
        pool.run(set_least_numel, low_rank.LEAST_NUMEL)


def set_least_numel(numel: int) -> None:
    low_rank.LEAST_NUMEL = numel


def start(plan: Plan, mesh, load: str = "", max_grad_norm: float = 0.05):
    """Return a model and its step, new or from a checkpoint. The learning rate is 0, so that weights stay the same."""
    model = CASE.model()
    with several_buckets(model):
        parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_factors: list[float] = []  # factor of the next loss, used once

    def loss(output, batch):
        loss_sum, number = CASE.loss(output, batch)
        return (loss_sum * loss_factors.pop() if loss_factors else loss_sum), number

    step = TrainStep(model, optimizer, loss, mesh, forward=CASE.forward, max_grad_norm=max_grad_norm)
    data_parallel(model).coders.exact_steps = 0
    messages = resume(model, step.optimizer, load_checkpoint(load)) if load else []
    return model, step, messages, loss_factors


def num_tokens(index: int) -> int:
    return int((CASE.batch(index)["labels"] >= 0).sum())


def exact(index: int) -> dict[str, torch.Tensor]:
    model, batch = CASE.model(), CASE.batch(index)
    CASE.loss(CASE.forward(model, batch), batch)[0].backward()
    return {name: param.grad for name, param in model.named_parameters()}


def total_residuals(folder: str) -> dict[str, torch.Tensor]:
    """Return the sums over ranks of the residuals in a checkpoint, by parameter."""
    found: dict[str, torch.Tensor] = {}
    checkpoint = load_checkpoint(Path(folder))
    for name, tensor in checkpoint.tensors("owed").items() if "owed" in checkpoint.groups else ():
        param = name.rpartition("/residual.")[0]
        found[param] = found.get(param, 0.0) + tensor
    return found


def train_and_save(plan_text: str, saves: list[str]) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Train and save after each step. Return the applied gradients and clip factors."""
    plan = Plan.parse(plan_text + " precision=fp64")
    mesh = build_mesh(plan)
    model, step, _, loss_factors = start(plan, mesh)
    engine, found, clips = data_parallel(model), [], []
    for index, folder in enumerate(saves):
        if index == 1:
            loss_factors.append(float("nan"))
            assert step(local_microbatches(CASE.batch(0), plan, mesh.data.rank)).skipped
        metrics = step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
        clips.append(min(1.0, 0.05 / (metrics.grad_norm + 1e-6)))
        found.append({name: grad.clone() * num_tokens(index) for name, grad in engine.gradients()})
        save_slices(Path(folder), index + 1, state_slices(model, step.optimizer), {}, rank_group(mesh))
    return found, clips


def check_steps(pool, plan: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / str(index)) for index in range(3)]
    text = plan if "compress" in plan else plan + INT4
    applied, clips = pool.run(train_and_save, text, folders)[0]
    assert max(clips) < 0.95, "nothing was clipped"
    before, rounded = {name: torch.zeros_like(grad) for name, grad in applied[0].items()}, set[str]()
    for index, folder in enumerate(folders):
        residuals, grads = total_residuals(f"{folder}/step_{index + 1:08d}"), exact(index)
        assert residuals.keys() == grads.keys()
        for name, grad in grads.items():
            expected = clips[index] * (grad + before[name])
            torch.testing.assert_close(
                applied[index][name] + residuals[name], expected, rtol=0, atol=1e-9 * float(expected.abs().max() + 1)
            )
            has_residual = residuals[name].abs().max() > 1e-4 * grad.abs().max()
            assert has_residual or "powersgd" in text, f"{name}: nothing was rounded"
            rounded.add(name if has_residual else "")
        before = residuals
    assert len(rounded) > 3, "too few parameters have a residual"


@pytest.mark.parametrize("plan", [*STAGES, *(plan + LOW for plan in STAGES)])
def test_applied_gradient_plus_residual_is_exact(plan, ranks2, small, tmp_path):
    """Check that applied + new residual = clip * (gradient + old residual), with clipping and a skipped step."""
    check_steps(ranks2, plan, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("plan", [*FOUR, *(plan + LOW for plan in FOUR)])
def test_applied_gradient_plus_residual_is_exact_on_four_ranks(plan, ranks4, small, tmp_path):
    check_steps(ranks4, plan, tmp_path)


def train_one_more(plan_text: str, load: str, save: str) -> tuple[dict[str, torch.Tensor], float, list[str]]:
    """Train one more step from a checkpoint. Return the applied gradients, the clip factor and the messages."""
    plan = Plan.parse(plan_text + " precision=fp64")
    mesh = build_mesh(plan)
    model, step, messages, _ = start(plan, mesh, load)
    metrics = step(local_microbatches(CASE.batch(1), plan, mesh.data.rank))
    grads = {name: grad.clone() * num_tokens(1) for name, grad in data_parallel(model).gradients()}
    save_slices(Path(save), 2, state_slices(model, step.optimizer), {}, rank_group(mesh))
    return grads, min(1.0, 0.05 / (metrics.grad_norm + 1e-6)), messages


RETURNED = "the earlier compression error is added to the gradients of the first step"


@pytest.mark.parametrize(
    "saved, loaded, line",
    todays(
        [
            ("dp_replicate=2", "dp_replicate=2", ""),
            ("dp_replicate=2", "dp_replicate=4", "what 2 replicas' compression error is shared by 4 now"),
            (
                "dp_replicate=4",
                "dp_replicate=2 dp_shard=2 zero=2",
                "what 4 replicas' compression error is shared by 2 now",
            ),
            ("dp_replicate=4", "dp_shard=2 tp=2 zero=1", "what 4 replicas' compression error is shared by 2 now"),
            ("dp_shard=4 zero=1", "dp_shard=2 compress=none", RETURNED),
            ("dp_replicate=2 dp_shard=2 zero=1", "dp_shard=2 zero=3 compress=int8", RETURNED),
            ("dp_replicate=2" + LOW, "dp_replicate=2" + LOW, ""),
            ("dp_replicate=2 dp_shard=2 zero=3", "dp_replicate=2", ""),
            (
                "dp_replicate=4",
                "dp_replicate=2 dp_shard=2 zero=3",
                "what 4 replicas' compression error is shared by 2 now",
            ),
            ("dp_replicate=2 dp_shard=2 zero=3" + LOW, "dp_replicate=2 dp_shard=2 zero=2" + INT4, ""),
            (
                "dp_replicate=4" + LOW,
                "dp_replicate=2 dp_shard=2 zero=2" + LOW,
                "what 4 replicas' compression error is shared by 2 now",
            ),
            ("dp_replicate=2 dp_shard=2 zero=1" + LOW, "dp_replicate=2" + INT4, ""),
            ("dp_replicate=2" + LOW, "dp_shard=2 compress=none", RETURNED),
        ]
    ),
)
def test_other_plan_resumes_the_residuals(saved, loaded, line, ranks2, ranks4, small, tmp_path):
    """Check that each residual is added exactly once under other replicas, axes, stages and wire formats."""
    pools = {2: ranks2, 4: ranks4}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    first = saved if "compress" in saved else saved + INT4
    pools[Plan.parse(first).world_size].run(train_and_save, first, [one])
    text = loaded if "compress" in loaded else loaded + INT4
    grads, clip, messages = pools[Plan.parse(text).world_size].run(train_one_more, text, f"{one}/step_00000001", two)[0]
    assert messages == ([line] if line else [])
    before, after, summands = total_residuals(f"{one}/step_00000001"), total_residuals(f"{two}/step_00000002"), exact(1)
    for name, grad in summands.items():
        expected = clip * (grad + before[name])
        residual = after.get(name, torch.zeros_like(expected))
        slack = 0.02 if "int8" in text else 1e-9
        torch.testing.assert_close(
            grads[name] + residual, expected, rtol=0, atol=slack * float(expected.abs().max() + 1)
        )
    assert bool(after) == ("int4" in text or "powersgd" in text)


def train_two_more(plan_text: str, load: str) -> list[dict[str, torch.Tensor]]:
    """Train two unclipped steps from a checkpoint. Return the applied gradients."""
    plan = Plan.parse(plan_text + " precision=fp64")
    mesh = build_mesh(plan)
    model, step, _, _ = start(plan, mesh, load, max_grad_norm=1e9)
    found = []
    for index in (1, 2):
        step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
        found.append({name: grad.clone() * num_tokens(index) for name, grad in data_parallel(model).gradients()})
    return found


@pytest.mark.parametrize("plan", ["dp_replicate=2 compress=none", "dp_shard=2 zero=3 compress=none"])
def test_resumed_residual_is_added_in_the_first_step_only(plan, ranks2, tmp_path):
    """Resume with a lossless plan: the second step applies its own gradients only."""
    ranks2.run(train_and_save, STAGES[0] + INT4, [str(tmp_path)])
    saved = f"{tmp_path}/step_00000001"
    first, second = ranks2.run(train_two_more, plan, saved)[0]
    residuals, one, two = total_residuals(saved), exact(1), exact(2)
    for name, grad in first.items():
        slack = {"rtol": 0, "atol": 1e-9 * float(grad.abs().max() + 1)}
        torch.testing.assert_close(grad, one[name] + residuals[name], **slack)
        torch.testing.assert_close(second[name], two[name], **slack)


def own_loop(plan_text: str) -> str:
    model = parallelize(CASE.model(), build_mesh(Plan.parse(plan_text)))
    (part,) = local_microbatches(CASE.batch(0), Plan.parse(plan_text), 0)
    with pytest.raises(ModelError) as caught:
        CASE.loss(CASE.forward(model, part), part)[0].backward()
    return str(caught.value)


def test_backward_outside_a_train_step_is_rejected(ranks2):
    assert set(ranks2.run(own_loop, "dp_replicate=2" + INT4)) == {
        "compress=int4: backward() came outside a train step, and only a train step computes the residual of "
        "clipped gradients. Use run.train_step, or compress=int8, which has no residual."
    }


def compare_with_resumed(plan_text: str, folder: str) -> list[bool]:
    """Train four steps in one run and in two runs. Return whether each gradient is equal."""
    plan = Plan.parse(plan_text + " precision=fp32")
    mesh = build_mesh(plan)
    parts = [local_microbatches(CASE.batch(index), plan, mesh.data.rank) for index in range(4)]
    model, step, _, _ = start(plan, mesh)
    for index, part in enumerate(parts):
        step(part)
        if index == 1:
            save_slices(Path(folder), 2, state_slices(model, step.optimizer), {}, rank_group(mesh))
    straight = {name: grad.clone() for name, grad in data_parallel(model).gradients()}
    resumed, step, _, _ = start(plan, mesh, f"{folder}/step_00000002")
    for part in parts[2:]:
        step(part)
    return [torch.equal(straight[name], grad) for name, grad in data_parallel(resumed).gradients()]


@pytest.mark.parametrize("codec", [INT4, LOW])
def test_resumed_run_is_bitwise_equal(codec, ranks2, small, tmp_path):
    """Low-rank compression also carries its bases."""
    for index, plan in enumerate(("dp_replicate=2", "dp_shard=2 zero=1")):
        for equal in ranks2.run(compare_with_resumed, plan + codec, str(tmp_path / str(index))):
            assert all(equal), plan


@pytest.mark.full
@pytest.mark.parametrize("codec", [INT4, LOW])
def test_resumed_run_is_bitwise_equal_under_zero_3(codec, ranks4, small, tmp_path):
    for equal in ranks4.run(compare_with_resumed, "dp_replicate=2 dp_shard=2 zero=3" + codec, str(tmp_path)):
        assert all(equal)


def residual_sizes(plan_text: str) -> list[float]:
    """Return the size of the residuals after each step, with two exact first steps."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model, step, _, _ = start(plan, mesh)
    coders, found = data_parallel(model).coders, []
    coders.exact_steps = 2
    for index in range(3):
        step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
        residuals = [one.flat for one in data_parallel(model).error_feedback.residual_slices()]
        found.append(float(sum(one.abs().sum() for one in residuals)))
    return found


def test_first_steps_are_not_compressed(ranks2, small):
    for one, two, three in ranks2.run(residual_sizes, "dp_replicate=2" + LOW):
        assert one == two == 0 < three
