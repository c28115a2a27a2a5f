"""Metrics of recommenders equal plain formulas, on any number of ranks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from weft.comm.mesh import build_mesh
from weft.config.partitioning import share_out
from weft.config.plan import Plan
from weft.recommend.metrics import AreaUnderCurve, ItemRanks, exact_auc


def samples(seed: int) -> tuple[Tensor, Tensor]:
    """Return scores with ties, zeros of both signs and large and small values, and labels."""
    rng = random.Random(seed)
    number = rng.choice([0, 1, 2, 7, 100, 900])
    kinds = [
        lambda: float(rng.randrange(-3, 4)),
        lambda: rng.gauss(0, 1),
        lambda: rng.choice([0.0, -0.0, 1e-300, -1e300, math.inf, -math.inf]),
    ]
    draw = kinds[seed % 3]
    scores = torch.tensor([draw() for _ in range(number)], dtype=torch.float64)
    return scores, torch.tensor([rng.random() < 0.3 for _ in range(number)], dtype=torch.bool)


def plain_auc(scores: Tensor, labels: Tensor) -> float | None:
    positive, negative = scores[labels], scores[~labels]
    if not len(positive) or not len(negative):
        return None
    wins = (positive[:, None] > negative).sum() + (positive[:, None] == negative).sum() / 2
    return float(wins) / (len(positive) * len(negative))


def auc_on_rank(plan: str, seeds: list[int]) -> list[float | None]:
    axis = build_mesh(Plan.parse(plan)).data
    found = []
    for seed in seeds:
        scores, labels = samples(seed)
        own = share_out(len(scores), axis.size)[axis.rank]
        found.append(exact_auc(scores[own.start : own.stop], labels[own.start : own.stop], axis))
    return found


def test_auc_equals_all_pairs_on_any_number_of_ranks(ranks2):
    seeds = list(range(24))
    expected = [plain_auc(*samples(seed)) for seed in seeds]
    assert sum(one is not None for one in expected) > 8
    assert auc_on_rank("dp_replicate=1", seeds) == expected
    assert ranks2.run(auc_on_rank, "dp_replicate=2", seeds) == [expected, expected]


@pytest.mark.full
def test_auc_on_four_ranks(ranks4):
    seeds = list(range(40))
    expected = [plain_auc(*samples(seed)) for seed in seeds]
    assert ranks4.run(auc_on_rank, "dp_replicate=2 dp_shard=2", seeds) == [expected] * 4


def test_auc_of_nan_is_undefined():
    scores, labels = torch.tensor([1.0, math.nan, 0.0]).double(), torch.tensor([True, False, False])
    assert exact_auc(scores, labels, build_mesh(Plan()).data) is None


def test_samples_without_label_are_not_counted():
    area = AreaUnderCurve(build_mesh(Plan()).data)
    area.add(torch.tensor([3.0, 1.0, 2.0]), {"labels": torch.tensor([1.0, 0.0, math.nan])}, counts=True)
    area.add(torch.tensor([0.0]), {"labels": torch.tensor([1.0])}, counts=False)
    assert area.finish() == {"auc": 1.0}


NUM_ITEMS, QUERIES, KS = 37, 30, (1, 5, 20)


def ranking(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return integer vectors of items, whose products have many ties, queries, and targets with 0 and -1."""
    rng = torch.Generator().manual_seed(seed)
    items = torch.randint(-2, 3, (NUM_ITEMS + 1, 3), generator=rng).double()
    queries = torch.randint(-2, 3, (QUERIES, 3), generator=rng).double()
    return items, queries, torch.randint(-1, NUM_ITEMS + 1, (QUERIES,), generator=rng)


def plain_ranking(seed: int) -> dict[str, float]:
    items, queries, targets = ranking(seed)
    ranks = []
    for query, target in zip(queries, targets.tolist(), strict=True):
        if target == 0:
            ranks.append(math.inf)
        elif target > 0:
            order = sorted(range(1, NUM_ITEMS + 1), key=lambda item: (-float(query @ items[item]), item))
            ranks.append(order.index(target))
    found = {}
    for k in KS:
        found[f"recall_at_{k}"] = sum(rank < k for rank in ranks) / len(ranks)
        found[f"ndcg_at_{k}"] = sum(1 / math.log2(rank + 2) for rank in ranks if rank < k) / len(ranks)
    return found


def ranking_on_rank(plan: str, seed: int) -> dict[str, float | None]:
    axis = build_mesh(Plan.parse(plan)).data
    items, queries, targets = ranking(seed)
    found = ItemRanks(lambda ids: items[ids], NUM_ITEMS, KS, axis)
    for start in range(0, QUERIES, 10):
        own = share_out(10, axis.size)[axis.rank]
        part = slice(start + own.start, start + own.stop)
        found.add(queries[part], targets[part], counts=True)
    found.add(queries[:1], targets[:1], counts=False)
    return dict(found.finish())


def test_recall_and_ndcg_equal_sorted_items_on_any_number_of_ranks(ranks2):
    for seed in range(4):
        expected = pytest.approx(plain_ranking(seed), rel=1e-14)
        alone = ranking_on_rank("dp_replicate=1", seed)
        assert alone == expected
        assert ranks2.run(ranking_on_rank, "dp_replicate=2", seed) == [alone, alone]


@pytest.mark.full
def test_recall_and_ndcg_on_four_ranks(ranks4):
    assert ranks4.run(ranking_on_rank, "dp_replicate=4", 7) == [ranking_on_rank("dp_replicate=1", 7)] * 4
