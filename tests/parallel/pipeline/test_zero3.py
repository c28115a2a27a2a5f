"""zero=3 under a pipeline: parameters are gathered once in a step and gradients reduced once, whatever the schedule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.choice import gate_runs
from weft.comm.mesh import build_mesh
from weft.config.decoder_shape import DecoderSpec
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.pipeline.boundary import Carried
from weft.parallel.pipeline.runtime import pipeline_of
from weft.parallel.state.gradients import data_parallel
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, local_microbatches

SPEC = DecoderSpec(vocab_size=61, dim=16, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32)
CASE = DecoderCase(SPEC, num_steps=3, global_batch=16)
PLAN = "pp=2 dp_shard=2 zero=3 precision=fp64"


def count_traffic(plan_text: str) -> list[tuple[Counter[str], int]]:
    """For each step: collectives over the shards, and how many parameters are gathered when the step is over."""
    sent: list[tuple[str, str]] = []
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan, record=lambda axis, operation, *rest: sent.append((axis, operation)))
    model = parallelize(CASE.model(), mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward)
    names = {mesh["dp_shard"].name, mesh.data.name}
    found = []
    for index in range(CASE.num_steps):
        sent.clear()
        microbatches = local_microbatches(CASE.batch(index), plan, mesh.data.rank)
        step(microbatches)
        counts = Counter(operation for axis, operation in sent if axis in names)
        whole = sum(type(param) is torch.nn.Parameter for _, param in model.named_parameters())
        found.append((counts, whole))
        if index == 1:
            pipeline_of(model).evaluate(microbatches[:1], CASE.forward, lambda output, batch: None)
    return found


@pytest.mark.parametrize("schedule", gate_runs(["gpipe", "1f1b", "zb_v virtual_stages=2"], 1, 2))
def test_units_are_gathered_and_reduced_once_in_a_step(schedule, ranks4):
    steps = {}
    for microbatches in (2, 8):
        for reshard in ("after_step", "after_backward"):
            plan = f"{PLAN} reshard={reshard} schedule={schedule} microbatches={microbatches}"
            for rank, found in enumerate(ranks4.run(count_traffic, plan)):
                _, (counts, whole), (after_evaluation, _) = found
                assert counts["all_gather"] == counts["reduce_scatter"]
                assert whole == 0
                steps.setdefault(rank, []).append(counts)
                # What evaluation gathered is there already; the rest is compared again, since the order changed.
                assert after_evaluation["reduce_scatter"] == counts["reduce_scatter"]
    for counts in steps.values():
        assert all(each == counts[0] for each in counts)
        assert 2 <= counts[0]["reduce_scatter"] <= 5  # two blocks; at the ends those, and what is left to the root


def break_off(plan_text: str) -> list[float]:
    """Losses of two steps, with one between them that fails in its schedule."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(CASE.model(), mesh)
    calls = 0
    fails = False

    def forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if fails and calls > 2:
            raise ValueError("on all ranks")
        return CASE.forward(model, batch)

    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=forward)
    losses = [step(local_microbatches(CASE.batch(0), plan, mesh.data.rank)).loss]
    fails, calls = True, 0
    try:
        # Each rank has four forwards of its own before it waits for a gradient.
        with data_parallel(model).microbatch(last=True):
            for batch in local_microbatches(CASE.batch(1), plan, mesh.data.rank):
                stage = next(iter(pipeline_of(model).stages.values()))
                incoming = None if stage.is_first else Carried.one(torch.ones(2, 16, 16, dtype=torch.float64))
                stage.forward(forward, batch, incoming)
    except ValueError:
        fails = False
    losses.append(step(local_microbatches(CASE.batch(1), plan, mesh.data.rank)).loss)
    return losses


def test_a_step_after_one_that_broke_off(ranks4):
    plan = f"{PLAN} reshard=after_step microbatches=4 schedule=gpipe"
    assert ranks4.run(break_off, plan) == ranks4.run(break_off, plan.replace("zero=3 ", "zero=2 ").replace(
        "reshard=after_step ", ""))  # fmt: skip


def test_bf16_stays_near_zero_2(ranks4):
    losses = [
        ranks4.run(losses_of, f"pp=2 dp_shard=2 {zero} precision=bf16 microbatches=4")[0]
        for zero in ("zero=2", "zero=3 reshard=after_step")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2**-6)
    assert losses[1][0] > losses[1][-1]


def losses_of(plan_text: str) -> list[float]:
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(CASE.model().float(), mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward)
    return [step(local_microbatches(CASE.batch(0), plan, mesh.data.rank)).loss for _ in range(4)]
