"""Nothing outlives its model: a mesh holds 8 MiB of shared memory for two ranks, and a pool of ranks sees hundreds."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

from tests.parallel.loops import laid_out, mlp, rows
from tests.parity.cases import ImageCase
from weft.comm.segment import Segment
from weft.parallel.reducer import Reducer
from weft.testing import train_case
from weft.train import TrainStep

PLANS = (
    "dp_replicate=2",
    "dp_shard=2 zero=1",
    "dp_shard=2 zero=2",
    "dp_shard=2 zero=3",
    "dp_shard=2 zero=1 offload=optimizer+activations",
    "dp_shard=2 zero=3 offload=params",
)


def alive() -> dict[str, int]:
    """Meshes that have communicated, and engines, on this rank."""
    gc.collect()
    kinds = [type(found) for found in gc.get_objects()]
    return {kind.__name__: kinds.count(kind) for kind in (Segment, Reducer)}


def train(plan: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_case(plan, ImageCase(num_steps=2))


def own_loop(plan: str) -> None:
    model, mesh = laid_out(plan, mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(2):
        model(rows(index, mesh.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh.plan.zero < 3:  # fully_shard refuses copies
        copy.deepcopy(model)


class Fails(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: 1 / 0)
        return y


def breaks_off(plan: str) -> None:
    """An exception in the middle of backward, while gradients of later layers are under way."""
    model, mesh = laid_out(plan, nn.Sequential(Fails(8, 8), nn.Linear(8, 4)).double())
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda out, _: (out.sum(), len(out)), mesh)
    for index in range(2):
        with pytest.raises(ZeroDivisionError):
            step(rows(index, mesh.rank))


#: The loops of users are in float64, whatever the plan says.
LOOPS = [(loop, f"{plan} precision=fp64") for loop in (train, own_loop, breaks_off) for plan in PLANS]


@pytest.mark.parametrize("loop, plan", [*LOOPS, (train, "dp_shard=2 zero=2 recompute=full precision=bf16")])
def test_a_mesh_goes_with_its_model(loop, plan, ranks2):
    before = ranks2.run(alive)
    ranks2.run(loop, plan)
    assert ranks2.run(alive) == before
