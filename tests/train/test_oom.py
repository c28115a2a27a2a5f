"""Out of memory: live bytes by class, changes that would help, and other errors unchanged."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import OutOfMemory
from weft.parallel.parallelize import parallelize
from weft.train.batches.microbatches import Microbatches, microbatch_size
from weft.train.step.errors import is_out_of_memory, live_bytes
from weft.train.step.train_step import TrainStep

IN_A_SMALL_PLACE = """
import resource, torch
torch.set_num_threads(1)
from weft.errors import OutOfMemory
from weft.comm.mesh import build_mesh
from weft.models import build_decoder
from weft.parallel.parallelize import parallelize
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.plan import Plan
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.train.batches.microbatches import microbatch_size

spec = DecoderSpec(vocab_size=512, dim=128, num_layers=6, num_heads=4, num_kv_heads=4, ffn_dim=384, max_seq_len=512)
mesh = build_mesh(Plan.parse("accumulation=2"))
model = parallelize(build_decoder(spec, seed=0), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)

def batch(rows):
    ids = torch.zeros(rows, 512, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "positions": torch.arange(512).repeat(rows, 1)}

step(batch(2))
with open("/proc/self/status") as status:
    size = 1024 * int(next(line for line in status if line.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (size + 150 * 2**20, size + 150 * 2**20))
try:
    step(batch(64))
except OutOfMemory as error:
    print(error)
    print("loss", step(batch(2)).loss > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the address space")
def test_process_out_of_memory_lists_live_bytes_and_continues_with_less():
    done = subprocess.run([sys.executable, "-c", IN_A_SMALL_PLACE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert re.fullmatch(
        r"plan=accumulation=2: rank 0 ran out of memory on cpu: an allocation of .* failed, "
        r"with .* resident at the peak:",
        first,
    )
    table = {name.strip(): value for name, value in (re.split(r"  +", row.strip()) for row in rows[:5])}
    assert list(table)[:4] == ["parameters", "gradients", "optimizer states", "buffers"]
    assert table["parameters"] == table["gradients"]
    assert float(table["optimizer states"].split()[0]) == pytest.approx(2 * float(table["parameters"].split()[0]), 0.01)
    assert rows[6].startswith("  1. accumulation=")
    assert "recompute=full" in done.stdout
    assert rows[-1] == "loss True"


def a_step(model: nn.Module | None = None) -> TrainStep:
    model = model or nn.Linear(1000, 10, bias=False)
    mesh = build_mesh(Plan())
    parallelize(model, mesh)

    def loss(output, batch):
        return output.sum(), len(batch)

    return TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), loss, mesh)


class Raises(nn.Module):
    def __init__(self, error: Exception):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))
        self.error = error

    def forward(self, x):
        raise self.error


def test_gpu_out_of_memory_is_explained(monkeypatch):
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB"
    step = a_step(Raises(torch.OutOfMemoryError(text)))
    monkeypatch.setattr("weft.train.step.errors.memory_bytes", lambda device: (9 * 2**30, 10 * 2**30))
    with pytest.raises(OutOfMemory) as caught:
        step(torch.ones(4, 1000))
    assert caught.value.exit_code == 4
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "plan=dp_replicate=1: rank 0 ran out of memory on cpu: an allocation of 2.50 GiB failed, "
        "with 10.0 GiB resident at the peak:"
    )
    assert re.fullmatch(r"  optimizer states +0 B  \(7\.81 KiB more with the first update\)", lines[3])
    assert lines[6:] == [
        "Try these changes of the plan, best first (each alone; saved bytes are estimates):",
        "  1. accumulation=2  (about 5.00 GiB less)",
        "  2. precision=bf16  (about 5.00 GiB less)",
        "  3. offload=activations  (about 3.33 GiB less)",
    ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
        (OutOfMemory("explained"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error, expected):
    assert is_out_of_memory(error) == expected


def test_other_errors_are_unchanged():
    for error in (RuntimeError("shapes"), ValueError("bad"), OutOfMemory("explained")):
        with pytest.raises(type(error)) as caught:
            a_step(Raises(error))(torch.ones(1, 1000))
        assert caught.value is error


def test_live_bytes_count_each_storage_once():
    tied = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False), nn.BatchNorm1d(50))
    tied[1].weight = tied[0].weight
    master = nn.Parameter(tied[0].weight.detach().double())
    optimizer = torch.optim.AdamW([master, *tied[2].parameters()])
    before = live_bytes(tied, optimizer)
    assert (before.parameters, before.gradients, before.optimizer) == (10_000 + 400, 0, 20_000)
    assert before.expected_optimizer == 2 * (20_000 + 400)
    for param in (master, *tied[2].parameters()):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    after = live_bytes(tied, optimizer)
    steps = 3 * 4
    assert (after.gradients, after.optimizer) == (20_400, 20_000 + 2 * 20_400 + steps)
    hidden = torch.zeros(7)
    assert live_bytes(tied, optimizer, [hidden, master.grad]).gradients == 20_400 + 28
    assert after.buffers == 400 + 8
    assert after.expected_optimizer == 0


def test_microbatch_size_is_found_for_every_kind_of_batch():
    x = torch.zeros(8, 3)
    assert microbatch_size([x, x], 4) == microbatch_size({"x": x, "n": 3}, 4) == (2, 6)
    assert microbatch_size(Microbatches([[x], [x[:1]]]), 2) == (8, 24)
    assert microbatch_size({"scale": torch.tensor(1.0)}, 2) == (0, 0)
