"""Straggler detection: compares the times of ranks that do the same work in the same steps."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.monitor.test_run_metrics import FakeStore
from weft.monitor.metrics import Collector, PaceWriter, StepReport
from weft.monitor.stragglers import StragglerWatch, median_without

STEPS_A_REPORT = 4


def watched(watch: StragglerWatch, seconds, num_reports: int, begin: int = 0, values=None, parts=None) -> list[dict]:
    """Return the events of a watch for reports of four steps each. `seconds(rank, step)` is a rank's own time."""
    found, number = [], len(watch._ranks)
    for one in range(begin, begin + num_reports):
        steps = range(one * STEPS_A_REPORT + 1, (one + 1) * STEPS_A_REPORT + 1)
        reports = []
        for rank in range(number):
            own = {str(step): round(seconds(rank, step) * 1e6) for step in steps}
            mean = statistics.mean(own.values()) / 1e6
            part = parts(rank, mean) if parts else {"compute": mean}
            reports.append({"host": f"host{rank // 2}", "pace": {"steps": own, "parts": part},
                            "values": values(rank) if values else {}})  # fmt: skip
        found += watch.observe(reports)
    return found


def noise(rank: int, step: int, share: float) -> float:
    return 1 + share * random.Random(rank * 100_003 + step).uniform(-1, 1)


@given(st.lists(st.floats(0.0, 1e3), min_size=3, max_size=30), st.data())
def test_median_without_equals_median_of_the_remaining_list(values, data):
    ordered = sorted(values)
    one = data.draw(st.sampled_from(ordered))
    rest = list(ordered)
    rest.remove(one)
    assert median_without(ordered, one) == statistics.median(rest)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 1000))
def test_rank_ahead_samples_a_subset_of_the_steps_of_others(some, more, begin):
    some, more = sorted((some, more))
    picked = []
    for number in (some, more):
        writer = PaceWriter()
        for step in range(begin + 1, begin + number + 1):
            writer.add(step, {"compute": step / 1000})
        picked.append({int(step) for step in writer.take().get("steps", {})})
        assert len(picked[-1]) <= 8
        assert writer.take() == {}
    assert {step for step in picked[1] if step <= begin + some} <= picked[0]


@pytest.mark.parametrize("number", [2, 3, 4, 8, 64])
def test_slow_rank_is_named_once_and_cleared(number):
    slow = number // 2
    watch = StragglerWatch([0] * number)
    assert watched(watch, lambda rank, step: 0.5 * noise(rank, step, 0.03), 10) == []
    late = lambda rank, step: 0.5 * noise(rank, step, 0.03) * (1.2 if rank == slow else 1)  # noqa: E731
    (event,) = watched(watch, late, 8, 10)
    assert (event["event"], event["state"], event["rank"], event["part"]) == ("slow_rank", "fired", slow, "compute")
    assert 1.12 < event["lag"] < 1.28
    assert f"rank {slow} is slow, and the others wait for it: its own work takes " in event["text"]
    assert event["text"].endswith(f"(on host{slow // 2})")
    (event,) = watched(watch, lambda rank, step: 0.5 * noise(rank, step, 0.03), 8, 18)
    assert event["text"] == f"rank {slow} keeps pace with its peers again"
    assert (event["state"], event["rank"]) == ("ended", slow)


@pytest.mark.parametrize("number", [2, 4, 16])
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_random_differences_name_no_rank(number, share):
    """Each step scatters by up to a fifth. Now and then one takes five times as long, on any rank."""

    def seconds(rank, step):
        return 0.3 * noise(rank, step, share) * (5 if random.Random(step * 7 + rank).random() < 0.02 else 1)

    assert watched(StragglerWatch([0] * number), seconds, 100) == []


def test_longer_steps_and_larger_stages_name_no_rank():
    """Sequences grow for all ranks together. The second stage has twice the layers."""
    watch = StragglerWatch([0, 0, 1, 1])
    assert watched(watch, lambda rank, step: 0.1 * (1 + step / 50) * (2 if rank > 1 else 1), 40) == []


def test_stage_of_one_rank_is_compared_with_its_own_past():
    watch = StragglerWatch([0, 1, 2])
    base = lambda rank, step: 0.1 * (rank + 1) * noise(rank, step, 0.03)  # noqa: E731
    assert watched(watch, base, 12) == []
    (event,) = watched(watch, lambda rank, step: base(rank, step) * (1.25 if rank == 1 else 1), 8, 12)
    assert (event["rank"], event["part"]) == (1, "")
    assert "times its usual time" in event["text"]


def test_event_names_the_difference_of_the_slow_rank():
    clock = lambda rank: {"gpu.sm_clock": 1.4e9 if rank == 1 else 2e9, "process.cpu": 1.0}  # noqa: E731
    waits = lambda rank, mean: {"compute": 0.4, "data": mean - 0.4}  # noqa: E731
    (event,) = watched(
        StragglerWatch([0] * 3), lambda rank, step: 0.6 if rank == 1 else 0.4, 4, values=clock, parts=waits
    )
    assert event["part"] == "data"
    assert "most of it in data; its GPU's clock is 1.40 GHz, theirs 2.00 GHz (on host0)" in event["text"]


def test_damaged_and_missing_reports_are_ignored():
    watch = StragglerWatch([0, 0, 0])
    for report in ({}, {"pace": 3}, {"pace": {"steps": {"x": 1, "4": "y"}, "parts": []}}, {"pace": {"steps": None}}):
        assert watch.observe([report, {}, report]) == []
    assert watch.lag(0) is None


def test_collector_reports_pace_between_metrics_and_names_slow_rank():
    board, slow, events = FakeStore(2), [], []
    ranks = [
        Collector("host", board.of(rank), 60.0, clock=lambda: 0.0, on_slow=slow.append if rank == 0 else None,
                  publish=events.append if rank == 0 else None)
        for rank in range(2)
    ]  # fmt: skip
    for turn in range(6):
        for rank in (1, 0):
            for step in range(turn * 4 + 1, turn * 4 + 5):
                own = {"compute": 0.5 if rank else 0.4, "data": 0.01}
                ranks[rank].put(StepReport(step, {"total": 0.6}, busy_s=0.5, own=own))
            ranks[rank].send_report(pace_only=True)
    assert events == []  # metrics are sent every minute
    (event,) = slow
    assert (event["rank"], event["part"], event["state"]) == (1, "compute", "fired")
