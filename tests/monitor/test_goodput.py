"""Goodput of a run, and the checkpoint interval that would have cost least."""

from __future__ import annotations

import math
import random

import pytest

from weft.monitor.accounting import best_interval, goodput


def start(time: float, step: int = 0):
    return {"event": "start", "time": time, "step": step}


def steps(time: float, first: int, last: int, seconds: float = 1.0):
    return [
        {"event": "step", "time": time + seconds * (step - first + 1), "step": step, "seconds": {"total": seconds}}
        for step in range(first, last + 1)
    ]


def save(time: float, stall: float = 0.5):
    return {"event": "checkpoint", "time": time, "stall_s": stall}


END = {"event": "end", "reason": "finished"}


def test_run_without_failures_reports_nothing():
    found = goodput([start(100.0), *steps(100.0, 1, 10), {**END, "time": 110.0}])
    assert (found.wall_s, found.steps_s, found.redone_s, found.share, found.failures) == (10.0, 10.0, 0.0, 1.0, 0)
    assert found.lines(5) == []
    assert found.best_every() is None
    assert goodput([]).share == 0.0


def test_memory_copies_count_as_stall_but_not_as_save():
    copied = {"event": "copy", "time": 3.5, "stall_s": 0.25, "step": 3}
    found = goodput([start(0.0), *steps(0.0, 1, 3), copied, save(4.0), {**END, "time": 5.0}])
    assert (found.stalls_s, found.stall_s) == (0.75, 0.5)


def test_failure_costs_repeated_steps_and_downtime():
    events = [
        start(0.0), *steps(0.0, 1, 4), save(4.5), *steps(4.5, 5, 7),
        {"event": "failure", "time": 8.0, "cause": "died"},
        {"event": "resume", "time": 14.0, "step": 4}, start(14.0, 4), *steps(14.0, 5, 8), save(18.5),
        {**END, "time": 20.0},
    ]  # fmt: skip
    found = goodput(events)
    assert (found.wall_s, found.steps_s, found.redone_s, found.away_s) == (20.0, 8.0, 3.0, 6.0)
    assert (found.failures, found.stalls_s, found.stall_s, found.between_failures_s) == (1, 1.0, 0.5, 20.0)
    assert found.best_every() == round(best_interval(0.5, 20.0))
    first, second = found.lines(4)
    assert first == (
        "goodput 40% of 20.0 s made steps that count; 1 failure: steps done again 3.00 s, starting again 6.00 s, "
        "waiting for saves 1.00 s"
    )
    assert second.startswith("        checkpoint.every=4 would have cost least (now 4)")


def test_killed_launcher_without_failure_event_is_counted():
    found = goodput([start(0.0), *steps(0.0, 1, 4), start(10.0), *steps(10.0, 1, 5), {**END, "time": 15.0}])
    assert (found.failures, found.away_s, found.redone_s) == (1, 6.0, 4.0)


def test_time_between_two_commands_is_not_counted():
    stopped = {"event": "end", "time": 4.0, "reason": "asked to stop"}
    resumed = {"event": "resume", "time": 90_000.0, "step": 4}
    found = goodput([start(0.0), *steps(0.0, 1, 4), stopped, resumed, start(90_000.0, 4), *steps(90_000.0, 5, 8)])
    assert (found.wall_s, found.failures, found.share) == (8.0, 0, 1.0)


def test_halt_with_end_event_is_a_failure():
    halt = [{"event": "end", "time": 4.0, "reason": "nan"}, {"event": "failure", "time": 5.0, "cause": "bad steps"}]
    found = goodput([start(0.0), *steps(0.0, 1, 4), *halt, start(7.0, 2), *steps(7.0, 3, 4)])
    assert (found.failures, found.wall_s, found.away_s) == (1, 9.0, 2.0)


@pytest.mark.parametrize("stall_s, between_s", [(1.0, 1000.0), (5.0, 600.0), (20.0, 3600.0)])
def test_best_interval_minimizes_cost_of_a_simulated_run(stall_s, between_s):
    best = best_interval(stall_s, between_s)
    assert best == pytest.approx(math.sqrt(2 * stall_s * between_s), rel=0.1)

    def cost(interval: float) -> float:
        """Return the expected seconds per second of useful work, with exponential failures and repeated work."""
        return between_s * (math.exp((interval + stall_s) / between_s) - 1) / interval

    tried = [best * random.Random(1).uniform(0.3, 3.0) for _ in range(50)] + [best * f for f in (0.7, 0.85, 1.2, 1.5)]
    assert all(cost(best) <= cost(other) * (1 + 1e-4) for other in tried)


def test_best_interval_with_more_failures_than_saves():
    assert best_interval(10.0, 4.0) == 4.0
