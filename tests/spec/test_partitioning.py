"""Partitioning of layers, samples and loss chunks: balanced, complete and equal in planner and runtime."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.partitioning import (
    LossChunk,
    ShareTimeline,
    batch_unit,
    divide_by_rank,
    divide_layers,
    even_passes,
    fastest_shares,
    largest_remainder,
    microbatch_samples,
    nearest_shares,
    samples_per_microbatch,
    share_out,
)


def slowest(counts, costs, before, after):
    boundaries = [0, *itertools.accumulate(counts)]
    stages = [sum(costs[start:end]) for start, end in itertools.pairwise(boundaries)]
    stages[0] += before
    stages[-1] += after
    return max(stages)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    num_stages=st.integers(1, 5),
    before=st.integers(0, 12),
    after=st.integers(0, 12),
)
def test_layer_division_is_optimal(costs, num_stages, before, after):
    if len(costs) < num_stages:
        with pytest.raises(ValueError, match="fewer"):
            divide_layers(costs, num_stages)
        return
    counts = divide_layers(costs, num_stages, before=before, after=after)
    assert min(counts) >= 1
    assert sum(counts) == len(costs)
    every = (
        [end - start for start, end in itertools.pairwise([0, *splits, len(costs)])]
        for splits in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert slowest(counts, costs, before, after) == min(slowest(one, costs, before, after) for one in every)


def test_equal_layers_are_divided_equally():
    assert divide_layers([1.0] * 32, 8) == (4,) * 8
    assert sorted(divide_layers([1.0] * 7, 3)) == [2, 2, 3]


def test_large_head_leaves_fewer_layers_to_the_last_stage():
    """With 126 layers on 16 stages and a head of 2.1 layers, the bottleneck is 8.3 layers instead of 10.1."""
    counts = divide_layers([1.0] * 126, 16, after=2.1)
    assert slowest(counts, [1.0] * 126, 0.0, 2.1) <= 8.3
    assert counts[-1] < 8


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 40),
    st.floats(0, 4, allow_nan=False),
    st.floats(0, 4, allow_nan=False),
)
def test_division_by_rank_is_complete_and_near_the_bound(ranks, per_stage, more, first, last):
    num_layers = ranks * per_stage + more
    stages = [list(range(rank, ranks * per_stage, ranks)) for rank in range(ranks)]
    found = divide_by_rank(num_layers, stages, first=first, last=last)
    assert sum(found) == num_layers
    assert min(found) >= 1
    loads = [sum(found[stage] for stage in own) for own in stages]
    loads[0] += first
    loads[-1] += last
    if ranks == 1:
        return
    mean = (num_layers + first + last) / ranks
    floor = max(mean, per_stage + first, per_stage + last)
    assert max(loads) <= floor + 1 + 1e-6


def test_large_head_takes_layers_from_its_rank():
    layers = divide_by_rank(126, [[rank] for rank in range(16)], first=0.3, last=2.1)
    assert max(layers[:-1]) == 8
    assert layers[-1] <= 6


@given(global_batch=st.integers(0, 40), data_ranks=st.integers(1, 6), num_microbatches=st.integers(1, 6))
def test_every_sample_is_in_exactly_one_microbatch(global_batch, data_ranks, num_microbatches):
    own = [microbatch_samples(global_batch, data_ranks, num_microbatches, rank) for rank in range(data_ranks)]
    by_microbatch = [number for column in zip(*own, strict=True) for run in column for number in run]
    assert by_microbatch == list(range(global_batch))
    of_ranks = [sum(map(len, runs)) for runs in own]
    assert max(of_ranks) - min(of_ranks) <= 1
    for runs, count in zip(own, of_ranks, strict=True):
        # So a rank with consecutive samples can split them without the others.
        assert [len(run) for run in runs] == [len(run) for run in share_out(count, num_microbatches)]
    if global_batch % batch_unit(data_ranks, num_microbatches) == 0:
        num_samples = samples_per_microbatch(global_batch, data_ranks, num_microbatches)
        assert {len(run) for runs in own for run in runs} == {num_samples}


def test_samples_per_microbatch_is_vectorized():
    found = samples_per_microbatch(64, np.array([1, 2, 8]), np.array([4, 4, 16]))
    assert found.tolist() == [16, 8, 0]


@pytest.mark.parametrize(
    ("device_gib", "expected"), [(0, 2**26), (0.5, 2**26), (24, 2**28), (79.1, 2**30), (80, 2**30), (141, 2**30)]
)
def test_loss_chunk_is_equal_for_similar_devices(device_gib, expected):
    assert LossChunk.of_device(int(device_gib * 2**30)).num_bytes == expected


@given(st.integers(0, 10_000), st.integers(1, 200_000), st.sampled_from([4, 8]))
def test_loss_chunks_are_even_and_equal_in_planner_and_runtime(tokens, vocab, width):
    rows = LossChunk().rows(tokens, vocab, width)
    assert rows == 1 or rows * vocab * width <= 2**26
    assert rows == LossChunk().rows(np.array([float(tokens)]), np.array([float(vocab)]), float(width))[0]
    if rows:
        assert rows - (tokens % rows or rows) < -(-tokens // rows)


@given(global_batch=st.integers(1, 96), data_ranks=st.integers(1, 8))
def test_even_passes_divide_the_batch(global_batch, data_ranks):
    rest_free = [n for n in range(1, global_batch + 1) if global_batch % batch_unit(data_ranks, n) == 0]
    assert even_passes(global_batch, data_ranks) == rest_free


@given(st.integers(1, 96), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_unequal_shares_divide_the_same_samples_in_order(global_batch, weights, num_microbatches):
    own = [
        microbatch_samples(global_batch, len(weights), num_microbatches, rank, weights) for rank in range(len(weights))
    ]
    in_order = [sample for index in range(num_microbatches) for ranges in own for sample in ranges[index]]
    assert in_order == list(range(global_batch))
    counts = [sum(map(len, ranges)) for ranges in own]
    exact = [global_batch * weight / sum(weights) for weight in weights]
    assert all(abs(count - part) < 1 for count, part in zip(counts, exact, strict=True))
    assert tuple(counts) == largest_remainder(global_batch, weights)
    for ranges in own:
        sizes = [len(one) for one in ranges]
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 3))
def test_equal_shares_are_equal_parts(samples, ranks, num_microbatches):
    batch = samples * ranks * num_microbatches
    for rank in range(ranks):
        assert microbatch_samples(batch, ranks, num_microbatches, rank, (2,) * ranks) == microbatch_samples(
            batch, ranks, num_microbatches, rank
        )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 40))
def test_nearest_shares_leave_no_rank_without_samples(weights, least, more):
    batch = least * len(weights) + more
    counts = nearest_shares(batch, weights, least)
    assert sum(counts) == batch
    assert min(counts) >= least


def test_timeline_has_the_shares_of_each_step():
    timeline = ShareTimeline((3, 1))
    timeline.change(4, ())
    timeline.change(9, (1, 7))
    assert [timeline.at(step) for step in (-1, 0, 3, 4, 8, 9, 100)] == [
        (3, 1), (3, 1), (3, 1), (), (), (1, 7), (1, 7),
    ]  # fmt: skip
    timeline.change(4, (5, 3))
    assert timeline.changes == [(0, (3, 1)), (4, (5, 3))]


@pytest.mark.parametrize(("count", "speeds"), [(1, [1.0, 1.0]), (4, [1.0, 0.0]), (4, [1.0, float("inf")])])
def test_shares_of_unusable_speeds_are_refused(count, speeds):
    with pytest.raises(ValueError, match="cannot be divided"):
        fastest_shares(count, speeds)
