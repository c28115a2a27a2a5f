"""A rank only writes to a folder of this step inside the checkpoint folder, whatever name it receives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.save import SavedSlice, save_slices
from weft.errors import CheckpointError

STEP = "step_00000003"


@pytest.mark.parametrize(
    "name",
    [
        "{elsewhere}",
        "../elsewhere",
        "..",
        ".",
        "",
        "/",
        f".tmp-{STEP}-1-ab/../../elsewhere",
        f".tmp-{STEP}-1-ab/x",
        f".tmp-{STEP}-1-ab\n",
        f".tmp-{STEP}-1-ab\\x",
        f".tmp-{STEP}-1-ab\0",
        ".tmp-step_00000004-1-ab",
        ".trash",
        "step_00000002",
        f"{STEP}.againx",
        7,
        None,
        ["a"],
        {"name": "x"},
    ],
)
def test_only_plain_names_of_the_step_are_written_to(tmp_path, name):
    (tmp_path / "root").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    name = name.format(elsewhere=elsewhere) if isinstance(name, str) else name
    together = RankGroup(1, 2, lambda act: name, lambda record: [])
    with pytest.raises(CheckpointError, match=r"^checkpoint of step 3: the folder name .* is not a plain name"):
        save_slices(tmp_path / "root", 3, [SavedSlice.full("model/w", torch.ones(2))], {}, together)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", [f".tmp-{STEP}-123-0a1b2c3d", STEP, f"{STEP}.again", f"{STEP}.again2"])
def test_valid_folder_names_are_accepted(tmp_path, name):
    (tmp_path / name).mkdir()
    answers = iter([name, {"name": STEP}])
    together = RankGroup(1, 2, lambda act: next(answers), lambda record: [])
    found = save_slices(tmp_path, 3, [SavedSlice.full("model/w", torch.ones(2), rank=1)], {}, together)
    assert found == Path(tmp_path / STEP)
    assert (tmp_path / name / "model-00001.safetensors").is_file()
