"""Closed forms of pipelines match the simulated schedule, action by action."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.pipeline_schedule import build_schedule
from weft.config.plan import SCHEDULES
from weft.planner.cost.pipeline import Durations, Timeline, bubble_s, in_flight, sends, simulate
from weft.planner.space.columns import Columns

_LOOPED = ("interleaved", "zb_interleaved")
_V_SHAPED = ("zb_v", "dualpipe_v")
_PARTS = st.tuples(*[st.floats(0.05, 3.0)] * 3)


@st.composite
def shapes(draw, name: str) -> tuple[int, int, int]:
    """Draw ranks, passes and chunks per rank that a schedule allows."""
    p = draw(st.integers(2, 8))
    chunks = draw(st.integers(2, 4)) if name in _LOOPED else 2 if name in _V_SHAPED else 1
    if name in _LOOPED:
        return p, p * draw(st.integers(1, 5)), chunks
    return p, draw(st.integers(2 * p if name == "dualpipe_v" else 1, 5 * p)), chunks


def both(name: str, shape: tuple[int, int, int], parts: tuple[float, float, float]) -> tuple[Columns, Timeline]:
    """Return a pipeline of equal stages as a row and as a simulated timeline. parts: seconds of a rank's pass."""
    p, m, chunks = shape
    columns = Columns.make(1, pp=p, num_micro=m, schedule=SCHEDULES.index(name), virtual_stages=chunks)
    return columns, simulate(build_schedule(name, p, m, chunks), Durations(*(part / chunks for part in parts)))


def closed(columns: Columns, parts: tuple[float, float, float]) -> float:
    f, b, w = parts
    return float(bubble_s(columns, f, b + w, w, (int(columns.pp[0]) - 1) * (f + b + w))[0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_matches_simulation(name):
    @settings(deadline=None, max_examples=60, derandomize=True)
    @given(shapes(name), _PARTS)
    def check(shape, parts):
        p, m, _ = shape
        columns, timeline = both(name, shape, parts)
        found = closed(columns, parts)
        if name == "zb_v" and p < m < 2 * p - 1:
            assert timeline.bubble_s - 1e-9 <= found <= 1.5 * timeline.bubble_s + 1e-9  # linear, from above
        else:
            assert found == pytest.approx(timeline.bubble_s, abs=1e-9)
        assert timeline.makespan_s == pytest.approx(m * sum(parts) + timeline.bubble_s)

    check()


@pytest.mark.parametrize("name", SCHEDULES)
def test_passes_in_flight_match_simulation(name):
    @settings(deadline=None, max_examples=40, derandomize=True)
    @given(shapes(name))
    def check(shape):
        p, m, chunks = shape
        columns, timeline = both(name, shape, (1.0, 1.0, 1.0))
        held = [count / chunks for count in timeline.in_flight]
        found = [float(in_flight(columns, rank)[0]) for rank in range(p)]
        if name == "zb_v" and m < 2 * p:
            assert all(count <= most for count, most in zip(held, found, strict=True))
            assert max(held) == max(found)
        else:
            assert found == pytest.approx(held)

    check()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_exposed_messages_match_simulation(name):
    @settings(deadline=None, max_examples=30, derandomize=True)
    @given(st.integers(2, 8), st.integers(1, 6))
    def check(p, rounds):
        columns, quick = both(name, (p, p * rounds, 1), (1.0, 1.0, 1.0))
        slow = simulate(build_schedule(name, p, p * rounds, 1), Durations(1.0, 1.0, 1.0, latency_s=0.01))
        assert slow.makespan_s - quick.makespan_s == pytest.approx(0.01 * float(sends(columns)[0]))

    check()
