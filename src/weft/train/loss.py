"""The loss of language models: cross-entropy as (sum, number of tokens)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

#: Label of a position that is not trained.
IGNORE = -100


def token_cross_entropy(logits_BTV: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the cross-entropies in nats over the trained positions, and their number.

    logits_BTV: batch, time, vocabulary; of any float format, summed in fp32 (fp64 for fp64). `batch["labels"]`
    (batch, time) is already shifted; -100 marks positions that are not trained.
    """
    labels = batch["labels"]
    logits = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss_sum, (labels != IGNORE).sum()


def model_forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run one of the project's decoders on a batch of the project's loader: logits (batch, time, vocabulary)."""
    return model(batch["input_ids"], batch["positions"], batch.get("document_ids"))
