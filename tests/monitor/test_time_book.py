"""TimeBook: each second is counted once, under one kind, and reported in readable lines."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from weft.monitor.step_times import Meter, TimeBook, chrome_trace, draw_times, time_lines

RANKS = [
    {"compute": 6.0, "stages": 2.0, "over dp_shard": 1.0, "data": 0.1, "optimizer": 0.4, "host": 0.5, "total": 10.0},
    {"compute": 8.0, "stages": 0.5, "over dp_shard": 1.0, "data": 0.1, "optimizer": 0.4, "host": 0.0, "total": 10.0},
]


class Ticks:
    """A settable clock."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


class Spent(dict):
    """Seconds of communication by axis, in a meter's form."""

    def mark(self):
        return dict(self)

    def seconds_between(self, start, end):
        return {axis: seconds - start[axis] for axis, seconds in end.items()}


def test_phase_and_its_communication_are_counted_once():
    clock, spent = Ticks(), Spent({"tp": 0.0, "pp": 0.0})
    meter, book = Meter(clock=clock, communication=spent), TimeBook()
    for phase, seconds, axis, inside in (
        ("forward", 3.0, "tp", 1.0), ("wait", 2.0, "pp", 1.9),
        ("backward", 4.0, "tp", 0.5), ("optimizer", 1.0, "tp", 0.0),
    ):  # fmt: skip
        with meter.phase(phase):
            clock.now += seconds
            spent[axis] += inside
    times = meter.end_step()
    book.add_step(times)
    found = book.seconds()
    assert {kind: found[kind] for kind in ("compute", "stages", "over tp", "optimizer")} == pytest.approx(
        {"compute": 5.5, "stages": 2.0, "over tp": 1.5, "optimizer": 1.0}
    )
    assert times.spans() == [
        ("forward", 0.0, 3.0), ("wait", 3.0, 5.0), ("backward", 5.0, 9.0), ("optimizer", 9.0, 10.0)
    ]  # fmt: skip
    assert book.num_steps == 1


def test_data_wait_counts_only_while_the_device_waits_too():
    clock = Ticks()
    meter, book = Meter(clock=clock), TimeBook()
    for gap, waited in ((0.0, 3.0), (0.5, 4.0), (5.0, 1.0)):
        clock.now += gap
        meter.begin_step()
        clock.now += 2.0
        book.add_step(meter.end_step(), waited)
    assert book.seconds()["data"] == 3.0 + 0.5 + 1.0


def test_remaining_time_counts_as_host():
    book = TimeBook()
    book.start()
    with book.spend("checkpoint"):
        pass
    book.stop()
    found = book.seconds()
    assert found["host"] + found["checkpoint"] == pytest.approx(found["total"])


def test_report_lines():
    slow = [{kind: 10 * seconds for kind, seconds in one.items()} for one in RANKS]
    assert time_lines(slow, 5) == [
        "time    5 steps in 100.0 s on 2 ranks: compute 70%, bubble (waiting for other stages) 12%, "
        "communication over dp_shard 10%, optimizer 4%, host 2%, data 1%",
        "        slowest: rank 1, 14% more compute than the mean",
        "        bubble (waiting for other stages): use more microbatches, or a zero-bubble schedule (zb_h1, zb_v) "
        "if the plan has none yet",
    ]
    assert time_lines(RANKS[:1], 5)[0].startswith("time    5 steps in 10.0 s: compute 60%")


def test_short_run_has_no_advice_and_equal_ranks_no_slowest():
    even = [{"compute": 4.0 + rank / 100, "stages": 1.0, "data": 1.0, "total": 6.0} for rank in (0, 1)]
    assert len(time_lines(even, 5)) == 1


def test_joined_axes_omit_axes_of_size_one():
    ranks = [{"compute": 1.0, "over dp_replicate*dp_shard": 1.0, "total": 2.0}]
    sizes = {"dp_replicate": 2, "dp_shard": 1}
    assert "communication over dp_replicate 50%" in time_lines(ranks, 5, sizes)[0]
    assert "over dp_replicate*dp_shard 50%" in time_lines(ranks, 5, {"dp_replicate": 2, "dp_shard": 2})[0]
    assert "communication over dp_replicate 1.0 s" in draw_times(ranks, 5, sizes)


def test_axes_with_equal_names_are_reported_once():
    ranks = [{"compute": 1.0, "over tp": 0.5, "over dp_shard*tp": 0.5, "total": 2.0}]
    sizes = {"dp_shard": 1, "tp": 2}
    assert time_lines(ranks, 5, sizes)[0].count("communication over tp 50%") == 1
    assert draw_times(ranks, 5, sizes).count("communication over tp 1.0 s") == 1  # in the legend


def test_report_as_svg():
    picture = ElementTree.fromstring(draw_times(RANKS * 100, 5))
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "rank 0: compute 6.00 s, 60.0%"
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[2:5] == ["6.0 s · 60%", "2.0 s · 20%", "1.0 s · 10%"]
    assert "compute 7.0 s, 70%" in texts
    legend = list(picture.iter("{http://www.w3.org/2000/svg}text"))[-6:]
    assert all(float(text.get("x")) + 7 * len(text.text) <= 1200 for text in legend)
    assert len({title.split(":")[0] for title in titles}) == 64


def test_trace_has_a_line_for_each_track():
    events = json.loads(chrome_trace([("a", "rank 0", [("F0.0", 0.0, 0.5)]), ("b", "rank 0", [])]))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["a", "rank 0", "b", "rank 0"]
    assert [event for event in events if event["ph"] == "X"] == [
        {"ph": "X", "name": "F0.0", "pid": 0, "tid": 0, "ts": 0.0, "dur": 500000.0}
    ]


def test_typical_step_excludes_the_first():
    book = TimeBook()
    for seconds in (9.0, 2.0, 4.0):
        clock = Ticks()
        meter = Meter(clock=clock)
        with meter.phase("forward"):
            clock.now += seconds
        times = meter.end_step()
        times.total_s = seconds + 0.5
        book.add_step(times)
    assert book.typical() == pytest.approx({"compute": 3.0, "host": 0.5})
    assert TimeBook().typical() == {}
