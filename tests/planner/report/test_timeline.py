"""The chart shows every action at its simulated time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from hypothesis import given, settings

from tests.spec.schedule.cases import schedules
from weft.config.pipeline_schedule import build_schedule, parts
from weft.planner.cost.pipeline import Durations
from weft.planner.report.pictures import Bar, draw_bars, draw_schedule

SVG = "{http://www.w3.org/2000/svg}"


@settings(max_examples=15, deadline=None)
@given(schedule=schedules())
def test_every_action_has_a_bar(schedule):
    picture = ElementTree.fromstring(draw_schedule(schedule).svg())
    assert len(list(picture.iter(f"{SVG}title"))) == sum(len(parts(step)) for steps in schedule.ranks for step in steps)


def test_bars_are_to_scale():
    picture = ElementTree.fromstring(draw_schedule(build_schedule("1f1b", 2, 2), Durations(1.0, 1.0, 1.0)).svg())
    bars = {group.find(f"{SVG}title").text: group.find(f"{SVG}rect").attrib for group in picture.findall(f"{SVG}g")}
    first = bars["forward of microbatch 0 on stage 0"]
    last = bars["backward of microbatch 1 on stage 0"]
    unit = float(first["width"]) + 0.5
    assert abs(float(last["width"]) + 0.5 - 2 * unit) < 0.1
    assert abs(float(last["x"]) - float(first["x"]) - 7 * unit) < 0.1
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts[0] == "1f1b: 2 ranks, 2 microbatches; 33.3 % waiting, 2 microbatches in flight"
    assert {"rank 0", "rank 1", "forward", "backward"} <= set(texts)


def test_text_is_escaped_in_the_chart():
    picture = draw_bars([("<a>", [Bar(0, 1, "#fff", "&", '"<')])], "<&>", [("x<y", "#000")]).svg()
    assert "<&>" in [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
