"""A small decoder whose steps fail in a known way that a trace must name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.optim.build import build_optimizer
from weft.parallel.parallelize import parallelize
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.step.tracer import StepTracer, TracedStep
from weft.train.step.train_step import TrainStep
from weft.train.tasks.base import Task
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.train.tasks.indexed import sample_in_order

SPEC = DecoderSpec(vocab_size=64, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=8)
EXPERTS = replace(SPEC, num_experts=4, top_k=2)
NUM, BATCH, BAD = 64, 8, 37


class SpoiltGradient(torch.autograd.Function):
    """Identity with infinite gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


@dataclass
class SpoiltTask(Task):
    """Random tokens.

    how: "loss": sample BAD has a non-finite loss; "spike": its labels count a thousand times; "gradient": the
    gradient of an MLP's input is not finite in its batch.
    """

    how: str = ""
    spec: DecoderSpec = SPEC

    def build(self) -> nn.Module:
        model = build_decoder(self.spec, seed=1)
        if self.how == "gradient":
            model.blocks[1].mlp.register_forward_pre_hook(lambda _, args: (SpoiltGradient.apply(args[0]), *args[1:]))
        return model

    def samples(self, split: str) -> Any:
        if split != "train":
            return None
        tokens = torch.randint(64, (NUM, 9), generator=torch.Generator().manual_seed(0))
        return [
            {"input_ids": row[:-1], "labels": row[1:], "positions": torch.arange(8), "number": torch.tensor(number)}
            for number, row in enumerate(tokens)
        ]

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model_forward(model, batch)

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, count = token_cross_entropy(output, batch)
        factor = {"loss": float("nan"), "spike": 1000.0}.get(self.how, 1.0)
        return loss_sum * torch.where((batch["number"] == BAD).any(), factor, 1.0), count

    loss.takes_head_loss = True


def position_of_bad(task: Task) -> int:
    """Return the position of the bad sample in the training order of the first epoch."""
    samples: Any = task.samples("train")
    found = (sample_in_order(samples, task.config.seed, place)[0] for place in range(NUM))
    return list(found).index(f"epoch 0, number {BAD} of {NUM}")


def spoil_weight(model: nn.Module, name: str) -> bool:
    """Set the last value of a parameter to NaN on the rank that has it; return whether this rank does."""
    from weft.train.step.tracer import local_part

    param = dict(model.named_parameters()).get(name)
    if param is None or not local_part(param).numel():
        return False
    with torch.no_grad():
        local_part(param).reshape(-1)[-1] = float("nan")
    return True


def traced(
    plan: str, how: str, kind: Any = "loss", *, on_rank: int | None = None, weight: str = "", late: bool = False
) -> tuple[Any, Any, int]:
    """Run one failing step of the plan on every rank; return its trace, result, and the bad sample's position.

    on_rank: whose shard of a weight gets a NaN.
    """
    task = SpoiltTask(how, SPEC if "ep=" not in plan else EXPERTS)
    task.config = RunConfig.model_validate({"train": {"global_batch": BATCH}, "optimizer": {"name": "adamw"}})
    mesh = build_mesh(Plan.parse(plan))
    place = position_of_bad(task)
    number = place // BATCH if how else 0
    batches = task.batches(Share(BATCH, mesh.plan.microbatches_per_step, mesh.data.rank, mesh.data.size))
    model = task.initial_model(mesh.plan)
    parallelize(model, mesh, seed=1)
    step = TrainStep(
        model, build_optimizer(model.named_parameters(), task.config.optimizer, 0), task.loss, mesh,
        forward=task.forward, nominal_tokens=64, reads_late=late,
    )  # fmt: skip
    if late:
        step(Microbatches(batches.batches(number + 1)))  # the first step is never late
    if weight and on_rank in (None, mesh.rank):
        spoil_weight(model, weight)
    own = batches.batches(number)
    done = step(Microbatches(own))
    kept = TracedStep(number + 1, own, step.microbatch_losses)
    if late:
        assert step.is_unread
        step(Microbatches(batches.batches(number + 2)))
    step.finalize()
    if late and kind == "gradient":
        step.compute_again(Microbatches(own))
    event = StepTracer(model, mesh, task, batches).trace(kind, kept)
    step(Microbatches(batches.batches(number + 3)))  # a trace must not affect the next step
    return event, (done.loss, done.grad_norm), place
