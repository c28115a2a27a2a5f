"""The loss of language models: cross-entropy as (sum, number of tokens)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import functional as F

from weft.errors import ModelError
from weft.parallel.layers.index_check import check_labels
from weft.parallel.tensor.language_head import HeadLoss

#: Label of a position that is ignored in the loss.
IGNORE = -100


def token_cross_entropy(
    logits_BTV: torch.Tensor | HeadLoss, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropies (nats) over positions with a label, and the number of these positions.

    logits_BTV: (batch, time, vocabulary), in any float dtype; or a `HeadLoss`, the loss that the head has computed. The
    loss of logits is computed in fp32, or in fp64 for fp64 logits. `batch["labels"]` (batch, time) is already shifted;
    -100 marks positions without a label. With `batch["weights"]`, each position is weighted in the sum and in the
    count, so that the quotient is the weighted mean.

    Raises:
        ModelError: if the head computed the loss for different labels, or if a label is outside the vocabulary and the
            host has its value.
    """
    labels = batch["labels"]
    if isinstance(logits_BTV, HeadLoss):
        if logits_BTV.labels is not labels:
            raise ModelError(
                "loss: the head computed its loss from other labels than this batch has. Pass the batch "
                "that the forward got."
            )
        return logits_BTV.loss_sum, logits_BTV.num_tokens
    check_labels(labels, logits_BTV.shape[-1], IGNORE)
    logits = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    weights = batch.get("weights")
    if weights is not None:
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
        weights = weights.flatten().where(labels.flatten() != IGNORE, 0.0)
        return losses @ weights.to(losses), weights.sum(dtype=torch.float64)
    loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss_sum, (labels != IGNORE).sum()


#: The head may return the loss instead of logits: see `weft.parallel.tensor.language_head`.
token_cross_entropy.takes_head_loss = True


def model_forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run one of Weft's decoders on a batch of Weft's loader and return logits (batch, time, vocabulary)."""
    ids = batch.get("document_ids")
    if ids is None:
        return model(batch["input_ids"], batch["positions"])
    return model(batch["input_ids"], batch["positions"], ids, document_starts_BM=batch.get("document_starts"))


def perplexity(sums: Mapping[str, float]) -> float | None:
    """Return the exponential of the mean loss, or None if nothing was counted or the value overflows."""
    if not sums["count"]:
        return None
    mean = sums["loss"] / sums["count"]
    return math.exp(mean) if mean < 700 else None
