"""Random damage: no wrong number is loaded, errors are single messages, and nothing outside the folder is accessed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.manifest import commit_text
from weft.checkpoint.object_store import Location, located
from weft.checkpoint.prune import prune_checkpoints
from weft.checkpoint.read import OwnershipMap, Part
from weft.checkpoint.save import SavedSlice, save_checkpoint, save_slices
from weft.cli.app import run
from weft.errors import CheckpointError

RANKS = 3
STATE = {"plan": "dp_shard=3", "progress": {"step": 2}, "lr": 0.25}


def full_tensors(step: int) -> dict[str, torch.Tensor]:
    line = torch.arange(60.0) + step
    return {"model/w": line.reshape(6, 10), "model/b": line[:7].clone(), "optimizer/w/m": line.reshape(6, 10) * 2}


def save_sharded(root: Path, step: int) -> None:
    """Save with three ranks, each a thread: rows of one tensor, slices of the others."""
    gate, records, values = threading.Barrier(RANKS), [b""] * RANKS, [None]

    def rank_saves(rank: int) -> None:
        def gather(record: bytes) -> list[bytes]:
            records[rank] = record
            gate.wait()
            found = list(records)
            gate.wait()
            return found

        def on_first(act: Callable[[], Any]) -> Any:
            if rank == 0:
                values[0] = act()
            gate.wait()
            found = values[0]
            gate.wait()
            return found

        pieces = []
        for path, tensor in full_tensors(step).items():
            part, length = Part(tuple(tensor.shape)), -(-tensor.numel() // RANKS)
            run_ = OwnershipMap(tuple(range(RANKS)), length).run_of(rank, 0, tensor.numel(), tensor.numel())
            if run_ is not None:
                data = tensor.reshape(-1)[run_[0] : run_[1]].clone()
                pieces.append(SavedSlice(path, part, OwnershipMap(tuple(range(RANKS)), length), run_[0], data))
        save_slices(root, step, pieces, STATE, RankGroup(rank, RANKS, on_first, gather))

    threads = [threading.Thread(target=rank_saves, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def save_unsharded(root: Path, step: int) -> None:
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in full_tensors(step).items():
        group, _, name = path.partition("/")
        groups.setdefault(group, {})[name] = tensor
    save_checkpoint(root, step, groups, STATE)


@pytest.fixture(scope="module", params=["unsharded", "sharded"])
def undamaged(request, tmp_path_factory) -> Path:
    """Save steps 1 and 2, and next to their folder decoy files with the right names and other numbers."""
    place = tmp_path_factory.mktemp(request.param)
    save = save_sharded if request.param == "sharded" else save_unsharded
    for step in (1, 2):
        save(place / "checkpoints", step)
    save(place / "outside", 9)
    for file in (place / "outside" / "step_00000009").iterdir():
        shutil.copy(file, place / file.name)
    assert verify_checkpoint(place / "checkpoints" / "step_00000002") == []
    return place


# --- faults of step 2; each returns whether COMMIT still matches the manifest ---


def truncate(folder: Path, chance: random.Random) -> bool:
    file = chosen(folder, chance)
    os.truncate(file, chance.randrange(file.stat().st_size))
    return False


def delete(folder: Path, chance: random.Random) -> bool:
    chosen(folder, chance).unlink()
    return False


def flip(folder: Path, chance: random.Random) -> bool:
    file = chosen(folder, chance)
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return False


def insert(folder: Path, chance: random.Random) -> bool:
    file = chosen(folder, chance)
    data, place = file.read_bytes(), chance.randrange(file.stat().st_size + 1)
    file.write_bytes(data[:place] + chance.randbytes(chance.randint(1, 9)) + data[place:])
    return False


def swap(folder: Path, chance: random.Random) -> bool:
    left, right = chance.sample(sorted(folder.iterdir()), 2)
    kept = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(kept)
    return False


def link(folder: Path, chance: random.Random) -> bool:
    """Replace a file by a link: to a decoy, a device, nothing, itself, or its own bytes elsewhere."""
    file = chosen(folder, chance)
    bait = folder.parent.parent / file.name
    twin = folder.parent.parent / "outside" / f"twin-{file.name}"
    target = chance.choice([bait, Path("/dev/zero"), Path("/nowhere/at/all"), file, twin, folder.parent])
    shutil.copy(file, twin)
    file.unlink()
    file.symlink_to(target)
    return False


def edit(folder: Path, chance: random.Random) -> bool:
    """Change one value of the manifest and update COMMIT to match."""
    raw = json.loads((folder / "manifest.json").read_bytes())
    place: Any = raw
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.2:
            break
        place = place[key]
    others = [None, True, -1, 0, 1, 2**40, 1.5, "", "../model.safetensors", "F32", [], [0], {}, [[0, 3]], [1, 0]]
    if isinstance(place, dict) and chance.random() < 0.3:
        del place[key]
    else:
        place[key] = chance.choice(others)
    forge(folder, raw)
    return True


def climb(folder: Path, chance: random.Random) -> bool:
    """Make a file name in the manifest lead out of the folder, with a matching COMMIT."""
    raw = json.loads((folder / "manifest.json").read_bytes())
    old = chance.choice(list(raw["files"]))
    bait = folder.parent.parent / old
    new = chance.choice([f"../../{old}", str(bait), f"./{old}", f"a/../{old}", f"..\\{old}", f"{old}\0", f"~/{old}"])
    raw = json.loads(json.dumps(raw).replace(json.dumps(old), json.dumps(new)))
    forge(folder, raw)
    return True


def chosen(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def forge(folder: Path, raw: Any) -> None:
    text = json.dumps(raw).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMIT").write_bytes(commit_text(text))


FAULTS = (truncate, delete, flip, insert, swap, link, edit, climb)


def outside(place: Path) -> dict[str, bytes]:
    """Return all files next to the checkpoint folder."""
    found = {}
    for path in sorted(place.rglob("*")):
        if "checkpoints" not in path.relative_to(place).parts and path.is_file():
            found[str(path)] = path.read_bytes()
    return found


def check_reading(root: Location, forged: bool) -> None:
    """Check that reading returns the full checkpoint, or the previous one, or raises one message."""
    found = newest_checkpoint(root)
    assert found is not None
    assert forged or found.step == 1 or not verify_checkpoint(found.path)
    message = ""
    numbers: dict[str, torch.Tensor] = {}
    try:
        opened = load_checkpoint(root / "step_00000002", verify=True)
        assert forged or opened.state == STATE
        numbers = {f"{group}/{name}": one for group in opened.groups for name, one in opened.tensors(group).items()}
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    bait = full_tensors(9)
    for name, tensor in numbers.items():
        assert forged or torch.equal(tensor, full_tensors(2)[name])
        assert name not in bait or not torch.equal(tensor, bait[name])
    older = load_checkpoint(root / "step_00000001", verify=True)
    for name, tensor in full_tensors(1).items():
        group, _, rest = name.partition("/")
        assert torch.equal(older.tensors(group)[rest], tensor)


def campaign(undamaged: Path, tmp_path: Path, first: int, last: int) -> None:
    for seed in range(first, last):
        place = tmp_path / str(seed)
        shutil.copytree(undamaged, place)
        chance, folder = random.Random(seed), place / "checkpoints" / "step_00000002"
        fault = FAULTS[seed % len(FAULTS)]
        forged = fault(folder, chance)
        before = outside(place)
        check_reading(place / "checkpoints", forged)
        if seed % 11 == 0:  # covers all faults because 11 and 8 share no factor
            assert run(["ckpt", "verify", str(place)]) in (0, 1)
            assert run(["ckpt", "list", str(place)]) == 0
            assert run(["ckpt", "show", str(folder)]) in (0, 2)
            assert run(["ckpt", "diff", f"{place}@1", str(folder)]) in (0, 1, 2)
            save_unsharded(place / "checkpoints", 3)
            prune_checkpoints(place / "checkpoints", 1)
        assert outside(place) == before, fault.__name__
        shutil.rmtree(place)


def test_random_damage_loads_no_wrong_numbers(undamaged, tmp_path, capsys):
    campaign(undamaged, tmp_path, 0, 44)


@pytest.mark.full
def test_a_thousand_random_damages_load_no_wrong_numbers(undamaged, tmp_path, capsys):
    campaign(undamaged, tmp_path, 1000, 2000)


def campaign_in_a_store(undamaged: Path, tmp_path: Path, first: int, last: int) -> None:
    """Apply the same faults to objects. A store has no links."""
    faults = [fault for fault in FAULTS if fault is not link]
    for seed in range(first, last):
        local, root = tmp_path / str(seed), located(f"memory://damaged-{tmp_path.name}-{seed}/run")
        shutil.copytree(undamaged / "checkpoints", local)
        forged = faults[seed % len(faults)](local / "step_00000002", random.Random(seed))
        for file in sorted(local.glob("step_*/*")):
            fsspec.filesystem("memory").pipe_file(f"{root.url}/{file.relative_to(local)}", file.read_bytes())
        check_reading(root, forged)
        assert run(["ckpt", "verify", str(root)]) in (0, 1)
        assert run(["ckpt", "show", f"{root}/step_00000002"]) in (0, 2)
        assert run(["ckpt", "diff", f"{root}@1", f"{root}/step_00000002"]) in (0, 1, 2)
        fsspec.filesystem("memory").rm(root.url, recursive=True)
        shutil.rmtree(local)


@pytest.mark.parametrize("number", [28, pytest.param(1000, marks=pytest.mark.full)])
def test_random_damage_in_object_store(undamaged, tmp_path, capsys, number):
    campaign_in_a_store(undamaged, tmp_path, number, 2 * number)


@pytest.mark.parametrize("name", [".trash", ".lock", ".tmp-step_00000003-1-aa", "step_00000003", "step_00000001.again"])
@pytest.mark.parametrize("to_nothing", [False, True])
def test_links_instead_of_folders_never_lead_outside(undamaged, tmp_path, name, to_nothing):
    place = tmp_path / "place"
    shutil.copytree(undamaged, place)
    root = place / "checkpoints"
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(place / ("nothing" if to_nothing else "outside"))
    before = outside(place)
    for step in (3, 4, 4):
        # A link in place of the lock or a step may be rejected with one message.
        with contextlib.suppress(CheckpointError) if name in (".lock", "step_00000003") else contextlib.nullcontext():
            save_unsharded(root, step)
            prune_checkpoints(root, 1)
    assert outside(place) == before
    assert not (place / "nothing").exists()
