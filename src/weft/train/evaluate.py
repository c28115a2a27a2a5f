"""Evaluation: the loss over a fixed set of sequences, the same number under every plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from weft.comm import all_reduce
from weft.mesh import Mesh
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
    for batch in batches:
        local = {name: tensor.to(mesh.device) for name, tensor in batch.items()}
        loss_sum, num_tokens = token_cross_entropy(model_forward(model, local), local)
        totals[0] += loss_sum
        totals[1] += num_tokens
        if token_bytes is not None:
            labels = local["labels"]
            totals[2] += token_bytes[labels[labels != IGNORE]].sum()
    model.train()
    loss_sum, num_tokens, num_bytes = all_reduce(totals, mesh.batch).tolist()
    return Evaluation(
        loss=loss_sum / max(num_tokens, 1.0),
        bits_per_byte=loss_sum / (math.log(2) * num_bytes) if num_bytes else None,
        num_tokens=round(num_tokens),
    )
