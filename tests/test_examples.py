"""Every example runs as documented in its first lines, on one process and, if supported, on several ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.warm_python import FORKS
from weft import env

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ADOPTION = ROOT / "examples" / "01_adopt.py"
#: A user's code before any line of Weft: a model, its data in a loader with torch's defaults, and a loss.
READERS_OWN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6))


def loss_fn(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
"""
#: The effect of a block, on rank 0.
REPORT = """
weights = sum(param.detach().abs().sum().item() for param in model.parameters())
if run.is_first:
    print(f"weights {weights:.4f}", f"loss {metrics.loss:.5f}" if "metrics" in globals() else "")
"""


def scripts_of(page: Path) -> list[str]:
    """Return the page's Python blocks as scripts. Each block with `weft.init` starts one; the others continue it."""
    scripts: list[str] = []
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        text = READERS_OWN + block + REPORT
        if "weft.init(" in block:
            scripts.append(text)
        else:
            scripts[-1] += text
    return scripts


def run(*command: str, home: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=home,
        env=env.child_env(WEFT_HOME=str(home), TMPDIR=str(home), OMP_NUM_THREADS="1", CI="true", **{FORKS: "1"}),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


#: Those that the gate runs.
QUICK = ("02_plans", "03_from_python", "06_hugging_face")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.full)
        for path in EXAMPLES
        if path != ADOPTION
    ],
)
def test_example_runs(example, tmp_path):
    assert run(str(example), home=tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("example", [path for path in EXAMPLES if "torchrun" in path.read_text()], ids=lambda p: p.stem)
def test_example_runs_on_two_ranks(example, tmp_path):
    assert run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example), home=tmp_path)


def test_examples_are_short():
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES) < 100


@pytest.mark.full  # the README's script below is this one, shorter
def test_adoption_gives_the_same_numbers_on_two_ranks(tmp_path):
    example = str(ADOPTION)
    alone = run(example, home=tmp_path)
    together = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", example, home=tmp_path)
    assert alone == together
    assert alone.count("loss") == 5


PAGES = [ROOT / "README.md", ROOT / "docs" / "start" / "adopt.md"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{page.stem}-{n}", marks=() if page.stem == "README" else pytest.mark.full)
        for page in PAGES
        for n, text in enumerate(scripts_of(page))
    ],
)
def test_code_blocks_give_the_same_on_one_process_and_two_ranks(text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    alone = run(str(script), home=tmp_path)
    together = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), home=tmp_path)
    assert alone == together
    assert alone.count("weights") == text.count(REPORT)
