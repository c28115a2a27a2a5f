"""Checkpoint work per rank does not grow with the number of ranks: counted up to 8,192, on fake ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.checkpoint.faults import DONE, in_fork
from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manifest import (
    STATE_NAME,
    FileEntry,
    Manifest,
    RankLists,
    Slice,
    TensorEntry,
    commit_text,
    parse_manifest,
    shard_name,
)
from weft.checkpoint.read import Part, assign_evenly
from weft.checkpoint.save import SavedSlice, save_slices
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.parallelize import parallelize
from weft.train.states.model_state import state_slices
from weft.train.step.train_step import TrainStep


def saved(plan: str, world: int, rank: int) -> list:
    """Return the records that one rank of many writes after a step."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = build_mesh(Plan.parse(plan.format(world=world, replicas=world // 8)))
        model = nn.Sequential(nn.Embedding(200, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 200))
        parallelize(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = TrainStep(model, optimizer, lambda out, batch: (out.square().sum(), batch.numel()), mesh)
        step(torch.arange(8))
        return list(state_slices(model, optimizer))
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
def test_manifest_entry_of_a_tensor_does_not_grow_with_ranks(plan):
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


def test_manifest_of_8192_ranks_is_small_and_parsed_quickly():
    """70B model: 723 tensors with two states each, zero=3 over all ranks. Digests per file dominate the manifest."""
    world, ranks = 8192, tuple(range(8192))
    files = {STATE_NAME: FileEntry(9, "0" * 64)}
    for group in ("model", "optimizer"):
        files |= {shard_name(group, rank): FileEntry(10**8, f"{rank:064x}") for rank in ranks}
    part = Part((8192, 8192))
    one = Slice(part, assign_evenly(ranks, part.numel // world, 1))
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


EACH, NUM_TENSORS = 16, 20


def slices_of_rank(world: int, rank: int) -> list[SavedSlice]:
    """Return tensors of the same size on each rank, for any number of ranks."""
    part, deal = Part((world * EACH,)), assign_evenly(tuple(range(world)), EACH, 1)
    data = torch.full((EACH,), float(rank))
    names = [f"{group}/{n}" for group in ("model", "optimizer") for n in range(NUM_TENSORS)]
    return [SavedSlice(name, part, deal, rank * EACH, data) for name in names]


class FileSystemCalls:
    """Count file system calls of this process below a folder while `counting` is set. Audit hooks stay installed."""

    def __init__(self, folder: Path):
        self.number, self.counting, self._folder = 0, True, str(folder)
        self._fsync, self._stat, self._lstat = os.fsync, os.stat, os.lstat
        os.fsync = lambda handle: self._then(self._fsync, handle)
        os.stat = lambda path, **options: self._then(self._stat, path, **options)
        os.lstat = lambda path, **options: self._then(self._lstat, path, **options)
        sys.addaudithook(self._event)

    def _event(self, event: str, arguments: tuple[object, ...]) -> None:
        named = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
        self.number += self.counting and named and str(arguments[0]).startswith(self._folder)

    def _then(self, ask: Callable, *args: object, **options: object):
        self.number += self.counting
        return ask(*args, **options)


def counted(folder: Path, act: Callable[[FileSystemCalls], object]) -> int:
    """Run `act` in a forked process and return its number of file system calls."""
    told = folder.parent / f"{folder.name}.contacts"

    def count() -> None:
        found = FileSystemCalls(folder)
        act(found)
        found.counting = False
        told.write_text(str(found.number))

    assert in_fork(count) == DONE
    return int(told.read_text())


def one_rank_saves(root: Path, world: int, rank: int) -> int:
    """Return the calls of a rank other than 0, which writes into the existing folder."""
    (root / ".tmp-step_00000001-1-ab").mkdir(parents=True)
    answers = iter([".tmp-step_00000001-1-ab", {"name": "step_00000001"}])
    together = RankGroup(rank, world, lambda _: next(answers), lambda _: [])
    return counted(root, lambda _: save_slices(root, 1, slices_of_rank(world, rank), {}, together))


def first_rank_saves(root: Path, world: int) -> int:
    """Return the calls of rank 0; the files of the other ranks are created uncounted."""

    def act(contacts: FileSystemCalls) -> None:
        calls = [0]

        def gather(record: bytes) -> list[bytes]:
            calls[0] += 1
            if calls[0] == 1:
                return [b"1000"] * world
            contacts.counting = False
            (place,) = root.glob(".tmp-*")
            answers = [record]
            for rank in range(1, world):
                names = [shard_name(group, rank) for group in ("model", "optimizer")]
                for name in names:
                    os.close(os.open(place / name, os.O_CREAT | os.O_WRONLY))
                answers.append(json.dumps({"files": {name: [4096, f"{rank:064x}"] for name in names}}).encode())
            contacts.counting = True
            return answers

        save_slices(root, 1, slices_of_rank(world, 0), {}, RankGroup(0, world, lambda do: do(), gather))

    return counted(root, act)


def one_rank_loads(root: Path, world: int, rank: int) -> int:
    """Return the calls of a rank that loads its share of the files that it and `first_rank_saves` saved."""
    path, pieces_ = root / "step_00000001", slices_of_rank(world, rank)

    def act(_: FileSystemCalls) -> None:
        opened = load_checkpoint(path, lazily=True)
        for one in pieces_:
            out = bytearray(EACH * 4)
            opened.read(one.group, one.name, one.part, one.start, memoryview(out))
            assert bytes(out) == one.data.numpy().tobytes()

    return counted(root, act)


def test_files_and_requests_per_rank_do_not_grow_with_ranks(tmp_path):
    """A rank writes and asks equally often for 8,192 and 64 ranks. Rank 0 makes no request per file."""
    found = {}
    for world in (64, 8192):
        root, rank = tmp_path / f"all-{world}", world - 3
        own = tmp_path / f"one-{world}" / ".tmp-step_00000001-1-ab"
        first = first_rank_saves(root, world)
        one = one_rank_saves(own.parent, world, rank)
        assert sorted(os.listdir(own)) == [shard_name("model", rank), shard_name("optimizer", rank)]
        written = sum(file.stat().st_size for file in own.iterdir())
        for file in own.iterdir():
            file.rename(root / "step_00000001" / file.name)
        manifest = json.loads((root / "step_00000001" / "manifest.json").read_bytes())
        for group in ("model", "optimizer"):
            manifest["files"][shard_name(group, rank)]["bytes"] = (
                (root / "step_00000001" / shard_name(group, rank)).stat().st_size
            )
        text = json.dumps(manifest).encode()
        (root / "step_00000001" / "manifest.json").write_bytes(text)
        (root / "step_00000001" / "COMMIT").write_bytes(commit_text(text))
        said = len(json.dumps(manifest["tensors"])), len(text) / world
        found[world] = first, one, one_rank_loads(root, world, rank), written, said
    (first, one, loads, written, said), (first_64, one_64, loads_64, written_64, said_64) = found[8192], found[64]
    assert (one, loads, first) == (one_64, loads_64, first_64)
    assert written <= written_64 + 256  # rank numbers have more digits
    assert said[0] <= said_64[0] + 40 * 2 * NUM_TENSORS
    assert said[1] <= said_64[1]
