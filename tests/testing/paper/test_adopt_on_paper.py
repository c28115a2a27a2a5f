"""The README's block of adoption on a machine with a GPU: nobody but Weft moves the model and the reader's batches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weft.testing.paper import script_on_paper

pytestmark = pytest.mark.paper

README = Path(__file__).parents[3] / "README.md"
#: What a reader has: a model and a loader on the host, with torch's default collate.
READERS_OWN = """
import json
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6))
seen = set()


def loss_fn(output, batch):
    seen.update(part.device.type for part in (output, *batch))
    return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
"""
REPORT = """
print(json.dumps({
    "model": sorted({param.device.type for param in model.parameters()}), "step": sorted(seen), "loss": metrics.loss,
    "states": sorted({state["exp_avg"].device.type for state in step.optimizer.state.values()}),
}))
"""
#: Every module that took `move_batch` by name gets one that leaves batches where they are.
BATCHES_STAY = """
import sys
import weft.train.script.script_run
for module in list(sys.modules.values()):
    if module.__name__.startswith("weft.") and hasattr(module, "move_batch"):
        module.move_batch = lambda batch, device: batch
"""


def adoption() -> str:
    """The README's first block that calls weft.init."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    return next(block for block in blocks if "weft.init(" in block)


def test_model_and_batches_come_to_the_gpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(READERS_OWN + adoption() + REPORT)
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    # The sum of losses is unknown, and read as 1; the number of samples is known.
    assert json.loads(done.stdout) == {"model": ["cuda"], "step": ["cuda"], "loss": 1 / 16, "states": ["cuda"]}
    (report,) = done.reports
    assert not report.mismatch
    assert not report.races
    assert report.kernels > 4 * 20
    # Four batches of two tensors each, and four parameters.
    to_device = {what: number for what, number in report.copies.items() if what.startswith("to device")}
    assert sum(number for what, number in to_device.items() if "batches.py" in what) == 8
    assert sum(number for what, number in to_device.items() if "materialise.py" in what) == 4


@pytest.mark.full
def test_a_rank_of_a_cut_model_runs_too(tmp_path):
    block = adoption().replace('"dp_replicate=*"', '"dp_shard=* zero=3 precision=bf16"')
    assert "zero=3" in block
    script = tmp_path / "script.py"
    script.write_text(READERS_OWN + block + REPORT)
    done = script_on_paper(script, ranks=2, rank=1)
    assert done.returncode == 0, done.stderr
    (report,) = done.reports
    assert json.loads(done.stdout)["step"] == ["cuda"]
    assert not report.races
    assert report.collectives["_reduce_scatter_base_"] == 4 * 2  # four steps, two layers


def test_batches_that_nobody_moves_are_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BATCHES_STAY + READERS_OWN + adoption() + REPORT)
    done = script_on_paper(script)
    assert done.returncode == 1
    (report,) = done.reports
    assert "cpu and cuda:0" in report.mismatch
