"""Copies of a model's files: links out of the folder, pipes and huge files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.errors import CheckpointError
from weft.files import copy_companions, open_regular, read_regular


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models--a--b" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "secret").write_text("root")
    return folder


def copied(model: Path, out: Path) -> list[str]:
    out.mkdir()
    copy_companions(model, out)
    return sorted(file.name for file in out.iterdir())


def test_links_within_folder_and_into_hugging_face_cache_are_followed(model: Path, tmp_path: Path) -> None:
    blobs = model.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / "123").write_text("vocabulary")
    os.symlink("../../blobs/123", model / "vocab.txt")
    os.symlink("config.json", model / "other.json")
    (model / "model.safetensors.index.json").write_text("{}")
    (model / "folder.json").mkdir()
    os.symlink(model, tmp_path / "link")
    for number, folder in enumerate((model, tmp_path / "link")):
        out = tmp_path / f"out{number}"
        assert copied(folder, out) == ["config.json", "other.json", "vocab.txt"]
        assert (out / "vocab.txt").read_text() == "vocabulary"
        assert not (out / "vocab.txt").is_symlink()


@pytest.mark.parametrize("target", ["{secret}", "../../../secret", "../other/config.json", "../../blobs/out/secret",
                                    "missing", "notes.txt", "/dev/zero", "/proc/self/environ"])  # fmt: skip
def test_links_out_of_the_folder_are_refused(model: Path, tmp_path: Path, target: str) -> None:
    (model.parent / "other").mkdir()
    (model.parent / "other" / "config.json").write_text("another model's")
    (model.parent.parent / "blobs").mkdir()
    os.symlink(tmp_path, model.parent.parent / "blobs" / "out")
    os.symlink(target.format(secret=tmp_path / "secret"), model / "notes.txt")
    with pytest.raises(CheckpointError, match=r"notes\.txt: it (is a link that leaves its folder|cannot be read)"):
        copied(model, tmp_path / "out")
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_blobs_folder_that_is_a_link_is_refused(model: Path, tmp_path: Path) -> None:
    os.symlink(tmp_path, model.parent.parent / "blobs")
    os.symlink("../../blobs/secret", model / "notes.txt")
    with pytest.raises(CheckpointError, match="leaves its folder"):
        copied(model, tmp_path / "out")


def test_pipes_and_huge_files_are_refused(model: Path, tmp_path: Path) -> None:
    os.mkfifo(model / "pipe.json")
    with pytest.raises(CheckpointError, match=r"pipe\.json: it cannot be read \(it is not a regular file\)"):
        copied(model, tmp_path / "out")
    (model / "pipe.json").unlink()
    with (model / "huge.json").open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(CheckpointError, match=r"huge\.json: it has 2\.00 GiB"):
        copied(model, tmp_path / "out2")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular("/dev/zero")
    assert read_regular(model / "config.json", model) == b"{}"
