"""Models on the meta device get the same initial weights as in one process, under every ZeRO stage and tp."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.models.decoder import as_shapes
from weft.models.initialize import initialise
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.placement import Placement

PLANS = ["tp=2", "dp_shard=2 zero=1", "dp_shard=2 zero=3", "dp_shard=2 zero=3 precision=bf16"]
PLACEMENTS = {"0.weight": Placement(cut=("tp",)), "2.weight": Placement(cut=("tp",), dim=1)}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.LayerNorm(8), nn.Linear(6, 8), nn.Linear(8, 8))


def materialized_weights(plan: str) -> dict[str, torch.Tensor]:
    mesh = build_mesh(Plan.parse(plan))
    with torch.device("meta"):
        found = model()
    placements = PLACEMENTS if mesh["tp"].size > 1 else {}
    for name, placement in placements.items():
        owner = found.get_submodule(name.rpartition(".")[0])
        owner.weight = nn.Parameter(placement.local(owner.weight.detach(), mesh["tp"].rank, mesh["tp"].size))
    parallelize(found, mesh, placements=placements, seed=3)
    return {name: weight.detach().clone() for name, weight in data_parallel(found).weights()}


@pytest.mark.parametrize("plan", PLANS)
def test_weights_equal_one_process(plan, ranks2):
    full = model()
    initialise(full, 3)
    for weights in ranks2.run(materialized_weights, plan):
        assert weights.keys() == dict(full.named_parameters()).keys()
        for name, param in full.named_parameters():
            assert torch.equal(weights[name], param), name


def test_meta_models_without_seed_or_with_buffers_are_rejected():
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


class InMemory:
    """Full float32 weights with the interface of a file reader."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self._weights = weights
        self.entries = {name: SimpleNamespace(shape=tuple(one.shape), dtype="F32") for name, one in weights.items()}

    def read(self, name: str, part: object, start: int, out: memoryview) -> None:
        values = self._weights[name].flatten()[start : start + len(out) // 4]
        out[:] = values.numpy().tobytes()


def bytes_before_loading(plan: str, filled_later: bool) -> tuple[int, bool]:
    """Return the bytes broadcast by parallelize, and whether the model then has the loaded weights."""
    full = model().requires_grad_(False)
    full[3].requires_grad_(True)
    with as_shapes(vectors=True):
        found = model().requires_grad_(False)
    found[3].requires_grad_(True)
    ledger = Ledger()
    parallelize(found, build_mesh(Plan.parse(plan), record=ledger.record), seed=3, filled_later=filled_later)
    sent = sum(entry.num_bytes for _, name, entry in ledger.rows() if name == "broadcast")
    initialise(full, 5)
    data_parallel(found).load_weights(InMemory({name: one.detach() for name, one in full.named_parameters()}))
    loaded = dict(found.named_parameters())
    expected = {name: param.detach().to(loaded[name].dtype) for name, param in full.named_parameters()}
    return sent, all(torch.equal(loaded[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_replicate=2 precision=bf16"])
def test_weights_filled_later_are_not_broadcast(plan, ranks2):
    for sent, is_loaded in ranks2.run(bytes_before_loading, plan, True):
        assert is_loaded
        assert sent == 0
    for sent, is_loaded in ranks2.run(bytes_before_loading, plan, False):
        assert is_loaded
        assert sent > 0


def test_as_shapes_skips_matrix_initialization_only():
    with as_shapes():
        before = torch.get_rng_state()
        matrix = nn.Embedding(4, 4, device="meta")
        nn.init.trunc_normal_(matrix.weight)
        after = torch.get_rng_state()
        vector = nn.LayerNorm(4)
        nn.init.normal_(vector.weight)
    assert matrix.weight.is_meta
    assert torch.equal(before, after)
    assert vector.weight.std() > 0
