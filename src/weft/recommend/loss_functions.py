"""Loss functions of recommenders: of labels, of pairs in the global batch, and of next items."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.recommend.options import RecommendOptions
from weft.train.losses import GlobalBatchLoss
from weft.train.tasks.folder_task import IGNORED


def loss_function(options: RecommendOptions) -> Callable[[Any, Any], tuple[Tensor, Tensor | int]]:
    """Return the loss of a task's model."""
    if options.model == "two_tower":
        return GlobalBatchLoss(partial(_compare, temperature=options.temperature))
    return _next_items if options.model == "sasrec" else _log_loss


def _log_loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of the binary cross-entropies of logits, and their number. Labels that are NaN are not counted."""
    labels, logits = batch["labels"], _wide(output)
    counts = labels.isfinite()
    losses = F.binary_cross_entropy_with_logits(logits, labels.nan_to_num().to(logits.dtype), reduction="none")
    return (losses * counts).sum(), counts.sum()


def _wide(values: Tensor) -> Tensor:
    return values if values.itemsize == 8 else values.float()


def _compare(own: Any, every: Any, places: Tensor, *, temperature: float) -> tuple[Tensor, Tensor | int]:
    """Return the sum of the sampled softmax losses of some samples, whose negatives are all other items.

    An item of the batch is left out as a negative of a sample with the same item.
    """
    (users, _, own_item, _), (_, vectors, item, log_q) = own, every
    scores = users @ vectors.T / temperature - log_q
    is_own = places[:, None] == torch.arange(len(item), device=item.device)
    is_left_out = ((own_item[:, None] == item) | (item < 0)) & ~is_own
    losses = F.cross_entropy(scores.masked_fill(is_left_out, -torch.inf), places, reduction="none")
    counts = own_item >= 0
    return (losses * counts).sum(), counts.sum()


def _next_items(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross-entropies of next items, and their number."""
    scores, labels = _wide(output[0]), batch["labels"]
    counts = labels != IGNORED
    if "candidates" in batch:
        labels = torch.where(counts, 0, IGNORED)
    else:  # row 0 is padding
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) == 0, -torch.inf)
    losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return losses, counts.sum()
