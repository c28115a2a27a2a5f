"""int4, low rank: what is rounded off is owed; nothing is lost or comes twice, under any plan and resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity.cases import LLAMA
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_slices
from weft.comm.mesh import build_mesh
from weft.comm.wire import low_rank
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.model_state import resume, state_slices
from weft.train.state_io import rank_group
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
    """The matrices of a small model are worth it."""
    for pool in (ranks2, ranks4):
        pool.run(set_least, 32)
    yield
    for pool in (ranks2, ranks4):
        pool.run(set_least, low_rank.LEAST_NUMEL)


def set_least(numel: int) -> None:
    low_rank.LEAST_NUMEL = numel


def start(plan: Plan, mesh, load: str = "", max_grad_norm: float = 0.05):
    """A model and its step, from a checkpoint or the start; weights stay as they are, so that gradients are known."""
    model = CASE.model()
    with several_buckets(model):
        parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    spoil: list[float] = []  # what the next loss is multiplied by, once

    def loss(output, batch):
        loss_sum, number = CASE.loss(output, batch)
        return (loss_sum * spoil.pop() if spoil else loss_sum), number

    step = TrainStep(model, optimizer, loss, mesh, forward=CASE.forward, max_grad_norm=max_grad_norm)
    data_parallel(model).coders.exact_steps = 0
    told = resume(model, step.optimizer, load_checkpoint(load)) if load else []
    return model, step, told, spoil


def num_tokens(index: int) -> int:
    return int((CASE.batch(index)["labels"] >= 0).sum())


def exact(index: int) -> dict[str, torch.Tensor]:
    model, batch = CASE.model(), CASE.batch(index)
    CASE.loss(CASE.forward(model, batch), batch)[0].backward()
    return {name: param.grad for name, param in model.named_parameters()}


def total_owed(folder: str) -> dict[str, torch.Tensor]:
    """Sums of all debts in a checkpoint, by parameter."""
    found: dict[str, torch.Tensor] = {}
    checkpoint = load_checkpoint(Path(folder))
    for name, tensor in checkpoint.tensors("owed").items() if "owed" in checkpoint.groups else ():
        param = name.rpartition("/residual.")[0]
        found[param] = found.get(param, 0.0) + tensor
    return found


def steps_by_hand(plan_text: str, saves: list[str]) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Save after each step, with what each applied."""
    plan = Plan.parse(plan_text + " precision=fp64")
    mesh = build_mesh(plan)
    model, step, _, spoil = start(plan, mesh)
    engine, found, clips = data_parallel(model), [], []
    for index, folder in enumerate(saves):
        if index == 1:
            spoil.append(float("nan"))
            assert step(local_microbatches(CASE.batch(0), plan, mesh.data.rank)).skipped
        metrics = step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
        clips.append(min(1.0, 0.05 / (metrics.grad_norm + 1e-6)))
        found.append({name: grad.clone() * num_tokens(index) for name, grad in engine.gradients()})
        save_slices(Path(folder), index + 1, state_slices(model, step.optimizer), {}, rank_group(mesh))
    return found, clips


def check_steps(pool, plan: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / str(index)) for index in range(3)]
    text = plan if "compress" in plan else plan + INT4
    applied, clips = pool.run(steps_by_hand, text, folders)[0]
    assert max(clips) < 0.95, "nothing was clipped"
    before, rounded = {name: torch.zeros_like(grad) for name, grad in applied[0].items()}, set[str]()
    for index, folder in enumerate(folders):
        owed, grads = total_owed(f"{folder}/step_{index + 1:08d}"), exact(index)
        assert owed.keys() == grads.keys()
        for name, grad in grads.items():
            due = clips[index] * (grad + before[name])
            torch.testing.assert_close(
                applied[index][name] + owed[name], due, rtol=0, atol=1e-9 * float(due.abs().max() + 1)
            )
            leaves_out = owed[name].abs().max() > 1e-4 * grad.abs().max()
            assert leaves_out or "powersgd" in text, f"{name}: nothing was rounded off"
            rounded.add(name if leaves_out else "")
        before = owed
    assert len(rounded) > 3, "few matrices were left out of"


@pytest.mark.parametrize("plan", [*STAGES, *(plan + LOW for plan in STAGES)])
def test_what_is_applied_and_what_is_owed_are_the_gradients_and_what_was_owed(plan, ranks2, small, tmp_path):
    """Through clipping at each step, and a skipped step, which changes nothing of it."""
    check_steps(ranks2, plan, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("plan", [*FOUR, *(plan + LOW for plan in FOUR)])
def test_so_it_is_on_four_ranks(plan, ranks4, small, tmp_path):
    check_steps(ranks4, plan, tmp_path)


def go_on(plan_text: str, load: str, save: str) -> tuple[dict[str, torch.Tensor], float, list[str]]:
    """One more step from a checkpoint: what it applied, and by how much it clipped."""
    plan = Plan.parse(plan_text + " precision=fp64")
    mesh = build_mesh(plan)
    model, step, told, _ = start(plan, mesh, load)
    metrics = step(local_microbatches(CASE.batch(1), plan, mesh.data.rank))
    grads = {name: grad.clone() * num_tokens(1) for name, grad in data_parallel(model).gradients()}
    save_slices(Path(save), 2, state_slices(model, step.optimizer), {}, rank_group(mesh))
    return grads, min(1.0, 0.05 / (metrics.grad_norm + 1e-6)), told


GIVEN = "the earlier compression error is added to the gradients of the first step"


@pytest.mark.parametrize(
    "saved, loaded, line",
    [
        ("dp_replicate=2", "dp_replicate=2", ""),
        ("dp_replicate=2", "dp_replicate=4", "what 2 replicas' compression error is shared by 4 now"),
        (
            "dp_replicate=4",
            "dp_replicate=2 dp_shard=2 zero=2",
            "what 4 replicas' compression error is shared by 2 now",
        ),
        ("dp_replicate=4", "dp_shard=2 tp=2 zero=1", "what 4 replicas' compression error is shared by 2 now"),
        ("dp_shard=4 zero=1", "dp_shard=2 compress=none", GIVEN),
        ("dp_replicate=2 dp_shard=2 zero=1", "dp_shard=2 zero=3 compress=int8", GIVEN),
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
        ("dp_replicate=2" + LOW, "dp_shard=2 compress=none", GIVEN),
    ],
)
def test_another_plan_takes_over_what_is_owed(saved, loaded, line, ranks2, ranks4, small, tmp_path):
    """Nothing is lost and nothing comes twice, under other replicas, axes, stages and wires."""
    pools = {2: ranks2, 4: ranks4}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    first = saved if "compress" in saved else saved + INT4
    pools[Plan.parse(first).world_size].run(steps_by_hand, first, [one])
    text = loaded if "compress" in loaded else loaded + INT4
    grads, clip, told = pools[Plan.parse(text).world_size].run(go_on, text, f"{one}/step_00000001", two)[0]
    assert told == ([line] if line else [])
    before, after, summands = total_owed(f"{one}/step_00000001"), total_owed(f"{two}/step_00000002"), exact(1)
    for name, grad in summands.items():
        due = clip * (grad + before[name])
        left = after.get(name, torch.zeros_like(due))
        slack = 0.02 if "int8" in text else 1e-9
        torch.testing.assert_close(grads[name] + left, due, rtol=0, atol=slack * float(due.abs().max() + 1))
    assert bool(after) == ("int4" in text or "powersgd" in text)


def pay_once(plan_text: str, load: str) -> list[dict[str, torch.Tensor]]:
    """What each of two steps from a checkpoint applied, neither clipped."""
    plan = Plan.parse(plan_text + " precision=fp64")
    mesh = build_mesh(plan)
    model, step, _, _ = start(plan, mesh, load, max_grad_norm=1e9)
    found = []
    for index in (1, 2):
        step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
        found.append({name: grad.clone() * num_tokens(index) for name, grad in data_parallel(model).gradients()})
    return found


@pytest.mark.parametrize("plan", ["dp_replicate=2 compress=none", "dp_shard=2 zero=3 compress=none"])
def test_what_was_owed_is_paid_in_the_first_step_alone(plan, ranks2, tmp_path):
    """By a plan that itself rounds nothing: the second step has its own gradients and nothing else."""
    ranks2.run(steps_by_hand, STAGES[0] + INT4, [str(tmp_path)])
    saved = f"{tmp_path}/step_00000001"
    first, second = ranks2.run(pay_once, plan, saved)[0]
    owed, one, two = total_owed(saved), exact(1), exact(2)
    for name, grad in first.items():
        slack = {"rtol": 0, "atol": 1e-9 * float(grad.abs().max() + 1)}
        torch.testing.assert_close(grad, one[name] + owed[name], **slack)
        torch.testing.assert_close(second[name], two[name], **slack)


def own_loop(plan_text: str) -> str:
    model = parallelize(CASE.model(), build_mesh(Plan.parse(plan_text)))
    (part,) = local_microbatches(CASE.batch(0), Plan.parse(plan_text), 0)
    with pytest.raises(ModelError) as told:
        CASE.loss(CASE.forward(model, part), part)[0].backward()
    return str(told.value)


def test_a_loop_of_ones_own_is_refused(ranks2):
    assert set(ranks2.run(own_loop, "dp_replicate=2" + INT4)) == {
        "compress=int4: backward() came outside of a train step, and only a train step computes the residual of "
        "clipped gradients. Use run.train_step, or compress=int8, which has no residual."
    }


def stop_and_go_on(plan_text: str, folder: str) -> list[bool]:
    """Three steps in one run, and in two runs."""
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
def test_a_resumed_run_has_the_same_bits(codec, ranks2, small, tmp_path):
    """What low rank carries besides debts, its bases, too."""
    for index, plan in enumerate(("dp_replicate=2", "dp_shard=2 zero=1")):
        for equal in ranks2.run(stop_and_go_on, plan + codec, str(tmp_path / str(index))):
            assert all(equal), plan


@pytest.mark.full
@pytest.mark.parametrize("codec", [INT4, LOW])
def test_so_does_one_under_zero_3(codec, ranks4, small, tmp_path):
    for equal in ranks4.run(stop_and_go_on, "dp_replicate=2 dp_shard=2 zero=3" + codec, str(tmp_path)):
        assert all(equal)


def count_exact(plan_text: str) -> list[float]:
    """What is owed after each step, where the first two are exact."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model, step, _, _ = start(plan, mesh)
    coders, found = data_parallel(model).coders, []
    coders.exact_steps = 2
    for index in range(3):
        step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
        debts = [
            tensor for stretch in data_parallel(model).error_feedback.residual_slices() for tensor in [stretch.flat]
        ]
        found.append(float(sum(debt.abs().sum() for debt in debts)))
    return found


def test_first_steps_are_exact(ranks2, small):
    for one, two, three in ranks2.run(count_exact, "dp_replicate=2" + LOW):
        assert one == two == 0 < three
