"""Pipeline line of the time report: idle time of the schedule and measured idle time."""

from __future__ import annotations

from types import SimpleNamespace

from weft.config.pipeline_schedule import build_schedule
from weft.planner.cost.pipeline import Durations, simulate
from weft.train.loop.time_report import _bubble_line, _on_a_clock


def actions_of(name: str, slower: float):
    """Return timed actions of a simulated pipeline; each rank's last action is `slower` seconds late."""
    schedule = build_schedule(name, 2, 2)
    timeline = simulate(schedule, Durations(1.0, 1.0, 1.0))
    lists = [
        [(str(step), start, end) for step, start, end in zip(*columns, strict=True)]
        for columns in zip(schedule.ranks, timeline.starts_s, timeline.ends_s, strict=True)
    ]
    for actions in lists:
        step, start, end = actions[-1]
        actions[-1] = (step, start + slower, end + slower)
    return SimpleNamespace(schedule=schedule), lists


def test_pipeline_on_schedule():
    pipeline, lists = actions_of("1f1b", 0.0)
    line = _bubble_line(pipeline, _on_a_clock(pipeline, lists), lists)
    assert line == "        last step: 1f1b by itself leaves 33% of it idle; measured: 33%"


def test_pipeline_with_other_waits():
    pipeline, lists = actions_of("zb_h1", 2.0)
    line = _bubble_line(pipeline, _on_a_clock(pipeline, lists), lists)
    assert line == "        last step: zb_h1 by itself leaves 14% of it idle; measured: 33%"
