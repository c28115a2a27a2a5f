"""The notebooks run from the first cell to the last, and `weft.launch` calls functions of a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.warm_python import FORKS
from weft import env

ROOT = Path(__file__).parents[1]
RUN = """
import sys
import nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=300, kernel_name="python3").execute()
"""
SCRIPT = """
import torch
import weft

SCALE = 3

class Result:
    def __init__(self, values):
        self.values = values

def total(offset, plan):
    with weft.init(plan) as run:
        value = torch.tensor(float(offset * SCALE + run.mesh.rank))
        torch.distributed.all_reduce(value)
        return Result([run.mesh.rank, value.item()])

def fail():
    raise ValueError("broken on purpose")

if __name__ == "__main__":
    print([one.values for one in weft.launch(total, 2, plan="dp_replicate=2", ranks=2)])
    for ranks, function in ((0, total), (2, fail)):
        try:
            weft.launch(function, ranks=ranks)
        except weft.WeftError as error:
            print(str(error).splitlines()[0])
"""


def run(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    settings = env.child_env(
        WEFT_HOME=str(home),
        TMPDIR=str(home),
        OMP_NUM_THREADS="1",
        IPYTHONDIR=str(home),
        MPLBACKEND="agg",
        **{FORKS: "1"},
    )
    return subprocess.run([sys.executable, *words], cwd=home, env=settings, capture_output=True, text=True, timeout=400)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adopt", "lora", "find_a_plan"])
def test_notebook_runs(name, tmp_path):
    done = run("-c", RUN, str(ROOT / "notebooks" / f"{name}.ipynb"), home=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_launch_calls_a_function_of_a_script_on_new_ranks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("script.py", home=tmp_path)
    assert done.stdout.splitlines() == [
        "[[0, 13.0], [1, 13.0]]",
        "ranks=0: it is the number of processes. Use a positive integer.",
        "rank 0 of 2 failed in fail:",
    ], done.stderr
    unguarded = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "script.py").write_text(unguarded)
    done = run("script.py", home=tmp_path)
    assert 'Put the call under if __name__ == "__main__":' in done.stdout + done.stderr
