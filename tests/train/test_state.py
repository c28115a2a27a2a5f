"""A checkpoint of one plan resumes exactly under any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.full_state import capture, restore
from tests.parallel.loops import laid_out, mlp, rows, weights
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.save import save_checkpoint
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CheckpointError
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, local_microbatches

from tests.parity.cases import LLAMA, ImageCase  # isort: skip

STEPS, HALF = 6, 3
CASES = {"decoder": DecoderCase(LLAMA, num_steps=STEPS), "cnn": ImageCase(num_steps=STEPS)}


def make(plan_text: str, case_name: str) -> tuple[TrainStep, object, Plan]:
    case, plan = CASES[case_name], Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(case.model(), mesh)
    step = TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward, max_grad_norm=0.5)
    return step, case, plan


def train(plan_text: str, case_name: str, first: int, last: int, load: str = "", save: str = "") -> dict | None:
    """Train some steps from a checkpoint or from the start; save a checkpoint or return its contents."""
    step, case, plan = make(plan_text, case_name)
    if load:
        checkpoint = load_checkpoint(load)
        groups = {group: checkpoint.tensors(group) for group in ("model", "optimizer")}
        restore(step.model, step.optimizer, groups)
    losses = [
        step(local_microbatches(case.batch(index), plan, step.mesh.data.rank)).loss for index in range(first, last)
    ]
    is_first = step.mesh.rank == 0
    groups = capture(step.model, step.optimizer, keep=is_first)
    if save and is_first:
        save_checkpoint(save, last, groups, {})
    if not is_first:
        assert not groups["model"]
        assert not groups["optimizer"]
        return None
    clones = {group: {name: tensor.clone() for name, tensor in members.items()} for group, members in groups.items()}
    return {"losses": losses, **clones}


PLANS = {
    1: ["dp_replicate=1"],
    2: ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"],
    4: ["dp_replicate=4", "dp_shard=4 zero=1", "dp_replicate=2 dp_shard=2 zero=2"],
}


@pytest.mark.parametrize(
    ("source", "case_name"),
    [
        ("dp_shard=2 zero=1", "decoder"),
        pytest.param("dp_shard=2 zero=1", "cnn", marks=pytest.mark.full),
        ("dp_shard=2 zero=2", "cnn"),
        pytest.param("dp_replicate=2", "cnn", marks=pytest.mark.full),
    ],
)
def test_run_resumes_under_any_plan_like_an_undisturbed_run(source, case_name, tmp_path, ranks2, ranks4):
    undisturbed = train("precision=fp64", case_name, 0, STEPS)
    saved = ranks2.run(train, source + " precision=fp64", case_name, 0, HALF, save=str(tmp_path))[0]
    assert saved["losses"] == pytest.approx(undisturbed["losses"][:HALF], rel=1e-12)
    path = str(tmp_path / f"step_{HALF:08d}")
    for num_ranks, plans in PLANS.items():
        for plan in plans:
            arguments = (plan + " precision=fp64", case_name, HALF, STEPS)
            if num_ranks == 1:
                got = train(*arguments, load=path)
            else:
                got = (ranks2 if num_ranks == 2 else ranks4).run(train, *arguments, load=path)[0]
            assert got["losses"] == pytest.approx(undisturbed["losses"][HALF:], rel=1e-12), plan
            for group in ("model", "optimizer"):
                assert got[group].keys() == undisturbed[group].keys()
                for name, tensor in undisturbed[group].items():
                    scale = max(float(tensor.abs().max()), 1e-3)
                    assert float((got[group][name] - tensor).abs().max()) <= 1e-10 * scale, (plan, name)


def save_and_load_masters(plan_text: str) -> list[bool]:
    """Under bf16 a checkpoint stores the fp32 masters and restores them bitwise."""
    model, mesh = laid_out(plan_text, mlp(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = TrainStep(model, optimizer, lambda out, _: (out.float().square().sum(), len(out)), mesh)
    step(rows(0, None, torch.float32))
    groups = {group: dict(tensors) for group, tensors in capture(model, optimizer).items()}
    groups = {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in groups.items()}
    before = weights(model)
    step(rows(1, None, torch.float32))
    after = weights(model)
    restore(model, optimizer, groups)
    found = [all(torch.equal(weights(model)[name], before[name]) for name in before)]
    found.append(all(groups["model"][name].dtype == torch.float32 for name in before))
    step(rows(1, None, torch.float32))
    found.append(all(torch.equal(weights(model)[name], after[name]) for name in after))
    return found


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"])
def test_masters_are_restored_bitwise(plan, ranks2):
    assert ranks2.run(save_and_load_masters, plan + " precision=bf16") == [[True, True, True]] * 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.pop("0.bias"), "tensor '0.bias': the checkpoint lacks it."),
        (lambda model: model.update(extra=torch.zeros(1)), "tensor 'extra': the model has no such tensor."),
        (
            lambda model: model.update({"2.bias": torch.zeros(5)}),
            "tensor '2.bias': (5,) in the checkpoint, (4,) in the model.",
        ),
    ],
)
def test_checkpoint_of_another_model_is_rejected(change, text):
    model, _ = laid_out("precision=fp64", mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = {"model": dict(capture(model, optimizer)["model"]), "optimizer": {}}
    change(groups["model"])
    with pytest.raises(CheckpointError) as caught:
        restore(model, optimizer, groups)
    assert str(caught.value).startswith(text)


def test_state_of_an_unknown_parameter_is_rejected():
    model, _ = laid_out("precision=fp64", mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = {"model": capture(model, optimizer)["model"], "optimizer": {"9.weight/exp_avg": torch.zeros(2)}}
    with pytest.raises(CheckpointError, match=r"optimizer state '9.weight/exp_avg': this optimizer does not train"):
        restore(model, optimizer, groups)


def odd_states(plan_text: str) -> dict[str, tuple[int, ...]]:
    """Return the state shapes of an optimizer that needs full matrices."""
    torch.manual_seed(0)
    model, mesh = laid_out(plan_text, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    step = TrainStep(model, optimizer, lambda out, _: (out.square().sum(), len(out)), mesh)
    step(rows(0, mesh.rank, torch.float32))
    groups = capture(model, optimizer)
    restore(model, optimizer, groups)
    return {name: tuple(tensor.shape) for name, tensor in groups["optimizer"].items()}


def test_states_not_shaped_like_their_parameter_are_saved_unsharded(ranks2):
    want = odd_states("dp_replicate=1")
    assert want["0.weight/row_var"] == (16, 1)
    for got in ranks2.run(odd_states, "dp_shard=2 zero=1"):
        assert got == want


def evaluate_save_and_resume(plan_text: str) -> list[float]:
    """Evaluate, save on one rank and train, as the loop does after the best evaluation so far."""
    step, case, plan = make(plan_text, "decoder")
    losses = []
    for index in range(3):
        batches = local_microbatches(case.batch(index), plan, step.mesh.data.rank)
        with torch.no_grad():
            case.forward(step.model, batches[0])
        capture(step.model, step.optimizer, keep=step.mesh.rank == 0)
        losses.append(step(batches).loss)
    return losses


@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3", "dp_shard=2 zero=3 reshard=after_step", "dp_shard=2 zero=2"])
def test_saving_on_one_rank_after_an_evaluation_keeps_ranks_in_sync(plan, ranks2):
    """Under zero=3, a state dict on one rank resharded only that rank's weights, and the next forward hung."""
    (expected,) = [evaluate_save_and_resume("precision=fp64")]
    for losses in ranks2.run(evaluate_save_and_resume, f"{plan} precision=fp64"):
        assert losses == pytest.approx(expected, rel=1e-10)
