"""Every example runs as its first lines say, on one process and, where it can, on ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft import env

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(*command: str, home: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=env.child_env(WEFT_HOME=str(home), OMP_NUM_THREADS="1", CI="true"),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_is_short(example, tmp_path):
    assert len(example.read_text().splitlines()) < 100
    assert run(str(example), home=tmp_path)


def test_adoption_gives_the_same_numbers_on_two_ranks(tmp_path):
    example = str(next(path for path in EXAMPLES if path.stem == "01_adopt"))
    alone = run(example, home=tmp_path)
    together = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", example, home=tmp_path)
    assert alone == together
    assert alone.count("loss") == 5
