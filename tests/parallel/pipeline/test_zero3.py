"""zero=3 with a pipeline: parameters are gathered and gradients reduced once per step under every schedule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.choice import gate_runs
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
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
    """Return for each step the collectives over the shards, and the number of parameters still gathered at its end."""
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
        num_gathered = sum(type(param) is torch.nn.Parameter for _, param in model.named_parameters())
        found.append((counts, num_gathered))
        if index == 1:
            pipeline_of(model).evaluate(microbatches[:1], CASE.forward, lambda output, batch: None)
    return found


@pytest.mark.parametrize("schedule", gate_runs(["gpipe", "1f1b", "zb_v virtual_stages=2"], 2))
def test_units_are_gathered_and_reduced_once_per_step(schedule, ranks4):
    steps = {}
    for microbatches in (2, 8):
        for reshard in ("after_step", "after_backward"):
            plan = f"{PLAN} reshard={reshard} schedule={schedule} microbatches={microbatches}"
            for rank, found in enumerate(ranks4.run(count_traffic, plan)):
                _, (counts, num_gathered), (after_evaluation, _) = found
                assert counts["all_gather"] == counts["reduce_scatter"]
                assert num_gathered == 0
                steps.setdefault(rank, []).append(counts)
                # Units gathered by evaluation are present. The others are compared again, since the order changed.
                assert after_evaluation["reduce_scatter"] == counts["reduce_scatter"]
    for counts in steps.values():
        assert all(each == counts[0] for each in counts)
        assert 2 <= counts[0]["reduce_scatter"] <= 5  # two blocks, plus the embedding or head and the root


def losses_around_a_failure(plan_text: str) -> list[float]:
    """Return the losses of two steps with a failing step between them."""
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
        # Each rank runs four forwards before it waits for a gradient.
        with data_parallel(model).microbatch(last=True):
            for batch in local_microbatches(CASE.batch(1), plan, mesh.data.rank):
                stage = next(iter(pipeline_of(model).stages.values()))
                incoming = None if stage.is_first else Carried.one(torch.ones(2, 16, 16, dtype=torch.float64))
                stage.forward(forward, batch, incoming)
    except ValueError:
        fails = False
    losses.append(step(local_microbatches(CASE.batch(1), plan, mesh.data.rank)).loss)
    return losses


def test_step_after_a_failed_step_matches_zero_2(ranks4):
    plan = f"{PLAN} reshard=after_step microbatches=4 schedule=gpipe"
    zero_2 = plan.replace("zero=3 ", "zero=2 ").replace("reshard=after_step ", "")
    assert ranks4.run(losses_around_a_failure, plan) == ranks4.run(losses_around_a_failure, zero_2)


def test_bf16_is_close_to_zero_2(ranks4):
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
