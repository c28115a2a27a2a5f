"""All ranks name a replica whose weights differ from the other replicas."""

from __future__ import annotations

import pytest
import torch

from tests.parity.cases import LLAMA
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import CommError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.step.checks import checksum
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, local_microbatches

CASE = DecoderCase(LLAMA)


def drift(plan_text: str, rank: int, value: float) -> tuple[int, str]:
    """Check every second step and change one rank's weights after two; return the steps and the error."""
    plan = Plan.parse(plan_text)
    mesh = build_mesh(plan)
    model = parallelize(CASE.model(), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.train.step.checks.EVERY", 2)
        step = TrainStep(model, CASE.optimizer_of(model), CASE.loss, mesh, forward=CASE.forward)
        for index in range(4):
            if index == 2 and mesh.rank == rank:
                held = next(iter(data_parallel(model).local_weights().values()))
                with torch.no_grad():
                    held.view(-1)[0] += value
            try:
                step(local_microbatches(CASE.batch(index), plan, mesh.data.rank))
            except CommError as error:
                return index, str(error)
    return 4, ""


TEXT = (
    "since 2 steps at most. Resume from an earlier checkpoint, and check the memory, the device and the software of "
    "these ranks."
)


@pytest.mark.parametrize("plan", ["dp_replicate=4", "dp_shard=4"])
def test_one_differing_replica_of_four_is_named(plan, ranks4):
    axis = plan.partition("=")[0]
    message = f"replicas over {axis}: the weights of rank 2 differ from the others, {TEXT}"
    assert ranks4.run(drift, plan, 2, 1e-3) == [(3, message)] * 4
    assert ranks4.run(drift, plan, 2, 0.0) == [(4, "")] * 4


def test_both_of_two_differing_sharded_replicas_are_named(ranks4):
    message = f"replicas over dp_replicate: the weights of rank 1, 3 differ, and should be equal, {TEXT}"
    for zero in (1, 3):
        assert ranks4.run(drift, f"dp_replicate=2 dp_shard=2 zero={zero}", 1, 1e-3) == [(3, message)] * 4


def test_checksum_detects_one_bit_and_its_tensor():
    one, other = torch.randn(100), torch.randn(7)
    flipped = one.clone()
    flipped.view(torch.int32)[3] ^= 1
    found = {
        checksum([one, other]),
        checksum([other, one]),
        checksum([flipped, other]),
        checksum([one.double(), other]),
    }
    assert len(found) == 4
    assert checksum([one, other]) == checksum([one.clone(), other, torch.empty(0)])
