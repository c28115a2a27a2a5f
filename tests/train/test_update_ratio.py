"""Ratio of update to weight norm: equal under every plan, and about equal on a sample of the weights."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from tests.parity.cases import LLAMA
from tests.parity.moe_cases import MOE, MoECase
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.optim.muon import Muon
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.step import checks as update_ratio
from weft.train.step.train_step import TrainStep
from weft.verify.parity import Case, DecoderCase, local_microbatches

DENSE, EXPERTS = DecoderCase(LLAMA), MoECase(MOE, num_steps=3)


def ratios(plan_text: str, case: Case, late: bool = False, muon: bool = False, steps=range(3)) -> list[float | None]:
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(case.model(), mesh)
    optimizer = Muon(model.parameters(), lr=0.02) if muon else case.optimizer_of(model)
    if late:
        for group in optimizer.param_groups:
            group["fused"] = True
    step = TrainStep(model, optimizer, case.loss, mesh, forward=case.forward, max_grad_norm=0.5, reads_late=late)
    found = []
    for number in steps:
        step.measures_update = number != 1
        found.append(step(local_microbatches(case.batch(number), plan, mesh.data.rank)))
    return [one.update_ratio for one in found]


def reference_ratios(case: Case) -> list[float | None]:
    """Compute the ratios in one process from the weights before and after each step."""
    mesh = build_mesh(Plan.parse("precision=fp64"))
    model = parallelize(case.model(), mesh)
    step = TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward, max_grad_norm=0.5)
    found: list[float | None] = []
    for number in range(3):
        before = [param.detach().clone() for param in model.parameters()]
        assert step(local_microbatches(case.batch(number), mesh.plan, 0)).update_ratio is None
        pairs = [*zip(before, [param.detach() for param in model.parameters()], strict=True)]
        moved = sum(float((new - old).square().sum()) for old, new in pairs)
        found.append(math.sqrt(moved / sum(float(new.square().sum()) for _, new in pairs)))
    found[1] = None
    return found


def is_near(ours: list[float | None], theirs: list[float | None], rel: float) -> bool:
    """Return whether both agree. The second step is not measured."""
    assert ours[1] is theirs[1] is None
    return ours[::2] == pytest.approx(theirs[::2], rel=rel)


@functools.cache
def reference_of(case_name: str) -> list[float | None]:
    return reference_ratios(DENSE if case_name == "dense" else EXPERTS)


def over_ranks(plans: list[tuple[str, bool]], case: Case) -> list[list[float | None]]:
    return [ratios(f"precision=fp64 {plan}", case, late) for plan, late in plans]


#: Plans, with whether the device decides the step.
SOME = [
    ("dp_shard=4 zero=1", True),
    ("dp_replicate=2 dp_shard=2 zero=3", False),
    ("tp=2 dp_shard=2 zero=2", False),
    ("pp=2 tp=2 accumulation=2", False),  # the tied embedding is on the first and the last stage
]
MORE = [
    ("dp_replicate=4", False),
    ("dp_shard=4 zero=2 accumulation=2", False),
    ("dp_shard=4 zero=3", True),
    ("dp_replicate=2 dp_shard=2 zero=1", False),
    ("tp=2 dp_shard=2 zero=3", False),
    ("tp=2 dp_replicate=2", True),
    ("pp=2 dp_shard=2 zero=1 accumulation=2", False),
    ("pp=2 dp_shard=2 zero=3 accumulation=2", False),
    ("cp=2 dp_shard=2 zero=3", False),
]


@pytest.mark.parametrize("plans", [SOME, pytest.param(MORE, marks=pytest.mark.full)], ids=["some", "more"])
def test_ratio_matches_one_process_under_every_plan(plans, ranks4):
    for found in ranks4.run(over_ranks, plans, DENSE):
        for (plan, _), ours in zip(plans, found, strict=True):
            assert is_near(ours, reference_of("dense"), 1e-9), plan


def test_experts_are_counted_once(ranks4):
    plans = [("dp_shard=4 ep=2 zero=1", False), ("dp_shard=4 ep=4 zero=3", False)]
    for found in ranks4.run(over_ranks, plans, EXPERTS):
        for (plan, _), ours in zip(plans, found, strict=True):
            assert is_near(ours, reference_of("experts"), 1e-9), plan


def test_ratio_with_muon_and_rounded_masters():
    assert (ratios("precision=fp64", DENSE, muon=True)[2] or 0.0) > 0
    mixed = ratios("precision=bf16", DENSE)
    assert is_near(mixed, ratios("precision=fp64", DENSE), 0.05)
    assert mixed != ratios("precision=fp64", DENSE)


def test_sampled_ratio_is_about_the_exact_one(monkeypatch):
    spec = dataclasses.replace(LLAMA, dim=128, ffn_dim=384, vocab_size=600)
    whole = ratios("precision=fp64", DecoderCase(spec), steps=range(2))[0]
    monkeypatch.setattr(update_ratio, "MOST_ELEMENTS", 1)
    assert ratios("precision=fp64", DecoderCase(spec), steps=range(2))[0] == pytest.approx(whole, rel=0.03)
    engine = data_parallel(parallelize(DecoderCase(spec).model(), build_mesh(Plan.parse("precision=fp64"))))
    ((weights, seen),) = update_ratio.UpdateRatio(engine, torch.device("cpu"))._sampled_views()
    every = sum(one.numel() for one, _ in engine.counted_weights())
    assert weights.numel() == sum(view.numel() for view in seen) < 0.05 * every
    assert float(weights.sum()) == pytest.approx(every)


def test_stride_between_sampled_runs_is_an_odd_prime():
    assert [update_ratio._stride(count, 10) for count in (0, 10, 11, 30, 40, 80, 900)] == [0, 1, 3, 3, 5, 11, 97]


@pytest.mark.parametrize("late", [False, True])
def test_skipped_step_has_no_ratio(late):
    factor = [1.0]

    def spoiled(output, batch):
        loss, number = DENSE.loss(output, batch)
        return loss * factor[0], number

    mesh = build_mesh(Plan.parse("precision=fp32"))
    model = parallelize(DENSE.model(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, spoiled, mesh, forward=DENSE.forward, reads_late=late)
    step.measures_update, found = True, []
    for factor[0] in (1.0, math.inf, 1.0):
        metrics = step(local_microbatches(DENSE.batch(0), mesh.plan, 0))
        step.finalize(metrics)
        found.append(metrics.update_ratio)
    assert found[1] is None
    assert found[0] > 0
    assert found[2] > 0
