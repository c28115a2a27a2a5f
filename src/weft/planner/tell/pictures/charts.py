"""What `weft plan` draws: memory against speed, a step as a waterfall, memory rank by rank."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from weft.planner.cost import CLASSES
from weft.planner.search import Answer, Candidate
from weft.planner.tell.explanation import TERM_WORDS
from weft.planner.tell.pictures.canvas import FAINT, INK, PALETTE, Dot, Drawing, Polyline, Rect, Text
from weft.units import format_bytes, format_count, format_seconds

_LEFT, _TOP, _WIDTH, _HEIGHT = 90.0, 60.0, 820.0, 420.0
#: Room for a figure to the right of a bar that is full.
_BESIDE = 110.0
#: Words of a plan that name a point.
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero")
#: Letters of a plan in a line of small text, and the height of such a line.
_LETTERS, _LINE = 150, 15.0
#: What has one meaning has one colour, in every picture and of every plan.
TERM_COLOURS = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(TERM_WORDS)}
CLASS_COLOURS = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(CLASSES)}


def pareto(found: Answer[Candidate]) -> Drawing:
    """Draw the memory of the fullest rank against tokens a second: every kept plan a dot, the border a line."""
    drawing = Drawing(_LEFT + _WIDTH + 40, _TOP + _HEIGHT + 70)
    question = found.question
    title = f"{question.model.name} on {question.cluster}: memory against speed"
    drawing.add(
        Text(_LEFT, 28, title, 16),
        Text(_LEFT, 46, "up and left is better; the line joins the plans that no other plan beats", 11),
    )
    dots = [*found.ranked, *found.pareto]
    if not dots:
        drawing.add(Text(_LEFT + 20, _TOP + 40, "no plan fits"))
        return drawing
    most_x = dots[0].usable_bytes
    most_y = _round_up(max(one.tokens_per_s for one in dots))
    _axes(drawing, most_x, most_y, question.unit)
    for one in found.ranked:
        drawing.add(Dot(*_place(one, most_x, most_y), 3, PALETTE[5], _dot_title(one)))
    border = [_place(one, most_x, most_y) for one in found.pareto]
    drawing.add(Polyline(tuple(border), PALETTE[3], 1.5))
    for one in found.pareto:
        drawing.add(Dot(*_place(one, most_x, most_y), 4, PALETTE[3], _dot_title(one)))
    best = found.ranked[0]
    x, y = _place(best, most_x, most_y)
    drawing.add(Text(min(x, _LEFT + _WIDTH - 10), y - 10, "best", 12, "end"))
    _label(drawing, found.pareto, border, (x, y))
    return drawing


def _label(
    drawing: Drawing,
    plans: Sequence[Candidate],
    places: Sequence[tuple[float, float]],
    best: tuple[float, float],
) -> None:
    """Name points of the border where there is room: by their axes, which say most of a plan."""
    taken = [best]
    for one, (x, y) in zip(plans, places, strict=True):
        if all(abs(x - other) > 150 or abs(y - above) > 16 for other, above in taken):
            words = " ".join(word for word in str(one.plan).split() if word.partition("=")[0] in _AXES)
            is_left = x <= _LEFT + 160
            place = (x + 9, y + 4, words or "one device", 10, "start") if is_left else (x - 6, y - 6, words, 10, "end")
            drawing.add(Text(*place))
            taken.append((x, y))


def _place(one: Candidate, most_x: float, most_y: float) -> tuple[float, float]:
    x = _LEFT + _WIDTH * min(1.0, one.total_bytes / most_x)
    return x, _TOP + _HEIGHT * (1 - one.tokens_per_s / most_y)


def _dot_title(one: Candidate) -> str:
    return f"{one.plan}\n{format_bytes(one.total_bytes)}, {format_count(one.tokens_per_s)} {one.question.unit}/s"


def _axes(drawing: Drawing, most_x: float, most_y: float, unit: str) -> None:
    bottom = _TOP + _HEIGHT
    for part in range(5):
        x, y = _LEFT + _WIDTH * part / 4, bottom - _HEIGHT * part / 4
        drawing.add(
            Polyline(((x, _TOP), (x, bottom)), FAINT, 0.5), Polyline(((_LEFT, y), (_LEFT + _WIDTH, y)), FAINT, 0.5)
        )
        drawing.add(Text(x, bottom + 18, format_bytes(most_x * part / 4), 11, "middle"))
        drawing.add(Text(_LEFT - 8, y + 4, format_count(most_y * part / 4), 11, "end"))
    drawing.add(
        Text(_LEFT + _WIDTH / 2, bottom + 42, "memory on the fullest rank, up to what the device has", 12, "middle")
    )
    drawing.add(Text(_LEFT - 8, _TOP - 10, f"{unit}/s", 12, "end"))


def _round_up(value: float) -> float:
    scale = 10 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * scale >= value * 1.02)


def waterfall(one: Candidate) -> Drawing:
    """Draw the parts of a step, each beginning where the one before ends."""
    rows = sorted(((name, value) for name, value in one.terms.items() if value > 0), key=lambda row: -row[1])
    left, height = 280.0, 24.0
    drawing = Drawing(left + 580 + _BESIDE + 20, 0.0)
    top = _head(drawing, f"{one.question.model.name}: a step of {format_seconds(one.step_s)}", one)
    drawing.height = top + height * len(rows) + 14
    done = 0.0
    for row, (name, value) in enumerate(rows):
        x, width = left + 580 * done / one.step_s, 580 * value / one.step_s
        y = top + row * height
        words = f"{format_seconds(value)}  {value / one.step_s:.1%}"
        drawing.add(
            Rect(x, y, max(width, 1.0), height - 6, TERM_COLOURS.get(name, PALETTE[0]), f"{name}: {words}"),
            Text(left - 10, y + 13, TERM_WORDS.get(name, name), 12, "end"),
            Text(x + max(width, 1.0) + 6, y + 13, words, 11),
        )
        done += value
    return drawing


def _head(drawing: Drawing, title: str, one: Candidate) -> float:
    """Title and plan, in as many lines as it takes; the y below them."""
    drawing.add(Text(20, 26, title, 16))
    lines = textwrap.wrap(str(one.plan), _LETTERS)
    for number, line in enumerate(lines):
        drawing.add(Text(20, 44 + number * _LINE, line, 11))
    return 44 + len(lines) * _LINE + 8


def memory_by_rank(one: Candidate, ranks: Sequence[dict[str, float]]) -> Drawing:
    """Draw the bytes by class on every rank of the pipeline; one bar where all ranks hold alike.

    ranks: bytes by class, rank by rank.
    """
    most = max(one.usable_bytes, max(sum(each.values()) for each in ranks))
    row = 26.0 if len(ranks) <= 32 else 12.0
    drawing = Drawing(_LEFT + _WIDTH + _BESIDE, 0.0)
    top = _head(drawing, f"{one.question.model.name}: memory by rank of the pipeline", one)
    names = [name for name in CLASSES if any(each.get(name, 0.0) > 0 for each in ranks)]
    for index, parts_of_rank in enumerate(ranks):
        x, y = _LEFT, top + index * row
        drawing.add(Text(_LEFT - 8, y + row / 2 + 3, "every rank" if len(ranks) == 1 else f"pp {index}", 11, "end"))
        for name in names:
            width = _WIDTH * parts_of_rank.get(name, 0.0) / most
            title = f"{name}: {format_bytes(parts_of_rank.get(name, 0.0))}"
            drawing.add(Rect(x, y, width, row - 4, CLASS_COLOURS[name], title))
            if width > 6.4 * len(name) + 8 and row > 20:
                drawing.add(Text(x + width / 2, y + row / 2 + 2, name, 10, "middle", "#ffffff"))
            x += width
        drawing.add(Text(x + 6, y + row / 2 + 3, format_bytes(sum(parts_of_rank.values())), 10))
    bottom = top + row * len(ranks)
    limit = _LEFT + _WIDTH * one.usable_bytes / most
    drawing.add(Polyline(((limit, top - 6), (limit, bottom + 4)), INK, 2))
    drawing.add(Text(limit, bottom + 18, f"{format_bytes(one.usable_bytes)} available", 11, "end"))
    drawing.height = drawing.legend([(name, CLASS_COLOURS[name]) for name in names], 20, bottom + 42, _WIDTH)
    return drawing
