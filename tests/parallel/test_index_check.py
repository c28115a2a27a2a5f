"""Out-of-range ids and labels raise a clear error before a device assert, and without a device synchronization."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.parity.cases import LLAMA
from tools.gpu_sim.plans import script_on_paper
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.data.batches import move_batch
from weft.errors import ModelError
from weft.parallel.layers.index_check import watch_indices
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.parity import DecoderCase

ID = r"id {}: \S+ \(Embedding\) has {} entries\. Use ids from 0 to {}: encode the data with the model's own tokenizer"
LABEL = "label {}: the model's head has {} entries. Use labels from 0 to {}, and -100 where nothing is trained: encode"


def step_with(name, value, text="precision=fp64"):
    """Return the error of a step with one wrong id or label in its batch."""
    case = DecoderCase(LLAMA)
    mesh = build_mesh(Plan.parse(text))
    model = case.model()
    parallelize(model, mesh)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), token_cross_entropy, mesh, forward=model_forward
    )
    batch = {key: one.clone() for key, one in case.batch(0).items()}
    step(batch)
    batch[name][-1, 3] = value
    with pytest.raises(ModelError) as raised:
        step(batch)
    return str(raised.value)


@pytest.mark.parametrize("value", [61, -7])
def test_out_of_range_id_is_rejected(value):
    message = step_with("input_ids", value)
    assert re.match(ID.format(value, 61, 60), message), message
    assert ("give the model 62 entries" in message) == (value == 61)


def test_out_of_range_label_is_rejected():
    assert step_with("labels", 99).startswith(LABEL.format(99, 61, 60))


def test_sharded_vocabulary_gives_the_same_errors(ranks2):
    for name, expected in (("input_ids", "has 61 entries. Use ids from 0 to 60"), ("labels", LABEL.format(70, 61, 60))):
        assert all(expected in message for message in ranks2.run(step_with, name, 70, "tp=2 precision=fp64"))


def test_moved_batches_are_checked_on_the_host():
    model = nn.Sequential(nn.Embedding(10, 4))
    watch_indices(model)
    model.to("meta")
    good, bad = (move_batch(torch.tensor([[1, last]]), torch.device("meta")) for last in (9, 10))
    model(good)
    model(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    for part in (bad, bad[:1], bad[:, 1:]):
        with pytest.raises(ModelError, match=r"id 10: 0 \(Embedding\) has 10 entries"):
            model(part)


SCRIPT = """
import torch, weft
from tools.gpu_sim.cuda import current_device

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

    def forward(self, input_ids):
        return self.head(self.table(input_ids))


def loss_fn(logits, batch):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), 8


run = weft.init("precision=fp32 accumulation=2")
step = run.train_step(run.parallelize(Model()), torch.optim.SGD, loss_fn, lr=0.1)
ids = torch.arange(8).view(2, 4)
for _ in range(3):
    current_device().begin()
    step({"input_ids": ids.pin_memory(), "labels": ids.pin_memory()})
print("waits", sum(current_device().report().syncs.values()))
ids[1, 2] = 16
try:
    step({"input_ids": ids.pin_memory(), "labels": ids.pin_memory()})
except weft.errors.ModelError as error:
    print(error)
"""


@pytest.mark.paper
def test_simulated_gpu_step_checks_ids_without_waits(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = script_on_paper(script)
    assert done.returncode == 0, done.stderr
    waits, message = done.stdout.splitlines()
    assert waits == "waits 0"
    assert message.startswith("id 16: table (Embedding) has 16 entries. Use ids from 0 to 15")
