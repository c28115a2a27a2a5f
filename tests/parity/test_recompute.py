"""Recompute under plans: loss, norms, gradients and weights match training without it in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.choice import gate_runs
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.verify.parity import DecoderCase, train_decoder

RTOL = 1e-10
CASE = DecoderCase(
    DecoderSpec(
        vocab_size=61, dim=16, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32, tied=True
    ),
    documents=True,
)
SETTINGS = ["full", "selective", "attention", "70%", "1GiB", "full:2"]


@pytest.fixture(scope="module")
def reference():
    return train_decoder("precision=fp64", CASE)


@pytest.mark.parametrize("accumulation", gate_runs([1, 4], 1))
@pytest.mark.parametrize("setting", SETTINGS)
def test_recompute_matches_on_one_rank(setting, accumulation, reference):
    result = train_decoder(f"recompute={setting} accumulation={accumulation} precision=fp64", CASE)
    assert result.largest_difference(reference) < RTOL


@pytest.mark.parametrize("accumulation", gate_runs([1, 4], 1))
@pytest.mark.parametrize("setting", gate_runs(SETTINGS, 1, 3, 5))
def test_recompute_matches_on_two_ranks(setting, accumulation, reference, ranks2):
    plan = f"dp_replicate=2 recompute={setting} accumulation={accumulation} precision=fp64"
    for result in ranks2.run(train_decoder, plan, CASE):
        assert result.largest_difference(reference) < RTOL


@pytest.mark.parametrize("schedule", gate_runs(["schedule=1f1b", "schedule=zb_v virtual_stages=2"], 1))
def test_pipeline_recomputes_some_blocks_of_each_rank(schedule, ranks2):
    case = DecoderCase(dataclasses.replace(CASE.spec, num_layers=6), documents=True)
    one = train_decoder("precision=fp64", case)
    plan = f"pp=2 microbatches=4 {schedule} recompute=selective:1 precision=fp64"
    for result in ranks2.run(train_decoder, plan, case):
        assert result.largest_difference(one) < RTOL
    for policies in ranks2.run(block_policies, plan, case):
        assert policies[0] == "selective"
        assert set(policies[1:]) == {"none"}


def block_policies(plan_text: str, case: DecoderCase) -> list[str]:
    """Return the policy of each of this rank's blocks after a step."""
    from weft.comm.mesh import build_mesh
    from weft.config.plan import Plan
    from weft.memory.recompute import recompute_of
    from weft.models.inspect.blocks import repeated_blocks
    from weft.models.registry import build_decoder
    from weft.parallel.parallelize import parallelize

    model = parallelize(build_decoder(case.spec, seed=0), build_mesh(Plan.parse(plan_text)))
    found = recompute_of(model)
    assert found is not None
    return [found.setting.partition(":")[0] if path in found._blocks else "none" for path in repeated_blocks(model)]


def choose(num_ranks: int, num_tokens: int | None = None) -> tuple[list[tuple[str, int]], int]:
    """Return the policies under a budget, and the bytes without recompute. Sequence lengths differ between ranks."""
    import torch.distributed as dist

    from weft.comm.mesh import build_mesh
    from weft.config.plan import Plan
    from weft.memory.recompute import recompute_of
    from weft.models.registry import build_decoder
    from weft.parallel.parallelize import parallelize

    mesh = build_mesh(Plan.parse(f"dp_replicate={num_ranks} recompute=100KiB precision=fp64"))
    model = parallelize(build_decoder(CASE.spec, seed=0), mesh)
    length = num_tokens or 8 + 16 * dist.get_rank()
    model(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
    recompute = recompute_of(model)
    return [(policy.name, len(policy.saved)) for policy in recompute.policies.values()], recompute.full_bytes


def test_ranks_choose_equal_policies_from_the_largest_rank(ranks2):
    first, second = ranks2.run(choose, 2)
    assert first == second
    assert any(name != "none" for name, _ in first[0])
    assert first[1] == choose(1, 24)[1]


def train_fully_sharded(setting: str) -> dict[str, torch.Tensor]:
    """Return full gradients after two microbatches of a decoder with recomputed blocks under torch's fully_shard."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from weft.config.plan import Plan
    from weft.memory.recompute import apply_recompute
    from weft.models.registry import build_decoder

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_decoder(CASE.spec, dtype=torch.float64, seed=0)
    apply_recompute(model, Plan(recompute=setting))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        batch = CASE.batch(dist.get_rank())
        model(batch["input_ids"], batch["positions"], batch["document_ids"]).logsumexp(-1).sum().backward()
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


@pytest.mark.parametrize("setting", gate_runs(["full", "selective", "attention", "70%"], 1, 3))
def test_recompute_works_under_torch_fully_shard(setting, ranks2):
    expected = ranks2.run(train_fully_sharded, "none")[0]
    for found in ranks2.run(train_fully_sharded, setting):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
