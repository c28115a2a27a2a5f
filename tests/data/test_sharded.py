"""A user's DataLoader cut for the ranks: the same global batches at any number of ranks, resumable anywhere."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from weft.data import ShardedLoader
from weft.errors import DataError


def loader_of(num_samples: int, batch_size: int, **options) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, **options)


def epoch(sharded: ShardedLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in sharded]


@given(st.sampled_from([1, 2, 4]), st.integers(4, 40), st.booleans(), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_ranks_together_read_the_batches_of_one(dp_size, num_samples, shuffle, seed, num_epochs):
    options = {"shuffle": shuffle, "drop_last": True}
    alone = ShardedLoader(loader_of(num_samples, 4, **options), 0, 1, seed)
    ranks = [ShardedLoader(loader_of(num_samples, 4, **options), rank, dp_size, seed) for rank in range(dp_size)]
    for _ in range(num_epochs):
        whole = epoch(alone)
        parts = [epoch(rank) for rank in ranks]
        assert [list(chain(*slices)) for slices in zip(*parts, strict=True)] == whole
        assert len(whole) == len(alone) == num_samples // 4


def test_epochs_differ_when_shuffled_and_cover_everything():
    sharded = ShardedLoader(loader_of(12, 4, shuffle=True), 0, 1)
    first, second = epoch(sharded), epoch(sharded)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))


@given(st.integers(0, 8))
@settings(max_examples=9, deadline=None)
def test_a_state_taken_anywhere_goes_on_from_there(num_seen):
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


def test_a_last_batch_that_is_short_is_shared_out():
    parts = [epoch(ShardedLoader(loader_of(11, 4), rank, 2)) for rank in range(2)]
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]


@pytest.mark.parametrize(
    ("loader", "dp_size", "text"),
    [
        (loader_of(12, 3), 2, r"batch_size=3: .*not a multiple of the 2 data-parallel ranks. Use a multiple of 2."),
        (loader_of(9, 4), 2, r"drop_last=False: the last batch has 1 of 9 samples, fewer than the 2"),
        (
            loader_of(8, 4, sampler=WeightedRandomSampler([1.0] * 8, 8)),
            2,
            r"loader.sampler=WeightedRandomSampler: only shuffle=True and shuffle=False",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(loader, dp_size, text):
    with pytest.raises(DataError, match=text):
        ShardedLoader(loader, 0, dp_size)


def test_a_stream_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

    with pytest.raises(DataError, match="an IterableDataset has no indices"):
        ShardedLoader(DataLoader(Stream(), batch_size=2), 0, 2)
