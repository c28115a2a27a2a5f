from __future__ import annotations

import gc

import pytest
import torch

from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.prune import prune_checkpoints
from weft.checkpoint.save import save_checkpoint
from weft.errors import CheckpointError

from .faults import names, save
from .test_load import flip


def steps(root) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(root)]


def test_newest_and_best_are_retained(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    gone = prune_checkpoints(tmp_path, 2, best_step=3)
    assert steps(tmp_path) == [3, 5, 6]
    assert [path.name for path in gone] == ["step_00000001", "step_00000002", "step_00000004"]
    assert prune_checkpoints(tmp_path, 2, best_step=3) == []
    prune_checkpoints(tmp_path, 1, best_step=77)
    assert names(tmp_path) == ["step_00000006"]
    assert prune_checkpoints(tmp_path / "missing", 1) == []


def test_damaged_checkpoints_do_not_count_and_stay_until_enough_valid_ones(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (3, 4):
        flip(tmp_path / f"step_0000000{step}" / "model.safetensors", -1)
    assert prune_checkpoints(tmp_path, 2) == []
    assert steps(tmp_path) == [1, 2, 3, 4]
    prune_checkpoints(tmp_path, 1)
    assert steps(tmp_path) == [2, 3, 4]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 2
    save(tmp_path, 5)
    prune_checkpoints(tmp_path, 1, whole=5)
    assert steps(tmp_path) == [5]


def test_many_unreadable_later_steps_do_not_evict_valid_ones(tmp_path):
    for step in (40, 50, 60):
        save(tmp_path, step)
    for step in range(1000, 1030):
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        (folder / "COMMIT").write_text("no digest")
    save(tmp_path, 62)
    prune_checkpoints(tmp_path, 2, whole=62)
    assert steps(tmp_path) == [60, 62, *range(1000, 1030)]


def test_later_steps_are_checked_by_bytes_and_older_by_sizes(tmp_path):
    for step in (1, 2, 3, 9):
        save(tmp_path, step)
    flip(tmp_path / "step_00000009" / "model.safetensors", -1)
    (tmp_path / "step_00000002" / "model.safetensors").write_bytes(b"cut")
    save(tmp_path, 4)
    prune_checkpoints(tmp_path, 3, whole=4)
    assert steps(tmp_path) == [1, 2, 3, 4, 9]
    prune_checkpoints(tmp_path, 2, whole=4)
    assert steps(tmp_path) == [3, 4, 9]


def test_checkpoint_in_use_is_not_pruned_until_released(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {"model": {"w": torch.ones(3)}}, {})
    opened = load_checkpoint(tmp_path / "step_00000001")
    assert [path.name for path in prune_checkpoints(tmp_path, 1)] == ["step_00000002"]
    assert torch.equal(opened.tensors("model")["w"], torch.ones(3))
    del opened
    gc.collect()
    assert [path.name for path in prune_checkpoints(tmp_path, 1)] == ["step_00000001"]


def test_unfinished_folders_are_removed_after_a_newer_save(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_00000002" / "COMMIT").unlink()
    (tmp_path / "step_00000009").mkdir()
    prune_checkpoints(tmp_path, 5)
    assert names(tmp_path) == ["step_00000001", "step_00000003", "step_00000009"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep_below_one_is_rejected(tmp_path, keep):
    save(tmp_path, 1)
    with pytest.raises(
        CheckpointError,
        match=r"^checkpoint\.keep=.*: at least 1 checkpoint must be kept\. Use 1 or "
        r"more\.$",
    ):
        prune_checkpoints(tmp_path, keep)
    assert steps(tmp_path) == [1]
