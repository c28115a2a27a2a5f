"""reshard=after_forward:N: backward gathers from secondary shards on neighboring ranks, with unchanged results."""

from __future__ import annotations

import pytest
import torch

from tests.parity.cases import LLAMA
from tests.parity.moe_cases import MOE
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.step.evaluation import mean_loss
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, ParityResult, local_microbatches, train_case
from weft.verify.rank_pool import RankPool

CASE = DecoderCase(LLAMA, num_steps=3, max_grad_norm=0.5)
EXPERTS = DecoderCase(MOE, num_steps=2)
NEAR = "dp_shard=4 zero=3 reshard=after_forward:2"
PLANS = (
    NEAR,
    f"{NEAR} recompute=full accumulation=2",
    f"{NEAR} offload=params+optimizer recompute=full",
    f"{NEAR} offload=params:0.5 recompute=selective accumulation=2",
)


def train_all(plans: tuple[str, ...], case: DecoderCase) -> list[ParityResult]:
    return [train_case(f"{plan} precision=fp64", case) for plan in plans]


def test_secondary_shards_match_one_process(ranks4):
    reference = train_case("precision=fp64", CASE)
    for rank, answers in enumerate(ranks4.run(train_all, PLANS, CASE)):
        for plan, found in zip(PLANS, answers, strict=True):
            assert found.largest_difference(reference) < 1e-10, (plan, rank)


@pytest.mark.full
def test_secondary_shards_with_experts_match_one_process(ranks4):
    reference = train_case("precision=fp64", EXPERTS)
    for found, *_ in ranks4.run(train_all, (f"{NEAR} ep=2",), EXPERTS):
        assert found.largest_difference(reference) < 1e-10


@pytest.mark.full
def test_secondary_shards_with_replicas_match_one_process():
    reference, experts = train_case("precision=fp64", CASE), train_case("precision=fp64", EXPERTS)
    with RankPool(8) as pool:
        for (found,) in pool.run(train_all, (f"dp_replicate=2 {NEAR}",), CASE):
            assert found.largest_difference(reference) < 1e-10
        for (found,) in pool.run(train_all, (f"dp_replicate=2 {NEAR} ep=2",), EXPERTS):
            assert found.largest_difference(experts) < 1e-10


def train(plan_text: str, folder: str = "") -> tuple[ParityResult, dict[str, int], list[float]]:
    """Evaluate after each step and load other weights after one, which must invalidate secondary shards."""
    ledger, plan, result = Ledger(), Plan.parse(plan_text), ParityResult()
    mesh = build_mesh(plan, record=ledger.record)
    model = parallelize(CASE.model(), mesh)
    step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward)
    evaluated = []

    def evaluate() -> None:
        part = local_microbatches(CASE.batch(9), plan, mesh.data.rank)
        evaluated.append(mean_loss(model, [part], mesh, CASE.loss, CASE.forward)[0])

    for index in range(3):
        evaluate()
        result.losses.append(step(local_microbatches(CASE.batch(index), plan, mesh.data.rank)).loss)
        evaluate()
        for weight in data_parallel(model).local_weights().values():
            weight.mul_(1.01)
        data_parallel(model).publish()
    result.weights = {name: one.clone() for name, one in data_parallel(model).weights()}
    sent: dict[str, int] = {}
    for axis, name, found in ledger.rows():
        if name == "all_gather":
            sent[axis] = sent.get(axis, 0) + found.sent_bytes
    return result, sent, evaluated


def test_secondary_shards_are_invalidated_with_their_weights(ranks4):
    plain = ranks4.run(train, "dp_shard=4 zero=3 precision=fp64")
    second = ranks4.run(train, f"{NEAR} precision=fp64")
    for before, after in zip(plain, second, strict=True):
        assert before[0].losses == after[0].losses
        assert before[2] == after[2]
        assert all(torch.equal(one, after[0].weights[name]) for name, one in before[0].weights.items())
    assert "dp_shard/2" not in plain[0][1]
    # Backward, and a forward after another forward, gather the freed blocks from neighbors.
    assert second[0][1]["dp_shard/2"] > 0.2 * plain[0][1]["dp_shard"]
    assert second[0][1]["dp_shard"] < 0.8 * plain[0][1]["dp_shard"]


def train_coded(plan_text: str) -> ParityResult:
    return train_case(f"{plan_text} gather=int8 precision=fp64", CASE)


def test_int8_secondary_shards_are_not_rounded_again(ranks4):
    plain = ranks4.run(train_coded, "dp_shard=4 zero=3")
    second = ranks4.run(train_coded, f"{NEAR} recompute=full")
    for before, after in zip(plain, second, strict=True):
        assert after.largest_difference(before) < 1e-12
