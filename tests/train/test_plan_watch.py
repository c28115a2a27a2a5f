"""Comparison of the plan with measurements during a run: the part that drifted, reported once, as events."""

from __future__ import annotations

import pytest

from weft.monitor.events import StepRecord
from weft.monitor.metrics import readings
from weft.monitor.step_times import TimeBook
from weft.train.loop.observers import PlanWatch
from weft.train.planned import drifts

PLANNED = {"compute": 0.8, "over dp": 0.1, "optimizer": 0.1}


@pytest.mark.parametrize(
    "measured, what, text",
    [
        ({"compute": 0.82, "over dp": 0.12, "optimizer": 0.1}, [], ""),
        (
            {"compute": 0.8, "over dp": 0.4, "optimizer": 0.1},
            ["step"],
            "a step takes 1.30 s, 30% more than planned (1.00 s): over dp takes 400 ms, planned 100 ms",
        ),
        (
            {"compute": 0.5, "over dp": 0.1, "optimizer": 0.1},
            ["step"],
            "a step takes 700 ms, 30% less than planned (1.00 s): compute takes 500 ms, planned 800 ms",
        ),
        (
            {"compute": 0.8, "over dp": 0.1, "optimizer": 0.1, "data": 0.5},
            ["step"],
            ("a step takes 1.50 s, 50% more than planned (1.00 s): data takes 500 ms, which the plan does not contain"),
        ),
        # Two parts differ and cancel each other, so the step time is as planned.
        (
            {"compute": 0.6, "over dp": 0.3, "optimizer": 0.1},
            ["compute", "over dp"],
            "compute takes 600 ms, planned 800 ms",
        ),
    ],
)
def test_drifted_part_is_named(measured, what, text):
    found = drifts(PLANNED, measured)
    assert [one.what for one in found] == what
    assert not text or found[0].text == text


def test_memory_is_compared_if_measured():
    (found,) = drifts(PLANNED, PLANNED, (2.0**30, 1.5 * 2**30))
    assert (found.what, found.ratio, found.text) == (
        "memory",
        1.5,
        "memory: 1.50 GiB, 50% more than planned (1.00 GiB)",
    )
    assert drifts(PLANNED, PLANNED, (2.0**30, 1.1 * 2**30)) == []


def test_drift_is_reported_until_it_is_well_below_the_limit():
    slower = {**PLANNED, "over dp": 0.22}  # 12 % of the step
    assert drifts(PLANNED, slower) == []
    assert [one.what for one in drifts(PLANNED, slower, before=frozenset({"step"}))] == ["step"]


class Book(TimeBook):
    """Time book that returns the values of a test."""

    said: dict[str, float]

    def typical(self) -> dict[str, float]:
        return self.said


def test_run_reports_its_plan_once_and_each_drift_once():
    clock, events, told = [0.0], [], []
    book = Book()
    book.said = {"compute": 0.7, "host": 0.1, "over dp_shard": 0.1, "optimizer": 0.1}
    terms = {"gemm": 0.8, "dp_exposed": 0.1, "optimizer": 0.1}
    watch = PlanWatch(
        {"basis": "a profile", "step_s": 1.0, "memory_bytes": 100.0, "terms": terms},
        on_gpu=False,
        book=book,
        write=lambda event: events.append(dict(event)),
        warn=lambda step, text: told.append(text),
        now=lambda: clock[0],
    )
    for step in range(1, 301):
        clock[0] += 1.0
        if step == 100:
            book.said = {"compute": 0.8, "over dp_shard": 0.5, "optimizer": 0.1}
        assert (
            watch.on_step(
                StepRecord(step=step, loss=1.0, lr=0.1, grad_norm=1.0, count=64, count_per_s=64.0, memory_bytes=10**9)
            )
            is None
        )
    kinds = [event["event"] for event in events]
    assert kinds[0] == "plan"
    assert kinds.count("plan") == 1
    assert [event["step"] for event in events if event["event"] == "actual"] == [20, 70, 120, 170, 220, 270]
    (drift,) = [event for event in events if event["event"] == "drift"]
    assert (drift["step"], drift["what"], drift["ratio"]) == (120, "step", 1.4)
    assert "over dp takes 500 ms, planned 100 ms" in drift["text"]
    assert told == [f"step 120 beside the plan: {drift['text']}"]
    planned = {one.series: one.value for one in readings(events[0])}
    assert planned == {"planned{step_s}": 1.0, "planned{memory.bytes}": 100.0, "planned{tokens_per_s}": 64.0}
    ratios = {one.series: one.value for one in readings(events[-1])}
    assert ratios["plan.drift{over dp}"] == 5.0
    assert ratios["plan.drift{step}"] == 1.4
