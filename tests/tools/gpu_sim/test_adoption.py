"""The README's adoption example on a machine with a GPU: only Weft moves the model and the batches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.gpu_sim.plans import script_on_paper

pytestmark = pytest.mark.paper

README = Path(__file__).parents[3] / "README.md"
#: A reader's model and loader on the host, with torch's default collate.
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
#: Replaces `move_batch` in every module that imported it by one that moves nothing.
BATCHES_STAY = """
import sys
import weft.train.script.script_run
for module in list(sys.modules.values()):
    if module.__name__.startswith("weft.") and hasattr(module, "move_batch"):
        module.move_batch = lambda batch, device: batch
"""


def adoption() -> str:
    """Return the README's first code block that calls weft.init."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    return next(block for block in blocks if "weft.init(" in block)


def test_model_and_batches_are_moved_to_the_gpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(READERS_OWN + adoption() + REPORT)
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    # The loss sum is unknown and read as 1; the number of samples is known.
    assert json.loads(done.stdout) == {"model": ["cuda"], "step": ["cuda"], "loss": 1 / 16, "states": ["cuda"]}
    (report,) = done.reports
    assert not report.mismatch
    assert not report.races
    assert report.kernels > 4 * 20
    # Four batches of two tensors each, and four parameters.
    to_device = {what: number for what, number in report.copies.items() if what.startswith("to device")}
    assert sum(number for what, number in to_device.items() if "batches.py" in what) == 8
    assert sum(number for what, number in to_device.items() if "materialize.py" in what) == 4


@pytest.mark.full
def test_rank_of_a_sharded_model_runs(tmp_path):
    block = adoption().replace('"dp_replicate=*"', '"dp_shard=* zero=3 precision=bf16"')
    assert "zero=3" in block
    script = tmp_path / "script.py"
    script.write_text(READERS_OWN + block + REPORT)
    done = script_on_paper(script, ranks=2, rank=1)
    assert done.returncode == 0, done.stderr
    (report,) = done.reports
    assert json.loads(done.stdout)["step"] == ["cuda"]
    assert not report.races
    assert report.collectives["alltoall_base_"] == 4 * 2  # four steps, two layers, gradients in bf16


@pytest.mark.full  # a test of the simulated GPU
def test_unmoved_batches_are_detected(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BATCHES_STAY + READERS_OWN + adoption() + REPORT)
    done = script_on_paper(script)
    assert done.returncode == 1
    (report,) = done.reports
    assert "cpu and cuda:0" in report.mismatch


#: A script with a custom loop that packs documents into rows. transformers' requirement on positions is not Weft's.
PACKED = """
import sys
import torch
import transformers
import weft
from weft.data.batches import move_batch
from tools.gpu_sim.cuda import current_device

sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
kind, config = {
    "llama": ("LlamaForCausalLM", "LlamaConfig"), "opt": ("OPTForCausalLM", "OPTConfig"),
}[sys.argv[1]]
beside = {"ffn_dim": 64, "word_embed_proj_dim": 64} if sys.argv[1] == "opt" else {"intermediate_size": 64}
model = getattr(transformers, kind)(getattr(transformers, config)(**sizes, **beside, max_position_embeddings=32))
run = weft.init("precision=bf16")
model = run.parallelize(model)
tokens = torch.arange(64).reshape(2, 32).cuda()
positions = (torch.arange(32) % 10).repeat(2, 1)
if sys.argv[2] == "moved by Weft":
    positions = move_batch(positions.pin_memory(), tokens.device)
else:
    positions = positions.cuda()
for _ in range(2):
    current_device().begin()
    model(input_ids=tokens, position_ids=positions, use_cache=False).logits.sum().backward()
"""


@pytest.mark.full  # the gate has a decoder with documents: tests/tools/gpu_sim/test_plans.py
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("whose", ["moved by Weft", "its own"])
def test_document_starts_cause_no_host_wait(family, whose, tmp_path):
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(PACKED)
    done = script_on_paper(script, family, whose)
    assert done.returncode == 0, done.stderr
    (report,) = done.reports
    assert (report.mismatch, report.races, report.syncs) == ("", {}, {}), report.lines()
    assert report.kernels > 100
    # The host sends document starts or ids, and the device computes the rest.
    assert sum("layers/documents.py" in what for what in report.copies) == (whose == "moved by Weft"), report.lines()
