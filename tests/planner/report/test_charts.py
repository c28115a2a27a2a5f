"""Charts: valid SVG, inside the canvas, and complete."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from weft.config.plan import Plan
from weft.planner.report.explanation import explain, fit_words, memory_bars, waterfall
from weft.planner.report.pictures import (
    CLASS_COLOURS,
    TERM_COLOURS,
    Drawing,
    Polyline,
    Rect,
    Text,
    memory_by_rank,
    pareto,
)
from weft.planner.report.pictures import waterfall as draw_waterfall
from weft.planner.report.verdict import read_plan
from weft.planner.search import pipeline_clock as ranks
from weft.planner.search.best_plans import answer
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated

QUESTION = Question.of("llama3-8b", "8xh100", seq_len=8192, global_batch=128, built_only=False, most_plans=20_000)
PIPED = "pp=4 dp_shard=2 zero=1 microbatches=16 precision=bf16 recompute=full compile=on"


@pytest.fixture(scope="module")
def piped():
    return estimated([read_plan(PIPED, QUESTION)], QUESTION)[0]


def inside(drawing: Drawing) -> bool:
    rects = [shape for shape in drawing.shapes if isinstance(shape, Rect)]
    return all(
        shape.x >= 0
        and shape.x + shape.width <= drawing.width + 1
        and shape.y >= 0
        and shape.y + shape.height <= drawing.height
        for shape in rects
    )


def words(drawing: Drawing) -> str:
    ElementTree.fromstring(drawing.svg())
    return "\n".join(shape.text for shape in drawing.shapes if isinstance(shape, Text))


def test_pareto_chart_of_memory_and_speed():
    found = answer(QUESTION)
    drawing = pareto(found)
    assert inside(drawing)
    assert "llama3-8b on 8xh100" in words(drawing)
    border = next(shape for shape in reversed(drawing.shapes) if isinstance(shape, Polyline) and len(shape.points) > 2)
    assert len(border.points) == len(found.pareto)
    assert [y for _, y in border.points] == sorted((y for _, y in border.points), reverse=True)


def test_pareto_chart_without_plans_has_a_message():
    nothing = answer(Question.of("llama3-70b", "rtx4090", built_only=False))
    assert "no plan fits" in words(pareto(nothing))


def test_waterfall_ends_at_the_step_time(piped):
    drawing = draw_waterfall(piped)
    bars = [shape for shape in drawing.shapes if isinstance(shape, Rect)]
    assert inside(drawing)
    assert len(bars) == sum(value > 0 for value in piped.terms.values())
    assert bars[0].width > bars[-1].width
    assert bars[-1].x <= bars[0].x + 581


def test_memory_chart_has_bars_of_every_rank(piped):
    every = ranks.memory_by_rank(piped)
    drawing = memory_by_rank(piped, every)
    assert inside(drawing)
    text = words(drawing)
    assert [f"pp {rank}" in text for rank in range(4)] == [True] * 4
    assert "available" in text
    alone = estimated([read_plan("dp_shard=8 zero=3 precision=bf16", QUESTION)], QUESTION)[0]
    assert "every rank" in words(memory_by_rank(alone, ranks.memory_by_rank(alone)))


def test_text_report_of_a_plan(piped):
    text = explain(piped)
    for part in ("plan ", "job ", "speed ", "MFU ", "cost ", "step ", "memory ", "pipeline bubble"):
        assert part in text
    shares = [float(line.split("%")[0].split()[-1]) for line in waterfall(piped)[1:]]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert len(memory_bars(piped)) == 1 + sum(value > 0 for value in piped.memory.values())


def test_range_of_measured_products_is_stated():
    asked = Question.of("llama3-8b", "8xmi300x", seq_len=8192, global_batch=128, most_plans=2000)
    one = estimated([read_plan("dp_shard=8 zero=3 precision=bf16 recompute=full", asked)], asked)[0]
    assert "matrix products reach 668 to 708 TFLOP/s, by software, clock and power" in explain(one)


@pytest.mark.parametrize(
    ("probability", "text"),
    [(0.9999, "fits (> 99%)"), (0.97, "fits (97%)"), (0.6, "may not fit (60%)"), (0.01, "does not fit")],
)
def test_probability_text(probability, text):
    assert fit_words(probability) == text


def test_text_is_escaped():
    drawing = Drawing(10, 10)
    drawing.add(Text(0, 0, "a < b & c"), Rect(0, 0, 1, 1, "#000000", "x < y"))
    ElementTree.fromstring(drawing.svg())


def test_colors_are_equal_in_every_chart():
    """Colors do not depend on a plan's classes and terms."""
    assert len(set(CLASS_COLOURS.values())) == len(CLASS_COLOURS)
    assert len(set(TERM_COLOURS.values())) == len(TERM_COLOURS)
    asked = Question.of("llama3-8b", "8xh100", most_plans=2000)
    for text in (
        "dp_shard=8 zero=3 accumulation=16 precision=bf16",
        "pp=8 microbatches=128 precision=bf16 recompute=full",
    ):
        (one,) = estimated([Plan.parse(text)], asked)
        drawing = memory_by_rank(one, ranks.memory_by_rank(one))
        for shape in drawing.shapes:
            if isinstance(shape, Rect) and shape.title:
                assert shape.fill == CLASS_COLOURS[shape.title.partition(":")[0]]


def test_memory_chart_stays_inside_its_frame():
    """Covers full bars and plans of several lines."""
    asked = Question.of("llama3-70b", "8xh100", most_plans=2000)
    text = (
        "pp=8 schedule=interleaved microbatches=64 virtual_stages=10 precision=bf16 recompute=full:4 offload=optimizer"
    )
    (one,) = estimated([Plan.parse(text)], asked)
    drawing = memory_by_rank(one, ranks.memory_by_rank(one))
    for shape in drawing.shapes:
        if isinstance(shape, Rect):
            assert shape.x >= 0
            assert shape.x + shape.width <= drawing.width
            assert shape.y + shape.height <= drawing.height
        elif isinstance(shape, Text):
            length = 0.62 * shape.size * len(shape.text)
            left = shape.x - {"start": 0.0, "middle": length / 2, "end": length}[shape.anchor]
            assert left >= 0
            assert left + length <= drawing.width, shape.text
            assert shape.y <= drawing.height
