"""Metrics of recommenders over all ranks: the exact area under the ROC curve, and the ranks of items.

Both are computed from integers, so that they do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import Axis
from weft.comm.peer import all_to_all
from weft.config.partitioning import share_out
from weft.recommend.options import RecommendOptions
from weft.recommend.record_batches import RecordBatches
from weft.train.losses import GatheredFeatures
from weft.train.tasks.base import EvaluationScorer, Metric

#: Keys that all ranks together contribute to the choice of ranges, if there are fewer ranks than half of it.
_SAMPLED_KEYS = 2**12
#: Scores of a block of items that exist at a time, and items whose vectors are computed at a time.
_MOST_SCORES, _ITEMS_AT_ONCE = 2**24, 2**12


class AreaUnderCurve:
    """Collects scores and labels of an evaluation, and computes the area under the ROC curve.

    Args:
        axis: ranks that read different samples.
    """

    def __init__(self, axis: Axis):
        self._axis = axis
        self._scores, self._labels = list[Tensor](), list[Tensor]()

    def add(self, output: Tensor, batch: Mapping[str, Tensor], *, counts: bool) -> None:
        """Add the scores (B,) of a batch. Samples whose label is NaN are not counted."""
        labels = batch["labels"]
        kept = labels.isfinite() & counts
        self._scores.append(output.double()[kept])
        self._labels.append(labels[kept] > 0.5)

    def finish(self) -> Mapping[str, float | None]:
        """Return `auc`. All ranks call it."""
        return {"auc": exact_auc(torch.cat(self._scores), torch.cat(self._labels), self._axis)}


def exact_auc(scores: Tensor, labels: Tensor, axis: Axis) -> float | None:
    """Return the share of pairs of a positive and a negative in which the positive has the higher score.

    Ties count half. Ranks exchange their scores so that each has a range of them; the memory of a rank is its share of
    the samples. Returns None without positives or negatives, or if a score is not a number. All ranks call it.

    Args:
        scores: float64 (N,) of this rank.
        labels: bool (N,).
        axis: the ranks.
    """
    keys = _ordered_keys(scores)
    if axis.size > 1:
        keys, labels = _by_range(keys, labels, axis)
    order = keys.argsort()
    keys, labels = keys[order], labels[order]
    _, group, sizes = keys.unique_consecutive(return_inverse=True, return_counts=True)
    positive_G = torch.zeros_like(sizes).index_add_(0, group, labels.long())
    negative_G = sizes - positive_G
    own = torch.stack([positive_G.sum(), negative_G.sum(), scores.isnan().sum()])
    every = all_gather(own, axis).view(axis.size, 3) if axis.size > 1 else own[None]
    below = every[: axis.rank, 1].sum() + negative_G.cumsum(0) - negative_G
    twice = (positive_G * (2 * below + negative_G)).sum()
    twice = int(all_reduce(twice, axis)) if axis.size > 1 else int(twice)
    num_positive, num_negative, num_nan = every.sum(0).tolist()
    return None if num_nan or not num_positive or not num_negative else twice / (2 * num_positive * num_negative)


def _ordered_keys(scores: Tensor) -> Tensor:
    """Return int64 keys in the order of float64 scores. 0 and -0 have the same key."""
    bits = (scores + 0.0).view(torch.int64)
    return torch.where(bits < 0, bits ^ (2**63 - 1), bits)


def _by_range(keys: Tensor, labels: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Send each key with its label to the rank that holds its range. Equal keys arrive at one rank."""
    num_each = max(2, _SAMPLED_KEYS // axis.size)
    ordered = keys.sort().values
    picked = torch.arange(num_each, device=keys.device) * max(0, len(keys) - 1) // (num_each - 1)
    own = ordered[picked] if len(keys) else keys.new_full((num_each,), 2**63 - 1)
    sampled = all_gather(own, axis).sort().values
    borders = sampled[[len(sampled) * rank // axis.size for rank in range(1, axis.size)]]
    target = torch.searchsorted(borders, keys, right=True)
    order = target.argsort(stable=True)
    sent = torch.bincount(target, minlength=axis.size)
    send, receive = (one.tolist() for one in (sent, all_to_all(sent, axis)))
    pairs = torch.stack([keys, labels.long()], 1)[order]
    arrived = all_to_all(pairs, axis, send=send, receive=receive)
    return arrived[:, 0].contiguous(), arrived[:, 1] > 0


class ItemRanks:
    """Ranks of the right items among all items, for recall@k and NDCG@k.

    Each rank of the axis holds the vectors of its share of the items. Of items with equal scores, the one with the
    smaller id is first.

    Args:
        vectors: returns the vectors (N, D) of items by their ids, int64 (N,). It may be a collective: all ranks call it
            the same number of times.
        num_items: items have the ids 1 to num_items.
        ks: values of k.
        axis: ranks that read different samples.
    """

    def __init__(self, vectors: Callable[[Tensor], Tensor], num_items: int, ks: Sequence[int], axis: Axis):
        self._axis, self._ks = axis, tuple(ks)
        shares = share_out(num_items, axis.size)
        own, most = shares[axis.rank], len(shares[0])
        found = list[Tensor]()
        for start in range(0, most, _ITEMS_AT_ONCE):
            ids = torch.arange(start, min(start + _ITEMS_AT_ONCE, most)) + own.start + 1
            found.append(_wide(vectors(ids.clamp(max=num_items))))
        self._vectors = torch.cat(found)[: len(own)]
        self._first = own.start + 1
        # Samples by the rank of their item, and in the last entry samples whose item is not among the first.
        self._counts = torch.zeros(max(ks) + 1, dtype=torch.int64, device=self._vectors.device)

    def add(self, queries: Tensor, targets: Tensor, *, counts: bool) -> None:
        """Add a batch of samples. All ranks call it.

        Args:
            queries: vectors (B, D). Products with the items' vectors are the scores.
            targets: ids of the right items, int64 (B,); 0 for an item that is not among them, -1 for no sample.
            counts: False for a placeholder.
        """
        gathered = GatheredFeatures(self._axis)
        gathered.add([_wide(queries), targets], counts=counts)
        queries, targets = gathered.every
        index = targets - self._first
        here = (index >= 0) & (index < len(self._vectors)) & (targets > 0)
        scores = torch.zeros(len(targets), dtype=queries.dtype, device=queries.device)
        scores[here] = (queries[here] * self._vectors[index[here]]).sum(1)
        scores = all_reduce(scores, self._axis)
        before = all_reduce(self._num_before(queries, targets, scores), self._axis)
        before = torch.where(targets > 0, before, len(self._counts))[targets >= 0]
        self._counts += torch.bincount(before.clamp(max=len(self._counts) - 1), minlength=len(self._counts))

    def _num_before(self, queries: Tensor, targets: Tensor, scores: Tensor) -> Tensor:
        """Return the number of this rank's items before each target, int64 (B,)."""
        before = torch.zeros_like(targets)
        step = max(1, _MOST_SCORES // max(1, len(queries)))
        for start in range(0, len(self._vectors), step):
            found = queries @ self._vectors[start : start + step].T
            ids = torch.arange(found.shape[1], device=found.device) + self._first + start
            is_target = ids == targets[:, None]
            is_tied = (found == scores[:, None]) & (ids < targets[:, None])
            before += (((found > scores[:, None]) | is_tied) & ~is_target).sum(1)
        return before

    def finish(self) -> Mapping[str, float | None]:
        """Return `recall_at_K` and `ndcg_at_K` for each K."""
        counts = self._counts.tolist()
        total, found = sum(counts), dict[str, float | None]()
        for k in self._ks:
            gain = math.fsum(count / math.log2(rank + 2) for rank, count in enumerate(counts[:k]))
            found[f"recall_at_{k}"] = sum(counts[:k]) / total if total else None
            found[f"ndcg_at_{k}"] = gain / total if total else None
        return found


def _wide(values: Tensor) -> Tensor:
    return values.detach() if values.itemsize >= 4 else values.detach().float()


class RankedItems:
    """Adapts `ItemRanks` to the outputs of a task.

    Args:
        ranks: collects the ranks.
        query: returns (queries, targets) of an output and its batch.
    """

    def __init__(self, ranks: ItemRanks, query: Callable[[Any, Any], tuple[Tensor, Tensor]]):
        self._ranks, self._query = ranks, query

    def add(self, output: Any, batch: Any, *, counts: bool) -> None:
        """Add a batch. All ranks call it."""
        self._ranks.add(*self._query(output, batch), counts=counts)

    def finish(self) -> Mapping[str, float | None]:
        """Return the metrics."""
        return self._ranks.finish()


# The metrics of each model.


def evaluation_metrics(options: RecommendOptions) -> tuple[Metric, ...]:
    """Return the metrics of a task's model."""
    if options.is_pointwise:
        return (
            Metric("auc", "", "area under the ROC curve over all samples of the evaluation"),
            Metric("log_loss", "", "mean negative log-likelihood of the labels, in nats"),
        )
    found: list[Metric] = []
    for k in map(round, options.k):
        found += [
            Metric(f"recall_at_{k}", "", f"share of samples whose item is among the {k} best of all items"),
            Metric(f"ndcg_at_{k}", "", f"mean of 1 / log2(1 + rank) of the item, 0 beyond rank {k}"),
        ]
    return tuple(found)


def evaluation_scorer(
    options: RecommendOptions, batches: RecordBatches, model: nn.Module, axis: Axis
) -> EvaluationScorer:
    """Return the scorer of an evaluation. All ranks call it.

    Args:
        options: the task's options.
        batches: has the columns of items.
        model: the sharded model, in evaluation mode.
        axis: ranks that read different samples.
    """
    if options.is_pointwise:
        return AreaUnderCurve(axis)
    device = next(model.parameters()).device

    def vectors(ids: Tensor) -> Tensor:
        inputs = {name: one.to(device) for name, one in batches.item_inputs(ids).items()}
        return model(of_items=True, **inputs)[1]

    number = batches.num_rows(options.schema.item[0]) - 1
    ranks = ItemRanks(vectors, number, [round(one) for one in options.k], axis)
    if options.model == "sasrec":
        return RankedItems(ranks, lambda output, batch: (output[1], batch["target"]))
    return RankedItems(ranks, lambda output, batch: (output[0], batch["item"]))
