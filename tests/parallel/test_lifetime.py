"""Meshes and engines are freed with their models: a mesh of two ranks takes 8 MiB of shared memory."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

from tests.parallel.loops import laid_out, mlp, rows
from tests.parity.cases import LLAMA, ImageCase
from weft.comm.mesh import build_mesh
from weft.comm.transports.shared_memory import Segment
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.parallel.zero_flat.reducer import Reducer
from weft.train.step.train_step import TrainStep
from weft.verify.parity import DecoderCase, train_case

PLANS = (
    "dp_replicate=2",
    "dp_shard=2 zero=1",
    "dp_shard=2 zero=2",
    "dp_shard=2 zero=3",
    "dp_shard=2 zero=1 offload=optimizer+activations",
    "dp_shard=2 zero=3 offload=params",
)


def alive() -> dict[str, int]:
    """Return the numbers of live meshes' segments and engines on this rank."""
    gc.unfreeze()  # ranks freeze remaining objects after a call, and gc does not list frozen ones
    gc.collect()
    kinds = [type(found) for found in gc.get_objects()]
    return {kind.__name__: kinds.count(kind) for kind in (Segment, Reducer)}


def train(plan: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_case(plan, ImageCase(num_steps=2))


def train_decoder(plan: str) -> None:
    train_case(plan, DecoderCase(LLAMA, num_steps=1))


def forward_only(plan: str) -> None:
    """Run a forward without a backward."""
    case = DecoderCase(LLAMA, num_steps=1)
    mesh = build_mesh(Plan.parse(f"{plan} precision=fp64"))
    model = case.model()
    parallelize(model, mesh)
    case.forward(model, case.batch(0))


def own_loop(plan: str) -> None:
    model, mesh = laid_out(plan, mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(2):
        model(rows(index, mesh.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh.plan.zero < 3:  # fully_shard does not support copies
        copy.deepcopy(model)


class Fails(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: 1 / 0)
        return y


def fail_in_backward(plan: str) -> None:
    """Raise an exception in backward, while gradients of later layers are being reduced."""
    model, mesh = laid_out(plan, nn.Sequential(Fails(8, 8), nn.Linear(8, 4)).double())
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda out, _: (out.sum(), len(out)), mesh)
    for index in range(2):
        with pytest.raises(ZeroDivisionError):
            step(rows(index, mesh.rank))


#: Plans that inspect a block before choosing, and plans with saved-tensor hooks.
INSPECTING = [
    (loop, plan)
    for loop in (train_decoder, forward_only)
    for plan in ("tp=2 recompute=attention", "tp=2 sp=on recompute=selective", "tp=2 recompute=60%",
                 "cp=2 recompute=selective", "tp=2 offload=activations:0.5")
]  # fmt: skip

#: User loops are always in float64.
LOOPS = [(loop, f"{plan} precision=fp64") for loop in (train, own_loop, fail_in_backward) for plan in PLANS]


ALL = [*LOOPS, *INSPECTING, (train, "dp_shard=2 zero=2 recompute=full precision=bf16")]


def test_meshes_are_freed_with_their_models(ranks2):
    """Check all plans together, since counting objects is slow. The next test shows which plan failed."""
    before = ranks2.run(alive)
    for loop, plan in ALL:
        ranks2.run(loop, plan)
    assert ranks2.run(alive) == before


@pytest.mark.full
@pytest.mark.parametrize("loop, plan", ALL)
def test_mesh_is_freed_with_its_model(loop, plan, ranks2):
    before = ranks2.run(alive)
    ranks2.run(loop, plan)
    assert ranks2.run(alive) == before
