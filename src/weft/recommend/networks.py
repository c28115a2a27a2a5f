"""The models of `weft.models.recommenders` for the columns of a schema, and their loss functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.models.initialize import initialise
from weft.models.recommenders import DeepFm, Dlrm, FeatureTower, IdField, SasRec, TwoTower
from weft.recommend.columns import RecordColumn
from weft.recommend.options import RecommendOptions
from weft.train.losses import GlobalBatchLoss
from weft.train.tasks.folder_task import IGNORED


class NetworkBuilder:
    """Builds the model of some options.

    Args:
        options: the task's options.
        num_rows: returns the rows of the embedding table of a column, by its name.
    """

    def __init__(self, options: RecommendOptions, num_rows: Callable[[str], int]):
        self._options, self._schema, self._num_rows = options, options.schema, num_rows
        self._hidden = [round(one) for one in options.hidden]

    def shapes(self) -> nn.Module:
        """Return the model on the meta device."""
        with torch.device("meta"):
            return self._network()

    def build(self, seed: int) -> nn.Module:
        """Return the model with initial weights, or without values if torch's default device is meta."""
        model = self.shapes()
        if torch.get_default_device().type != "meta":
            model.to_empty(device="cpu")
            initialise(model, seed)
        return model

    def _network(self) -> nn.Module:
        options, schema = self._options, self._schema
        if options.model == "sasrec":
            rows = self._num_rows(schema.item[0])
            return SasRec(rows, options.length, options.dim, options.layers, options.heads, options.dropout)
        if options.model == "two_tower":
            return TwoTower(self._tower(schema.user), self._tower(schema.item))
        kind = Dlrm if options.model == "dlrm" else DeepFm
        fields = [self._field(one) for one in schema.columns if one.has_ids]
        return kind(fields, len(schema.numbers), options.dim, self._hidden, options.dropout)

    def _tower(self, names: Sequence[str]) -> FeatureTower:
        columns = [self._schema.named(name) for name in names]
        fields = [self._field(one) for one in columns if one.has_ids]
        numbers = [self._schema.numbers.index(one) for one in columns if one.kind == "number"]
        return FeatureTower(fields, numbers, self._options.dim, self._hidden, self._options.dropout)

    def _field(self, column: RecordColumn) -> IdField:
        index = self._schema.ids.index(column) if column.kind == "id" else None
        return IdField(column.module, self._num_rows(column.name), index, column.padding)


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
