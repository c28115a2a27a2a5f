"""Runs that an older commit saved resume with the losses that the older commit computed.

`old_runs.zip` has a folder for each kind of state: the config, the run folder with one checkpoint of step 3, and
`expected.json` with steps 4 to 6. Commit 9166fe1a of 2026-11-28 wrote them, before the package was restructured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tools.warm_python import FORKS

ARCHIVE = Path(__file__).with_name("old_runs.zip")
IN_GATE = ("zero3", "script")


def kinds() -> list[object]:
    with zipfile.ZipFile(ARCHIVE) as archive:
        found = sorted({name.split("/")[0] for name in archive.namelist()})
    assert len(found) >= 14
    return [kind if kind in IN_GATE else pytest.param(kind, marks=pytest.mark.full) for kind in found]


def run_in(folder: Path, *command: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_HOME": str(folder / "home"), FORKS: "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", kinds())
def test_old_checkpoint_resumes_with_equal_losses(kind, tmp_path):
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith(f"{kind}/")])
    folder = tmp_path / kind
    expected = json.loads((folder / "expected.json").read_text())
    if kind == "script":
        found = json.loads(run_in(folder, "script.py").splitlines()[-1])
        assert found["from"] == expected["from"] == 4
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        return
    run_in(folder, "-m", "weft", "train", f"{kind}.toml", "train.steps=6")
    events = [json.loads(line) for line in (folder / "runs" / kind / "events.jsonl").read_text().splitlines()]
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert sum(event["event"] == "resume" for event in events) == 1
    for old in expected:
        assert steps[old["step"]]["loss"] == pytest.approx(old["loss"], rel=1e-6)
        assert steps[old["step"]]["grad_norm"] == pytest.approx(old["grad_norm"], rel=1e-4)
