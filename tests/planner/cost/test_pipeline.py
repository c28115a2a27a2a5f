"""Closed forms of pipelines against event simulations, and the split of layers into stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.partitioning import divide_layers
from weft.config.pipeline_schedule import build_schedule
from weft.config.plan import SCHEDULES
from weft.planner.cost.pipeline import (
    bubble_s,
    chunks_per_rank,
    fullest_moment,
    in_flight,
    sends,
    split_layers,
)
from weft.planner.space.columns import Columns


def piped(schedule="1f1b", pp=8, num_micro=32, virtual_stages=1) -> Columns:
    code = SCHEDULES.index(schedule)
    return Columns.make(1, pp=pp, num_micro=num_micro, virtual_stages=virtual_stages, schedule=code)


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [
        ("gpipe", 1, 21),
        ("1f1b", 1, 21),
        ("interleaved", 2, 10.5),
        ("interleaved", 4, 5.25),
        ("zb_h1", 1, 7),
        ("zb_interleaved", 2, 3.5),
        ("zb_v", 1, 3.5),
        ("dualpipe_v", 1, 3.5),
    ],
)
def test_bubbles_of_eight_equal_stages(schedule, chunks, bubble):
    """Forward, input gradient and weight gradient of one unit each: 8 ranks, 32 passes."""
    columns = piped(schedule, virtual_stages=chunks)
    assert bubble_s(columns, 1.0, 2.0, 1.0, 7 * 3.0) == pytest.approx(bubble)


@pytest.mark.parametrize(
    ("schedule", "chunks", "first", "last"),
    [
        ("1f1b", 1, 8, 1),
        ("interleaved", 2, 11.5, 4.5),
        ("interleaved", 4, 9.75, 6.25),
        ("zb_v", 1, 8, 8),
        ("dualpipe_v", 1, 8.5, 8.5),
        ("gpipe", 1, 32, 32),
    ],
)
def test_passes_in_flight_on_first_and_last_rank(schedule, chunks, first, last):
    columns = piped(schedule, virtual_stages=chunks)
    assert (in_flight(columns, 0)[0], in_flight(columns, 7)[0]) == (first, last)


def test_passes_in_flight_are_at_most_all_passes():
    assert in_flight(piped(num_micro=3), 0) == 3
    assert in_flight(piped(pp=1), 0) == 1


def test_incomplete_interleaved_round_costs_chunks():
    whole, ragged = (bubble_s(piped("interleaved", 4, m, 2), 1.0, 2.0, 1.0, 9.0)[0] for m in (8, 9))
    assert ragged == whole + 3 * 3.0 / 2


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 130), st.integers(1, 32), st.integers(1, 6))
def test_every_layer_is_on_a_stage(layers, pp, chunks):
    columns = piped("interleaved", pp=pp, virtual_stages=chunks)
    stages = split_layers(layers, columns)
    fullest = float(stages.middle[0])
    assert fullest >= stages.first[0] >= 0
    assert fullest >= stages.last[0] >= 0
    assert fullest * pp >= layers
    if pp == 1:
        assert fullest == layers
    if layers % (pp * chunks_per_rank(columns)[0]) == 0:
        assert stages.first[0] == stages.last[0] == fullest == layers / pp


@given(st.integers(1, 16), st.integers(0, 60))
def test_closed_form_split_is_as_even_as_the_runtimes(pp, more):
    stages = split_layers(pp + more, piped(pp=pp))
    fullest = max(stages.first[0], stages.last[0]) if pp == 2 else stages.middle[0]
    assert fullest == max(divide_layers([1.0] * (pp + more), pp))


def test_end_stages_have_fewer_layers_if_the_split_is_uneven():
    stages = split_layers(126, piped(pp=16))
    assert (stages.first[0], stages.middle[0], stages.last[0]) == (7, 8, 7)
    stages = split_layers(22, piped("interleaved", pp=8, virtual_stages=3))
    assert (stages.first[0], stages.middle[0], stages.last[0]) == (2, 3, 2)


def test_exposed_sends_match_simulations():
    """2 ((p - 1)(1 + m / p) - 1), as in 96 simulated schedules."""
    assert sends(piped(pp=4, num_micro=8))[0] == 2 * (3 * 3 - 1)
    assert sends(piped(pp=1))[0] == 0


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.integers(2, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(0.05, 20.0),
)
def test_peak_memory_matches_the_schedule(name, p, v, rounds, weight):
    """Passes in flight and pending gradients, counted per action, never exceed the closed form."""
    v = max(2, v) if name == "interleaved" else 1
    columns = piped(name, p, rounds * p, v)
    for rank, steps in enumerate(build_schedule(name, p, rounds * p, v).ranks):
        held, made, most = 0, set(), 0.0
        for action in steps:
            if action.kind == "F":
                held += 1
            else:
                held -= 1
                made.add(action.stage)
            most = max(most, held + weight * len(made))
        passes, share = fullest_moment(columns, float(rank), np.array([float(v)]), np.array([weight * v]))
        assert passes[0] * v + share[0] * v * weight == pytest.approx(most)
