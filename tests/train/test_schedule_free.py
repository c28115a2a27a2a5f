"""Schedule-free AdamW: its formula, and its weights under every plan, in evaluations and checkpoints."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.parity.cases import LLAMA
from weft.checkpoint.load import load_checkpoint
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.errors import ConfigError, PlanError
from weft.optim.schedule_free import ScheduleFreeAdamW
from weft.parallel.state.gradients import data_parallel
from weft.train.states.averaged_weights import averaged, check_averages
from weft.train.step.evaluation import mean_loss
from weft.verify.parity import DecoderCase, local_microbatches

CASE = DecoderCase(LLAMA)
HALF, STEPS = 2, 4
PLANS = (
    "dp_replicate=2",
    "dp_shard=2 zero=2",
    "dp_shard=2 zero=1 offload=optimizer",
    "dp_shard=2 zero=3",
    "tp=2 sp=on",
    "pp=2 microbatches=2",
)


def test_weights_equal_the_formula_of_the_paper():
    """The paper has x, y and z, and normalizes gradients as Adam without momentum."""
    y = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    optimizer = ScheduleFreeAdamW([y], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    x, z, squares, total = y.detach().clone(), y.detach().clone(), torch.zeros(3, 4, dtype=torch.float64), 0.0
    for number, lr in enumerate((0.05, 0.1, 0.02), 1):  # each step's weight is the largest rate so far, squared
        grad = torch.randn(3, 4, dtype=torch.float64)
        y.grad, optimizer.param_groups[0]["lr"] = grad, lr
        before = y.detach().clone()
        optimizer.step()
        squares = 0.9 * squares + 0.1 * grad**2
        z = z - lr * (grad / ((squares / (1 - 0.9**number)).sqrt() + 1e-3) + 0.2 * before)
        total += max(lr, 0.05 if number == 1 else 0.1) ** 2
        share = max(lr, 0.05 if number == 1 else 0.1) ** 2 / total
        x = (1 - share) * x + share * z
        assert torch.allclose(y, 0.2 * z + 0.8 * x, rtol=1e-12)
        assert torch.allclose(optimizer.average(y.detach(), optimizer.state[y]["z"]), x, rtol=1e-12)


class Script:
    """A script with a schedule-free optimizer."""

    def __init__(self, plan_text: str):
        self.plan = plan = Plan.parse(f"{plan_text} precision=fp64")
        self.run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
        self.model = self.run.parallelize(CASE.model())
        self.step = self.run.train_step(
            self.model, ScheduleFreeAdamW, CASE.loss, forward=CASE.forward, lr=1e-2, weight_decay=0.1
        )

    def train(self, first: int, last: int) -> list[float]:
        rank = self.run.mesh.data.rank
        return [self.step(local_microbatches(CASE.batch(one), self.plan, rank)).loss for one in range(first, last)]

    def loss_of_averages(self) -> float:
        """Return the loss of the averages on another batch, and check that the trained weights come back exactly."""
        self.step.wait_for_weights()
        engine, rank = data_parallel(self.model), self.run.mesh.data.rank
        before = {name: one.clone() for name, one in engine.local_weights().items()}
        with averaged(self.model, self.step.optimizer):
            batches = [local_microbatches(CASE.batch(9), self.plan, rank)]
            found = mean_loss(self.model, batches, self.run.mesh, CASE.loss, CASE.forward)[0]
            assert any(not torch.equal(one, before[name]) for name, one in engine.local_weights().items())
        assert all(torch.equal(one, before[name]) for name, one in engine.local_weights().items())
        return found


def halves(plan: str, folder: str, source: str = "") -> tuple[list[float], float, str]:
    """Train and save the first half, or load `source` and train the second half."""
    script, path = Script(plan), ""
    if source:
        script.run.load(source, model=script.model, optimizer=script.step)
        losses = script.train(HALF, STEPS)
    else:
        losses = script.train(0, HALF)
        path = str(script.run.save(folder, step=HALF, model=script.model, optimizer=script.step))
    return losses, script.loss_of_averages(), path


def test_weights_and_averages_match_one_process_and_resume_under_another_plan(tmp_path, ranks2):
    alone = Script("dp_replicate=1")
    first, first_average = alone.train(0, HALF), alone.loss_of_averages()
    averages = {name: one.detach().clone() for name, one in alone.model.named_parameters()}
    with averaged(alone.model, alone.step.optimizer):
        averages = {name: one.detach().clone() for name, one in alone.model.named_parameters()}
    second, second_average = alone.train(HALF, STEPS), alone.loss_of_averages()
    assert abs(first_average - second_average) > 1e-6
    for place, plan in enumerate(PLANS):
        found = ranks2.run(halves, plan, str(tmp_path / str(place)))
        for losses, average, _ in found:
            assert [*losses, average] == pytest.approx([*first, first_average], rel=1e-9), plan
        stored = load_checkpoint(found[0][2]).tensors("model")
        for name, tensor in averages.items():
            torch.testing.assert_close(stored[name], tensor, rtol=1e-9, atol=1e-12)
    for place, plan in enumerate(PLANS):
        source = str(tmp_path / str((place + 1) % len(PLANS)))
        for losses, average, _ in ranks2.run(halves, plan, "", source):
            assert [*losses, average] == pytest.approx([*second, second_average], rel=1e-9), plan


@pytest.mark.parametrize(
    "words, text",
    [
        (["optimizer.name=schedule_free"], "averages the weights of a constant rate. Use schedule.kind=constant"),
        (["optimizer.name=schedulefree:AdamWScheduleFree"], "Use optimizer.name=schedule_free, which is Weft's"),
        (
            ["optimizer.name=schedule_free_adamw", "schedule.kind=constant", "plan=dp_shard=2 gather=diff4"],
            "gather=diff4 encodes the weights",
        ),
        (
            ["optimizer.name=schedule_free", "schedule.kind=constant", "plan=dp_replicate=2 sync=average:4"],
            "each replica would evaluate another average",
        ),
    ],
)
def test_refused(words, text):
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert text in str(caught.value)


def test_a_chosen_plan_is_checked_too():
    optimizer = ScheduleFreeAdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(PlanError, match="sync=average:4 averages the replicas' weights"):
        check_averages(Plan.parse("dp_replicate=2 sync=average:4"), optimizer)
