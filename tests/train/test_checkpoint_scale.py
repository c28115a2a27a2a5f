"""What a rank does for a checkpoint does not grow with the number of ranks: counted up to 8,192, on fake ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.checkpoint.manifest import Manifest, TensorEntry, parse_manifest
from weft.checkpoint.slices import RankLists, Slice, shard_name
from weft.mesh import build_mesh
from weft.parallel import parallelize
from weft.spec.plan import Plan
from weft.train import TrainStep
from weft.train.state import pieces


def saved(plan: str, world: int, rank: int) -> list:
    """What one rank of many would write, after a step."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = build_mesh(Plan.parse(plan.format(world=world, replicas=world // 8)))
        model = nn.Sequential(nn.Embedding(200, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 200))
        parallelize(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = TrainStep(model, optimizer, lambda out, batch: (out.square().sum(), batch.numel()), mesh)
        step(torch.arange(8))
        return list(pieces(model, optimizer))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "plan",
    [
        "dp_shard={world} zero=1",
        "dp_shard={world} zero=3",
        "dp_replicate={replicas} dp_shard=8 zero=2",
        "dp_replicate={world}",
    ],
)
def test_what_is_said_of_a_tensor_does_not_grow_with_the_ranks(plan):
    said, num_pieces, num_bytes = {}, {}, {}
    for world in (64, 8192):
        found = saved(plan, world, 0)
        lists = RankLists()
        told = {one.path: Slice(one.part, one.deal).to_json(lists) for one in found if one.start == 0}
        assert len(lists.rows) <= 1 + len(told)
        said[world] = max(len(json.dumps(one)) for one in told.values())
        num_pieces[world] = len(found)
        num_bytes[world] = sum(one.data.nbytes for one in found)
    assert said[8192] <= said[64] + 20
    assert num_pieces[8192] <= num_pieces[64] + 2
    assert num_bytes[8192] <= num_bytes[64] + 64


def test_the_manifest_of_8192_ranks_is_small_and_read_at_once():
    """70B: 723 tensors with two states each, zero=3 over all ranks: most of the manifest is one digest a file."""
    from weft.checkpoint.manifest import STATE_NAME, FileEntry
    from weft.checkpoint.parts import Part, deal_out

    world, ranks = 8192, tuple(range(8192))
    files = {STATE_NAME: FileEntry(9, "0" * 64)}
    for group in ("model", "optimizer"):
        files |= {shard_name(group, rank): FileEntry(10**8, f"{rank:064x}") for rank in ranks}
    part = Part((8192, 8192))
    one = Slice(part, deal_out(ranks, part.numel // world, 1))
    entry = TensorEntry("", "F32", part.shape, None, (one,))
    tensors = {
        "model": {f"layers.{n}.weight": entry for n in range(723)},
        "optimizer": {f"layers.{n}.weight/{key}": entry for n in range(723) for key in ("exp_avg", "exp_avg_sq")},
    }
    text = Manifest(7, files, tensors).to_bytes()
    assert len(text) < 3 * 2**20
    parsed = parse_manifest(text)
    assert parsed.tensors["model"]["layers.7.weight"].slices == (one,)
    assert [rank for rank, _, _ in one.deal.runs(0, part.numel // world, part.numel)] == [0]
