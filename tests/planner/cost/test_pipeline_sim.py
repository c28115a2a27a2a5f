"""The simulation matches the closed form of each schedule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spec.schedule.cases import schedules
from weft.config.pipeline_schedule import Action, Schedule, build_schedule
from weft.planner.cost.pipeline import Durations, makespan_s, simulate


def test_figures_of_the_study():
    """p=8, m=32, F = B = W: bubbles, and activations in flight on the first and the last rank."""
    found = {}
    for name, v in [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_interleaved", 2), ("zb_v", 2)]:
        timeline = simulate(build_schedule(name, 8, 32, v), Durations(1 / v, 1 / v, 1 / v))
        found[name, v] = (timeline.bubble_s, timeline.in_flight[0] / v, timeline.in_flight[-1] / v)
    assert found == {
        ("1f1b", 1): (21, 8, 1),
        ("interleaved", 2): (10.5, 11.5, 4.5),
        ("interleaved", 4): (5.25, 9.75, 6.25),
        ("zb_interleaved", 2): (3.5, 8, 8),
        ("zb_v", 2): (3.5, 8, 8),
    }


@pytest.mark.parametrize("latency_s", [0.01, 0.1])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16), (8, 32), (8, 64)])
def test_message_latency(p, m, latency_s):
    """Adds 2[(p - 1)(1 + m / p) - 1] latencies to 1F1B, and 2(vp - 1) to interleaving for any m."""
    step = Durations(1.0, 1.0, 1.0, latency_s=latency_s)
    extra = simulate(build_schedule("1f1b", p, m), step).makespan_s - 3 * (m + p - 1)
    assert extra == pytest.approx(2 * ((p - 1) * (1 + m / p) - 1) * latency_s)
    for v in (2, 4):
        extra = simulate(build_schedule("interleaved", p, m, v), step).makespan_s - 3 * (m * v + p - 1)
        assert extra == pytest.approx(2 * (v * p - 1) * latency_s)


def test_uneven_stages_wait_for_the_slowest():
    forward, backward = [1.0, 1.0, 3.0, 1.0], [2.0, 2.0, 6.0, 2.0]
    timeline = simulate(build_schedule("1f1b", 4, 64), Durations(forward, backward, [0.0] * 4))
    assert timeline.makespan_s == pytest.approx(64 * 9 + 3 * 3, rel=0.01)
    assert timeline.idle_s.index(min(timeline.idle_s)) == 2


@settings(max_examples=40, deadline=None)
@given(schedule=schedules(), times=st.tuples(*[st.floats(0.1, 3.0)] * 3), latency_s=st.floats(0, 0.5))
def test_no_action_starts_before_its_inputs(schedule, times, latency_s):
    timeline = simulate(schedule, Durations(*times, latency_s=latency_s))
    for starts, ends in zip(timeline.starts_s, timeline.ends_s, strict=True):
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:], strict=False))
    assert min(timeline.idle_s) >= -1e-9


def test_deadlocked_schedule_is_detected():
    ranks = ((Action("F", 0, 0), Action("BW", 0, 0)), (Action("BW", 1, 0), Action("F", 1, 0)))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(Schedule("1f1b", 2, 1, 1, ranks), Durations(1, 1, 1))


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("interleaved", 4, 8, 3), ("zb_h1", 4, 8, 1), ("zb_interleaved", 4, 8, 2),
     ("zb_v", 4, 9, 2), ("dualpipe_v", 4, 10, 2)],
)  # fmt: skip
def test_makespan_equals_the_timelines(name, p, m, v):
    schedule, draw = build_schedule(name, p, m, v), random.Random(0)
    for _ in range(20):
        forward, backward, weights = ([draw.random() for _ in range(p * v)] for _ in range(3))
        seconds = Durations(forward, backward, weights)
        assert makespan_s(schedule, seconds) == simulate(schedule, seconds).makespan_s


def test_makespan_of_deadlocked_schedule_is_an_error():
    ranks = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ValueError, match="wait for each other"):
        makespan_s(Schedule("1f1b", 2, 1, 1, ranks), Durations(1, 1, 1))
