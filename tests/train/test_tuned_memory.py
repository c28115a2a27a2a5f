"""Expected memory of an adapter in the planner, compared with the live tensors of a real step."""

from __future__ import annotations

import pytest
import torch

from tools.live_memory import peak_of_step
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.sections import OptimizerSection
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.adapters import add_adapter
from weft.models.registry import build_decoder
from weft.optim.build import build_optimizer
from weft.parallel.parallelize import parallelize
from weft.planner.search.question import tuned_question
from weft.planner.search.refine import estimated
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

SPEC = DecoderSpec(
    family="llama", vocab_size=512, dim=256, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=704, max_seq_len=256,
    tied=True,
)  # fmt: skip
ROWS, SEQ_LEN, RANK = 4, 256, 8
#: Memory of a GPU process, which is not part of the step's tensors.
_BESIDE = ("context", "communicators", "reserve")


def measured(plan: Plan, rank: int) -> int:
    torch.manual_seed(0)
    mesh, model = build_mesh(plan), build_decoder(SPEC, seed=0)
    if rank:
        add_adapter(model, rank=rank)
    parallelize(model, mesh)
    optimizer = build_optimizer(model.named_parameters(), OptimizerSection(lr=1e-3), 0)
    step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward)
    ids = torch.randint(SPEC.vocab_size, (ROWS, SEQ_LEN))
    batch = {"input_ids": ids, "labels": ids.clone(), "positions": torch.arange(SEQ_LEN).repeat(ROWS, 1)}
    step(batch)  # the first step creates optimizer states
    return peak_of_step(step, batch)


def expected(plan: Plan, rank: int) -> float:
    sizes = {"seq_len": SEQ_LEN, "global_batch": ROWS}
    asked = tuned_question(SPEC, "1xa100", f"lora={rank}" if rank else "full", **sizes)
    (one,) = estimated([plan], asked)
    return sum(num_bytes for name, num_bytes in one.memory.items() if name not in _BESIDE)


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [
        "precision=bf16 recompute=full",
        *(pytest.param(text, marks=pytest.mark.full) for text in ("recompute=full", "", "precision=bf16")),
    ],
)
def test_frozen_weights_save_the_memory_that_the_planner_expects(text):
    plan = Plan.parse(text)
    full, adapter = (measured(plan, rank) for rank in (0, RANK))
    assert expected(plan, RANK) == pytest.approx(adapter, rel=0.25)
    # Only masters, gradients and states of the weights are missing.
    assert expected(plan, 0) - expected(plan, RANK) == pytest.approx(full - adapter, rel=0.12)
