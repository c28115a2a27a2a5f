from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.save import save_checkpoint
from weft.errors import CheckpointError

from .faults import save


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def swap(left: Path, right: Path) -> None:
    kept = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(kept)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NOT_COMMITTED = "it has no COMMIT, so saving it never finished"
WRONG_COMMIT = "COMMIT does not contain the digest of manifest.json: one of them changed"
CHANGED = "{} does not match its digest: its bytes changed after it was written"

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped weight": (lambda p: flip(p / "model.safetensors", -1), CHANGED.format("model.safetensors")),
    "flipped header": (lambda p: flip(p / "optimizer.safetensors", 20), CHANGED.format("optimizer.safetensors")),
    "flipped state": (lambda p: flip(p / "state.json", 5), CHANGED.format("state.json")),
    "flipped manifest": (lambda p: flip(p / "manifest.json", 30), WRONG_COMMIT),
    "flipped commit": (lambda p: flip(p / "COMMIT", 0), WRONG_COMMIT),
    "truncated weight": (lambda p: truncate(p / "model.safetensors"), "model.safetensors has"),
    "truncated state": (lambda p: truncate(p / "state.json"), "state.json has"),
    "truncated manifest": (lambda p: truncate(p / "manifest.json"), WRONG_COMMIT),
    "truncated commit": (lambda p: truncate(p / "COMMIT"), WRONG_COMMIT),
    "empty commit": (lambda p: (p / "COMMIT").write_text(""), WRONG_COMMIT),
    "grown weight": (lambda p: grow(p / "model.safetensors"), "model.safetensors has"),
    "deleted weight": (lambda p: (p / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "deleted state": (lambda p: (p / "state.json").unlink(), "state.json is missing"),
    "deleted manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "deleted commit": (lambda p: (p / "COMMIT").unlink(), NOT_COMMITTED),
    "swapped files": (
        lambda p: swap(p / "model.safetensors", p / "step_file"),
        CHANGED.format("model.safetensors"),
    ),
    "folder for file": (lambda p: replace_by_folder(p / "model.safetensors"), "model.safetensors is not a plain file"),
    "link for file": (lambda p: replace_by_link(p / "model.safetensors"), "model.safetensors is not a plain file"),
    "fifo for state": (lambda p: replace_by_fifo(p / "state.json"), "state.json is not a plain file"),
    "fifo for manifest": (lambda p: replace_by_fifo(p / "manifest.json"), "manifest.json is not a plain file"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_detected_and_previous_checkpoint_loaded(tmp_path, name):
    for step in (1, 2, 3):
        save(tmp_path, step)
    newest = tmp_path / "step_00000003"
    # For the swap: a file of equal size with the weights of another step.
    shutil.copy(tmp_path / "step_00000001" / "model.safetensors", newest / "step_file")
    damage, reason = DAMAGES[name]
    damage(newest)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.path.name) == (2, "step_00000002")
    assert [one.path.name for one in found.passed_over] == ["step_00000003"]
    assert found.passed_over[0].reason.startswith(reason)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(newest, verify=True)
    assert str(caught.value).startswith(f"{newest}: {reason}")
    assert str(caught.value).endswith("Use another checkpoint.")


def test_every_flipped_byte_is_detected(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"model": {"w": torch.ones(3), "b": torch.zeros(2)}}, {"x": 1})
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for position in range(len(data)):
            flip(file, position)
            assert verify_checkpoint(path), f"{file.name}, byte {position}"
            file.write_bytes(data)
    assert verify_checkpoint(path) == []


def test_folder_named_after_another_step_is_rejected(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert str(found.passed_over[0]) == "step_00000009: manifest.json is of step 1, not 9"
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "the best")
    assert load_checkpoint(tmp_path / "the best", verify=True).step == 1


def test_swapped_groups_of_equal_size_are_detected(tmp_path):
    tensors = {"model": {"w": torch.zeros(8)}, "average": {"w": torch.ones(8)}}
    path = save_checkpoint(tmp_path, 1, tensors, {})
    swap(path / "model.safetensors", path / "average.safetensors")
    assert len(verify_checkpoint(path)) == 2


def test_no_checkpoint_gives_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None
    assert list_checkpoints(tmp_path / "missing") == []
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_00000002").write_text("")
    assert newest_checkpoint(tmp_path) is None
    assert list_checkpoints(tmp_path) == []


def test_only_damaged_checkpoints_raise_instead_of_starting_over(tmp_path):
    for step in (1, 2):
        flip(save(tmp_path, step) / "model.safetensors", -1)
    with pytest.raises(CheckpointError) as caught:
        newest_checkpoint(tmp_path)
    reason = CHANGED.format("model.safetensors")
    assert str(caught.value) == (
        f"run.dir={tmp_path}: every checkpoint is damaged, so there is nothing to resume from.\n"
        f"  step_00000002: {reason}\n  step_00000001: {reason}\n"
        "Restore a copy, or give the run another run.name to start over."
    )


def test_without_digests_only_sizes_are_checked(tmp_path):
    save(tmp_path, 1)
    flip(save(tmp_path, 2) / "model.safetensors", -1)
    truncate(save(tmp_path, 3) / "model.safetensors")
    found = newest_checkpoint(tmp_path, verify=False)
    assert found is not None
    assert found.step == 2


def test_state_digest_is_checked_even_without_digests(tmp_path):
    path = save_checkpoint(tmp_path, 1, {}, {"lr": 1.25})
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace("1.25", "1.35"))
    with pytest.raises(CheckpointError, match=r"state\.json does not match its digest"):
        load_checkpoint(path)


def test_missing_state_is_reported_without_file_checks(tmp_path):
    path = save(tmp_path, 1)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing\. Use another checkpoint\.$"):
        load_checkpoint(path, lazily=True)


def test_steps_are_sorted_numerically(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000005", "step_99999999", "step_100000000"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 100_000_000


def test_second_save_of_a_step_is_preferred_only_while_complete(tmp_path):
    again = save(tmp_path, 1, "second").rename(tmp_path / "step_00000001.again")
    first = save(tmp_path / "other", 1).rename(tmp_path / "step_00000001")
    assert list_checkpoints(tmp_path) == [again]
    assert load_checkpoint(again).state["tag"] == "second"
    flip(again / "model.safetensors", -1)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.path == first
    assert [one.path for one in found.passed_over] == [again]
    assert list_checkpoints(tmp_path) == [first]
    save(tmp_path, 2)
    assert load_checkpoint(first, verify=True).state["tag"] == "first"
    assert not again.exists()


def test_unknown_groups_and_names_are_rejected(tmp_path):
    checkpoint = load_checkpoint(save(tmp_path, 1))
    assert checkpoint.groups == ("model", "optimizer")
    assert set(checkpoint.written_by) == {"weft", "torch"}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.tensors("modle")
    assert str(caught.value) == (
        "step_00000001 has no tensors named 'modle' (it has: model, optimizer). Did you mean 'model'?"
    )
    with pytest.raises(KeyError):
        checkpoint.tensors("model")["missing"]
    with pytest.raises(CheckpointError, match=r"no such checkpoint\. Use another checkpoint\.$"):
        load_checkpoint(tmp_path / "step_00000077")


def test_tensors_are_read_on_access(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    opened: list[str] = []
    checkpoint = load_checkpoint(path)
    from weft.checkpoint import read_tensors as read

    original = read.open_tensors
    monkeypatch.setattr(read, "open_tensors", lambda file: opened.append(file.name) or original(file))
    group = checkpoint.tensors("optimizer")
    assert len(group) == 1
    assert opened == []
    assert group["m"].shape == (1000,)
    assert opened == ["optimizer.safetensors"]


def test_loading_maps_files_instead_of_reading_them(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"model": {f"w{i}": torch.ones(1_000_000) for i in range(8)}}, {})
    group = load_checkpoint(path).tensors("model")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    before = resident()
    tensors = [group[name] for name in group]
    assert resident() - before < 16_000_000
    assert sum(tensor[0].item() for tensor in tensors) == 8
