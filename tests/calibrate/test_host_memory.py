"""Peak bytes that the planner expects of a host's rank, beside live tensors of a real step in one process."""

from __future__ import annotations

import pytest
import torch

from weft.mesh import build_mesh
from weft.models import build_decoder
from weft.parallel import parallelize
from weft.planner.measured.host.live_bytes import host_memory
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape
from weft.spec import DecoderSpec
from weft.spec.plan import Plan
from weft.testing.memory import peak_of_step
from weft.train import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

SPEC = DecoderSpec(vocab_size=1024, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=192, max_seq_len=128)
SEQ_LEN, ROWS = 128, 4


@pytest.mark.parametrize("text", ["", "accumulation=2", "recompute=full", "recompute=selective"])
def test_peak_bytes_are_those_of_live_tensors(text: str) -> None:
    plan = Plan.parse(text)
    mesh, model = build_mesh(plan), build_decoder(SPEC)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.randint(SPEC.vocab_size, (ROWS, SEQ_LEN))
    batch = {"input_ids": ids, "labels": ids.clone(), "positions": torch.arange(SEQ_LEN).repeat(ROWS, 1)}
    step(batch)  # optimizer states are made in the first
    job = Job(shape=Shape.of_decoder(SPEC), seq_len=SEQ_LEN, global_batch=ROWS)
    expected = sum(float(values[0]) for values in host_memory(job, Columns.of([plan], job)).values())
    assert expected == pytest.approx(peak_of_step(step, batch), rel=0.03)
