"""A user's DataLoader sharded over ranks: equal global batches at any number of ranks, resumable at any batch."""

from __future__ import annotations

import itertools
import random
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from weft.data.order.user_dataloader import ShardedLoader
from weft.errors import DataError


def loader_of(num_samples: int, batch_size: int, **options) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, **options)


class EndlessSampler(Sampler):
    def __init__(self, data):
        pass

    def __iter__(self):
        return itertools.count()


def epoch(sharded: ShardedLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in sharded]


@given(st.sampled_from([1, 2, 4]), st.integers(4, 40), st.booleans(), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_ranks_read_the_batches_of_one_rank(dp_size, num_samples, shuffle, seed, num_epochs):
    options = {"shuffle": shuffle, "drop_last": True}
    alone = ShardedLoader(loader_of(num_samples, 4, **options), 0, 1, seed)
    ranks = [ShardedLoader(loader_of(num_samples, 4, **options), rank, dp_size, seed) for rank in range(dp_size)]
    for _ in range(num_epochs):
        full = epoch(alone)
        parts = [epoch(rank) for rank in ranks]
        assert [list(chain(*slices)) for slices in zip(*parts, strict=True)] == full
        assert len(full) == len(alone) == num_samples // 4


def test_epochs_differ_when_shuffled_and_have_all_samples():
    sharded = ShardedLoader(loader_of(12, 4, shuffle=True), 0, 1)
    first, second = epoch(sharded), epoch(sharded)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))


@given(st.integers(0, 8))
@settings(max_examples=9, deadline=None)
def test_state_saved_at_any_batch_resumes_exactly(num_seen):
    undisturbed = ShardedLoader(loader_of(13, 4, shuffle=True), 0, 1)
    expected = epoch(undisturbed) + epoch(undisturbed) + epoch(undisturbed)
    first = ShardedLoader(loader_of(13, 4, shuffle=True), 0, 1)
    seen = []
    while len(seen) < num_seen:
        for batch in first:
            seen.append(batch[0].tolist())
            if len(seen) == num_seen:
                break
    second = ShardedLoader(loader_of(13, 4, shuffle=True), 0, 1)
    second.load_state_dict(first.state_dict())
    rest = epoch(second) + epoch(second) + epoch(second)
    assert (seen + rest)[: len(expected)] == expected


def test_short_last_batch_is_divided():
    parts = [epoch(ShardedLoader(loader_of(11, 4), rank, 2)) for rank in range(2)]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]


@pytest.mark.parametrize(
    ("loader", "dp_size", "text"),
    [
        (loader_of(12, 1), 2, r"batch_size=1: .*smaller than the 2 data-parallel ranks. Use at least 2."),
        (loader_of(9, 4), 2, r"drop_last=False: the last batch has 1 of 9 samples, fewer than the 2"),
        (
            loader_of(8, None),
            2,
            r"batch_size=None: the loader makes no batches.* Give batch_size, .*or a batch_",
        ),
        (
            loader_of(8, 4, sampler=DistributedSampler(range(8), 2, 0)),
            2,
            r"sampler=DistributedSampler: run.shard\(\) replaces a DistributedSampler.*Leave the sampler out",
        ),
        (loader_of(8, 4, sampler=EndlessSampler(range(8))), 2, r"sampler=EndlessSampler: it has no length.*__len__"),
        (
            loader_of(9, 1, batch_sampler=BatchSampler(SequentialSampler(range(9)), 4, drop_last=False)),
            2,
            r"batch_sampler=BatchSampler: a batch has 1 samples, fewer than the 2 data-parallel ranks",
        ),
    ],
)
def test_loaders_that_cannot_be_sharded_are_refused(loader, dp_size, text):
    with pytest.raises(DataError, match=text):
        ShardedLoader(loader, 0, dp_size)


class Drawing(Sampler):
    """Draws indices with `draw`."""

    def __init__(self, draw, num_samples=12):
        self.draw, self.num_samples, self.epochs = draw, num_samples, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        return (int(self.draw()) for _ in range(self.num_samples))


def weighted(**options) -> DataLoader:
    return loader_of(8, 4, sampler=WeightedRandomSampler([0.0, 0.0, 1.0, 1.0, 5.0, 1.0, 0.0, 0.0], 40, **options))


def batched() -> DataLoader:
    return loader_of(12, 1, batch_sampler=BatchSampler(RandomSampler(range(12)), 5, drop_last=True))


SAMPLERS = {
    "weighted": weighted,
    "with a generator": lambda: weighted(generator=torch.Generator().manual_seed(7)),
    "drawn with replacement": lambda: loader_of(8, 4, sampler=RandomSampler(range(8), True, 12)),
    "of batches": batched,
    "subset": lambda: loader_of(12, 4, sampler=SubsetRandomSampler([1, 3, 5, 7])),
    "numpy": lambda: loader_of(12, 4, sampler=Drawing(lambda: np.random.randint(12))),
    "python": lambda: loader_of(12, 4, sampler=Drawing(lambda: random.randrange(12))),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_user_sampler_gives_the_same_indices_on_all_ranks(name):
    torch.manual_seed(1)
    alone = ShardedLoader(SAMPLERS[name](), 0, 1)
    full = [epoch(alone), epoch(alone)]
    parts = []
    for rank in range(2):
        torch.manual_seed(100 + rank)  # earlier draws of the ranks must not matter
        sharded = ShardedLoader(SAMPLERS[name](), rank, 2)
        assert len(sharded) == len(full[0])
        epoch(sharded)
        resumed = ShardedLoader(SAMPLERS[name](), rank, 2)
        resumed.load_state_dict(sharded.state_dict() | {"next_batch": 1})
        parts.append([epoch(ShardedLoader(SAMPLERS[name](), rank, 2)), epoch(resumed)])
    assert [list(chain(*both)) for both in zip(parts[0][0], parts[1][0], strict=True)] == full[0]
    assert [list(chain(*both)) for both in zip(parts[0][1], parts[1][1], strict=True)] == full[1][1:]
    assert full[0] != full[1]


class Lookup:
    """A dataset without length, which torch accepts with a sampler."""

    def __getitem__(self, index):
        return torch.tensor(index)


def test_number_of_samples_is_the_samplers():
    for sampler in (SequentialSampler(range(6)), SubsetRandomSampler(range(6)), RandomSampler(range(6))):
        parts = []
        for dataset in (Lookup(), torch.arange(10)):
            sharded = ShardedLoader(DataLoader(dataset, batch_size=2, sampler=sampler), 0, 1)
            parts.append([index for batch in sharded for index in batch.tolist()])
        assert parts[0] == parts[1]
        assert sorted(parts[0]) == list(range(6))


def test_sampler_weights_are_respected():
    drawn = list(chain(*epoch(ShardedLoader(weighted(), 0, 2))))
    assert set(drawn) <= {2, 3, 4, 5}
    assert drawn.count(4) > len(drawn) / 3


def test_sampler_gets_the_epoch_and_generators_are_unchanged():
    sampler = Drawing(lambda: torch.randint(12, ()))
    sharded = ShardedLoader(loader_of(12, 4, sampler=sampler), 0, 2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    sharded.load_state_dict({"epoch": 3, "next_batch": 0})
    assert len(sharded) == 3
    assert sampler.epochs[-1] == 3
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_sampler_that_cannot_be_seeded_is_refused():
    hidden = random.Random()
    with pytest.raises(DataError, match=r"sampler=Drawing: with equal seeds it gave other .*set_epoch\(epoch\) seeds"):
        ShardedLoader(loader_of(12, 4, sampler=Drawing(lambda: hidden.randrange(12))), 0, 2)


def test_iterable_dataset_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

    with pytest.raises(DataError, match="an IterableDataset has no indices"):
        ShardedLoader(DataLoader(Stream(), batch_size=2), 0, 2)


class Parts(NamedTuple):
    batches: list[Any]
    numbers: list[list[int]]
    rows: list[Any]
    is_plain: bool


def as_parts(batches, numbers, rows, *, is_plain, total) -> Parts:
    assert total >= sum(map(len, numbers))
    return Parts([batch[0].tolist() for batch in batches], list(map(list, numbers)), rows, is_plain)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(5, 20))
@settings(max_examples=40, deadline=None)
def test_samples_are_assigned_to_microbatches_by_number(batch_size, dp_size, num_microbatches, num_samples):
    loaders = [
        ShardedLoader(
            loader_of(num_samples, batch_size), rank, dp_size,
            num_microbatches=num_microbatches, as_batch=as_parts, takes_empty=lambda: True,
        )
        for rank in range(dp_size)
    ]  # fmt: skip
    seen = []
    for start, ranks in zip(range(0, num_samples, batch_size), zip(*loaders, strict=True), strict=True):
        size = min(batch_size, num_samples - start)
        by_rank = [zip(rank.batches, rank.numbers, strict=True) for rank in ranks]
        parts = [pair for microbatch in zip(*by_rank, strict=True) for pair in microbatch]
        assert len(parts) == dp_size * num_microbatches
        assert [number for _, numbers in parts for number in numbers] == list(range(size))
        for batch, numbers in parts:
            assert batch == [start + number for number in numbers] if numbers else len(batch) == 1
            seen += batch if numbers else []
        assert {rank.is_plain for rank in ranks} == {num_microbatches == 1 and size >= dp_size}
    assert seen == list(range(num_samples))


def ragged(samples):
    return torch.cat([sample["patches"] for sample in samples]), torch.stack([sample["y"] for sample in samples])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_user_collate_function_gets_each_microbatch(num_workers):
    samples = [{"patches": torch.full((n, 2), float(n)), "y": torch.tensor(n)} for n in (3, 1, 0, 2, 4)]
    loader = DataLoader(samples, batch_size=5, collate_fn=ragged, num_workers=num_workers)
    collected = []
    for rank in range(2):
        [batch] = ShardedLoader(
            loader, rank, 2, num_microbatches=2, as_batch=lambda batches, numbers, rows, **_: (batches, rows)
        )
        batches, rows = batch
        collected += [(patches[:, 0].tolist(), y.tolist()) for patches, y in batches]
        assert [[sum(counts) for counts in part if max(counts) != 1] or [0] for part in rows] == [
            [len(patches)] for patches, _ in batches
        ]
    assert collected == [([3.0] * 3 + [1.0], [3, 1]), ([2.0] * 2, [2]), ([], [0]), ([4.0] * 4, [4])]


def test_batched_tensor_samples_are_not_split_into_a_list():
    class Columns(TensorDataset):
        def __getitems__(self, indices):
            return self.tensors[0][indices]

    loader = DataLoader(Columns(torch.arange(4)), batch_size=4, collate_fn=lambda rows: rows)
    [(parts, numbers)] = ShardedLoader(
        loader, 1, 2, num_microbatches=2, as_batch=lambda parts, numbers, *_, **_kind: (parts, numbers)
    )
    assert [part.tolist() for part in parts] == numbers == [[1, 3]]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_unequal_shares_divide_the_same_batches(num_microbatches):
    def loader() -> DataLoader:
        return loader_of(40, 16, shuffle=True, drop_last=True)

    def as_batch(batches, numbers, rows, *, is_plain, total):
        assert total == 16
        assert [len(batch[0]) for batch in batches] == [len(one) for one in numbers]
        return list(zip(chain(*numbers), chain(*(batch[0].tolist() for batch in batches)), strict=True))

    options = {"as_batch": as_batch, "num_microbatches": num_microbatches, "seed": 3}
    whole = [[*map(tuple, batch)] for batch in ShardedLoader(loader(), 0, 1, **options)]
    parts = [[*ShardedLoader(loader(), rank, 3, weights=(5, 2, 1), **options)] for rank in range(3)]
    assert [[len(batch) for batch in part] for part in parts] == [[10, 10], [4, 4], [2, 2]]
    assert [sorted(chain(*batches)) for batches in zip(*parts, strict=True)] == whole


def test_batch_that_leaves_a_rank_without_samples_is_refused():
    with pytest.raises(DataError) as caught:
        ShardedLoader(loader_of(12, 4), 0, 2, weights=(7, 1))
    assert str(caught.value) == (
        "shares=7+1: a batch has fewer than 8 samples, so a rank may get none. Use batches of at least 8, with "
        "drop_last=True, or more even shares."
    )
