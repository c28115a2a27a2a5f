"""Evaluation: the loss over a fixed set of sequences, the same number under every plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.comm import all_reduce
from weft.mesh import Axis, Mesh
from weft.parallel.context import cut_sequence, sequence_in_use
from weft.parallel.head import expect_labels
from weft.parallel.pipeline.runtime import pipeline_of
from weft.train.loss import IGNORE, model_forward, token_cross_entropy

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """loss: nats per trained token. bits_per_byte: of the text those tokens stand for; None without a tokenizer."""

    loss: float
    bits_per_byte: float | None
    num_tokens: int


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], mesh: Mesh, token_bytes: torch.Tensor | None) -> Evaluation:
    """Loss of this rank's batches, added over the data-parallel ranks.

    token_bytes: number of bytes of text behind each token id (vocabulary,), on the mesh's device.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    model.eval()

    def add(output: Any, local: Batch) -> None:
        loss_sum, num_tokens = token_cross_entropy(output, local)
        totals[0] += loss_sum
        totals[1] += num_tokens
        if token_bytes is not None:
            labels = local["labels"]
            totals[2] += token_bytes[labels[labels != IGNORE]].sum()

    def forward(model: nn.Module, local: Batch) -> Any:
        with expect_labels(model, token_cross_entropy, local):
            return model_forward(model, local)

    parts = (cut_sequence(model, {n: tensor.to(mesh.device) for n, tensor in batch.items()}) for batch in batches)
    pipeline = pipeline_of(model)
    with sequence_in_use(model):
        if pipeline is not None:
            pipeline.evaluate(parts, forward, add)
        else:
            for local in parts:
                add(forward(model, local), local)
    model.train()
    loss_sum, num_tokens, num_bytes = all_reduce(totals, _counted(mesh)).tolist()
    return Evaluation(
        loss=loss_sum / max(num_tokens, 1.0),
        bits_per_byte=loss_sum / (math.log(2) * num_bytes) if num_bytes else None,
        num_tokens=round(num_tokens),
    )


def _counted(mesh: Mesh) -> Axis:
    """The ranks whose sums add up; of a pipeline, only the last stage has any, and all want to know."""
    return mesh.batch if mesh.plan.pp == 1 else mesh["pp", "dp_replicate", "dp_shard", "cp"]
