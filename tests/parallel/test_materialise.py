"""Models on the meta device get the very weights they would have had, under every stage and cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.errors import ModelError
from weft.mesh import build_mesh
from weft.models import initialise
from weft.parallel import data_parallel, parallelize
from weft.parallel.placement.placement import Placement
from weft.spec.plan import Plan

PLANS = ["tp=2", "dp_shard=2 zero=1", "dp_shard=2 zero=3", "dp_shard=2 zero=3 precision=bf16"]
CUTS = {"0.weight": Placement(cut=("tp",)), "2.weight": Placement(cut=("tp",), dim=1)}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.LayerNorm(8), nn.Linear(6, 8), nn.Linear(8, 8))


def made(plan: str) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Plan.parse(plan))
    with torch.device("meta"):
        found = model()
    placements = CUTS if mesh["tp"].size > 1 else {}
    for name, placement in placements.items():
        owner = found.get_submodule(name.rpartition(".")[0])
        owner.weight = nn.Parameter(placement.local(owner.weight.detach(), mesh["tp"].rank, mesh["tp"].size))
    parallelize(found, mesh, placements=placements, seed=3)
    return {name: weight.detach().clone() for name, weight in data_parallel(found).weights()}


@pytest.mark.parametrize("plan", PLANS)
def test_the_same_weights_as_on_one_process(plan, ranks2):
    whole = model()
    initialise(whole, 3)
    for weights in ranks2.run(made, plan):
        assert weights.keys() == dict(whole.named_parameters()).keys()
        for name, param in whole.named_parameters():
            assert torch.equal(weights[name], param), name


def test_without_a_seed_or_with_buffers_they_are_refused():
    with torch.device("meta"):
        found, normed = model(), nn.BatchNorm1d(2)
    with pytest.raises(ModelError) as caught:
        parallelize(found, build_mesh(Plan()))
    assert str(caught.value) == (
        "parameter '0.weight': it is on the meta device. Give the model weights first, or seed= to make them."
    )
    with pytest.raises(ModelError) as caught:
        parallelize(normed, build_mesh(Plan()), seed=1)
    assert str(caught.value) == (
        "buffer 'running_mean': it is on the meta device, and Weft has no rule for its values. Give it values first."
    )
