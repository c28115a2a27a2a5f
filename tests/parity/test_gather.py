"""gather=int8: every zero=3 layout matches one process with equally rounded weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.parity.cases import LLAMA
from tests.parity.compiled import train_compiled
from tests.parity.moe_cases import MOE
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.comm.wire.codes import RowSlice
from weft.config.plan import Plan
from weft.optim.step_decision import clip_factor, global_norm
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, ParityResult, local_microbatches, train_case

CASE = DecoderCase(LLAMA, num_steps=3, max_grad_norm=0.5)
EXPERTS = DecoderCase(MOE, num_steps=2)
UNBALANCED = DecoderCase(dataclasses.replace(MOE, balance="none"), num_steps=2)
TWO = (
    "dp_shard=2",
    "dp_shard=2 accumulation=2 reshard=after_step",
    "dp_shard=2 recompute=full",
    "dp_shard=2 recompute=selective reshard=after_backward",
    "dp_shard=2 offload=params+optimizer",
    "cp=2",
)
FOUR = ("dp_shard=4", "dp_replicate=2 dp_shard=2 accumulation=2", "dp_shard=2 cp=2")
#: Weights whose columns tp shards, so that scales restart at each shard of a row.
COLUMNS = ("attn.o.weight", "mlp.down.weight")
#: Plans whose rows start elsewhere because weights are sharded first. They are tested with a lossless codec.
SHARDED = (
    "dp_shard=2 tp=2 sp=on",
    "dp_shard=2 pp=2 microbatches=2 reshard=after_step",
    "dp_shard=2 tp=2 recompute=full",
)
SHARDED_EXPERTS = ("dp_shard=4 ep=2", "dp_shard=2 tp=2 ep=2")


def rounded(weight: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Return a weight after encoding and decoding. Vectors are unchanged. parts: number of tp shards of the columns."""
    if weight.ndim < 2:
        return weight
    if parts > 1:
        return torch.cat([rounded(part) for part in weight.chunk(parts, 1)], 1)
    found = []
    for row in weight.reshape(len(weight), -1):
        for block in row.split(256):
            exact = block.abs().max() / 127
            scale = exact.to(torch.bfloat16)
            while scale.double() < exact:
                scale = torch.nextafter(scale, torch.tensor(torch.inf, dtype=torch.bfloat16))
            found.append((block / scale.double()).round() * scale.double() if scale > 0 else block)
    return torch.cat(found).view_as(weight)


def train_reference(case: DecoderCase, tp: int = 1, not_gathered: str = "-") -> ParityResult:
    """Train in one process: gradients are computed with rounded weights and applied to the exact ones.

    tp: number of column shards. not_gathered: substring of the names of weights that are not gathered.
    """
    model, result = case.model(), ParityResult()
    optimizer, params = case.optimizer_of(model), dict(model.named_parameters())
    for step in range(case.num_steps):
        batch = case.batch(step)
        exact = {name: param.detach().clone() for name, param in params.items()}
        with torch.no_grad():
            for name, param in params.items():
                if not_gathered not in name:
                    param.copy_(rounded(param, tp if name.endswith(COLUMNS) else 1))
        loss_sum, number = case.loss(case.forward(model, batch), batch)
        optimizer.zero_grad()
        (loss_sum / number).backward()
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(exact[name])
        norm = float(global_norm([param.grad for param in params.values()]))
        for param in params.values():
            param.grad *= clip_factor(norm, case.max_grad_norm)
        optimizer.step()
        result.losses.append(float(loss_sum.detach()) / int(number))
        result.grad_norms.append(norm)
    result.grads = {name: param.grad for name, param in params.items()}
    result.weights = {name: param.detach() for name, param in params.items()}
    return result


def train_each(plans: tuple[str, ...], case: DecoderCase) -> list[ParityResult]:
    return [train_case(f"{plan} zero=3 gather=int8 precision=fp64", case) for plan in plans]


@pytest.fixture(scope="module")
def reference() -> ParityResult:
    return train_reference(CASE)


def check(pool, plans: tuple[str, ...], case: DecoderCase, expected: ParityResult) -> None:
    for rank, answers in enumerate(pool.run(train_each, plans, case)):
        for plan, found in zip(plans, answers, strict=True):
            assert found.largest_difference(expected) < 1e-10, (plan, rank)


def test_layouts_match_one_process_with_rounded_weights(reference, ranks2):
    check(ranks2, TWO, CASE, reference)
    assert reference.largest_difference(train_case("precision=fp64", CASE)) > 1e-6, "nothing was rounded"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_match_and_share_a_graph(recompute, reference, ranks2):
    plan = f"dp_shard=2 zero=3 gather=int8 recompute={recompute} compile=on precision=fp64"
    for found in ranks2.run(train_compiled, plan, CASE):
        assert found.result.largest_difference(reference) < 1e-10
        assert (found.graphs, found.breaks) == (1, [])


@pytest.mark.full
def test_layouts_match_one_process_with_rounded_weights_on_four_ranks(reference, ranks4):
    check(ranks4, FOUR, CASE, reference)


def test_tp_rounds_each_shard_of_a_row(reference, ranks4):
    expected = train_reference(CASE, tp=2)
    assert expected.largest_difference(reference) > 1e-6
    check(ranks4, ("dp_shard=2 tp=2 sp=on", "dp_shard=2 tp=2 recompute=full"), CASE, expected)
    check(ranks4, ("dp_shard=2 pp=2 microbatches=2 reshard=after_step",), CASE, reference)


def test_only_sharded_experts_are_rounded(ranks2):
    """Under ep=2 each of two ranks has full experts, which are not gathered."""
    check(ranks2, ("dp_shard=2",), UNBALANCED, with_experts := train_reference(UNBALANCED))
    without_experts = train_reference(UNBALANCED, not_gathered=".experts.")
    check(ranks2, ("dp_shard=2 ep=2",), UNBALANCED, without_experts)
    assert without_experts.largest_difference(with_experts) > 1e-6


@contextmanager
def lossless_codec() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        exact = lambda shape: RowSlice(1, torch.Size(shape).numel(), True)  # noqa: E731
        patch.setattr(RowSlice, "of", staticmethod(exact))
        yield


def train_exact(plans: tuple[str, ...], case: DecoderCase) -> list[ParityResult]:
    with lossless_codec():
        return train_each(plans, case)


def test_sharded_weights_stages_and_experts_gather_exactly(ranks4):
    for plans, case in ((SHARDED, CASE), (SHARDED_EXPERTS, EXPERTS)):
        expected = train_case("precision=fp64", case)
        for answers in ranks4.run(train_exact, plans, case):
            for plan, found in zip(plans, answers, strict=True):
                assert found.largest_difference(expected) < 1e-10, plan


def gathered_bytes(plan_text: str, case: DecoderCase = CASE) -> int:
    """Return the bytes of all gathers of the second step."""
    ledger, plan = Ledger(), Plan.parse(plan_text)
    mesh = build_mesh(plan, record=ledger.record)
    model = parallelize(case.model(), mesh)
    step = TrainStep(model, case.optimizer_of(model), case.loss, mesh, forward=case.forward)
    step(local_microbatches(case.batch(0), plan, mesh.data.rank))
    before = ledger.entry("dp_shard", "all_gather").num_bytes
    step(local_microbatches(case.batch(1), plan, mesh.data.rank))
    return ledger.entry("dp_shard", "all_gather").num_bytes - before


@pytest.mark.parametrize("precision, most", [("bf16", 0.7), ("fp32", 0.35)])
def test_int8_gathers_send_fewer_bytes(precision, most, ranks2):
    """Rows of this model are shorter than a block, so each has one scale."""
    text = f"dp_shard=2 zero=3 precision={precision}"
    plain, coded = (ranks2.run(gathered_bytes, one)[0] for one in (text, f"{text} gather=int8"))
    assert 0 < coded < most * plain
