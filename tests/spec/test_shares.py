"""Stages are divided so that the slowest is as fast as it can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.spec.shares import divide_layers


def slowest(counts, costs, before, after):
    places = [0, *itertools.accumulate(counts)]
    stages = [sum(costs[start:end]) for start, end in itertools.pairwise(places)]
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
def test_no_division_is_faster(costs, num_stages, before, after):
    if len(costs) < num_stages:
        with pytest.raises(ValueError, match="fewer"):
            divide_layers(costs, num_stages)
        return
    counts = divide_layers(costs, num_stages, before=before, after=after)
    assert min(counts) >= 1
    assert sum(counts) == len(costs)
    every = (
        [end - start for start, end in itertools.pairwise([0, *cuts, len(costs)])]
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert slowest(counts, costs, before, after) == min(slowest(one, costs, before, after) for one in every)


def test_equal_layers_are_divided_equally():
    assert divide_layers([1.0] * 32, 8) == (4,) * 8
    assert sorted(divide_layers([1.0] * 7, 3)) == [2, 2, 3]


def test_a_heavy_head_leaves_fewer_layers_to_the_last_stage():
    """126 layers on 16 stages with a head of 2.1 layers: the bottleneck is 8.3 layers with care and 10.1 without."""
    counts = divide_layers([1.0] * 126, 16, after=2.1)
    assert slowest(counts, [1.0] * 126, 0.0, 2.1) <= 8.3
    assert counts[-1] < 8
