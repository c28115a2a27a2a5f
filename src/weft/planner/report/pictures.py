"""Charts as lists of shapes, written as SVG: bars, curves and timelines, without a plotting library."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from typing import NamedTuple
from xml.sax.saxutils import escape

from weft.config.pipeline_schedule import Schedule, Step, parts
from weft.planner.cost.memory import CLASSES
from weft.planner.cost.pipeline import Durations, simulate
from weft.planner.report.energy_front import energy_front
from weft.planner.report.explanation import TERM_WORDS, explain, sorted_terms, term_changes
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.pipeline_clock import memory_by_rank as bytes_by_rank
from weft.planner.search.pipeline_clock import timed_schedule
from weft.units import format_bytes, format_count, format_seconds

#: Colors that also differ in lightness, for color-blind readers and for print.
PALETTE = (
    "#2a6fbb", "#e09f3e", "#4c9a6a", "#d1495b", "#7a5195", "#58b5c9", "#9c755f", "#b8b84a", "#7f7f7f", "#f28ea8",
    "#2f4b7c", "#a05d2c", "#86bcb6", "#c0c0c0", "#d37295", "#3b7d4f",
)  # fmt: skip
INK, FAINT = "#222222", "#bbbbbb"


class Rect(NamedTuple):
    """Filled rectangle with a tooltip (`title`) and a text in its middle (`label`)."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""
    label: str = ""


class Polyline(NamedTuple):
    """Polyline through points (x, y)."""

    points: tuple[tuple[float, float], ...]
    stroke: str = INK
    width: float = 1.0


class Dot(NamedTuple):
    """Filled circle with a tooltip (`title`)."""

    x: float
    y: float
    radius: float
    fill: str
    title: str = ""


class Text(NamedTuple):
    """One line of text. `anchor` is the part of the text that is at `x`: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    fill: str = INK


Shape = Rect | Polyline | Dot | Text


@dataclass(slots=True)
class Drawing:
    """Shapes on a white background. x increases to the right, y downwards."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list[Shape])

    def add(self, *shapes: Shape) -> None:
        """Add shapes on top of the existing ones."""
        self.shapes.extend(shapes)

    def legend(self, names: Sequence[tuple[str, str]], x: float, y: float, width: float) -> float:
        """Draw a legend of (name, color), in as many lines as needed, and return the y below it."""
        left = x
        for name, colour in names:
            needed = 22 + 6.6 * len(name)
            if left + needed > x + width and left > x:
                left, y = x, y + 18
            self.add(Rect(left, y - 9, 11, 11, colour), Text(left + 15, y, name, 11))
            left += needed
        return y + 18

    def svg(self) -> str:
        """Return the chart as an SVG document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="sans-serif">'
        )
        sheet = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        return "\n".join([head, sheet, *(_svg(shape) for shape in self.shapes), "</svg>"]) + "\n"


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rect):
        body = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
        body = f'{body} fill="{shape.fill}"'
        if not shape.label:
            return _titled("rect", body, shape.title)
        label = Text(shape.x + shape.width / 2, shape.y + shape.height / 2 + 4, shape.label, anchor="middle")
        return f"<g><title>{escape(shape.title)}</title><rect {body}/>{_svg(label)}</g>"
    if isinstance(shape, Dot):
        body = f'cx="{shape.x:.2f}" cy="{shape.y:.2f}" r="{shape.radius:g}" fill="{shape.fill}"'
        return _titled("circle", body, shape.title)
    if isinstance(shape, Polyline):
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
        return f'<polyline points="{points}" fill="none" stroke="{shape.stroke}" stroke-width="{shape.width:g}"/>'
    place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}"'
    return f'<text {place} text-anchor="{shape.anchor}" fill="{shape.fill}">{escape(shape.text)}</text>'


def _titled(tag: str, body: str, title: str) -> str:
    return f"<{tag} {body}><title>{escape(title)}</title></{tag}>" if title else f"<{tag} {body}/>"


# Charts of `weft plan`: memory against speed, parts of a step, memory by rank.

_LEFT, _TOP, _WIDTH, _HEIGHT = 90.0, 60.0, 820.0, 420.0
#: Space for a number to the right of a full bar.
_BESIDE = 110.0
#: Plan fields in the label of a point.
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero")
#: Characters per line of a plan in small text, and the height of a line.
_LETTERS, _LINE = 150, 15.0
#: Color of each term and class, the same in every chart.
TERM_COLOURS = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(TERM_WORDS)}
CLASS_COLOURS = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(CLASSES)}


def pareto(found: Answer[Candidate]) -> Drawing:
    """Draw memory (of the rank with the highest use) against tokens per second: plans as dots, Pareto front as line."""
    drawing = Drawing(_LEFT + _WIDTH + 40, _TOP + _HEIGHT + 70)
    question = found.question
    drawing.add(
        Text(_LEFT, 28, f"{question.model.name} on {question.cluster}: memory against speed", 16),
        Text(_LEFT, 46, "up and left is better; the line joins the plans that no other plan beats", 11),
    )
    dots = [*found.ranked, *found.pareto]
    if not dots:
        drawing.add(Text(_LEFT + 20, _TOP + 40, "no plan fits"))
        return drawing
    most_x, most_y = dots[0].usable_bytes, 1.05 * max(one.tokens_per_s for one in dots)
    bottom = _TOP + _HEIGHT
    for part in range(5):
        x, y = _LEFT + _WIDTH * part / 4, bottom - _HEIGHT * part / 4
        drawing.add(
            Polyline(((x, _TOP), (x, bottom)), FAINT, 0.5),
            Polyline(((_LEFT, y), (_LEFT + _WIDTH, y)), FAINT, 0.5),
            Text(x, bottom + 18, format_bytes(most_x * part / 4), 11, "middle"),
            Text(_LEFT - 8, y + 4, format_count(most_y * part / 4), 11, "end"),
        )
    drawing.add(
        Text(_LEFT + _WIDTH / 2, bottom + 42, "memory of the fullest rank, of the device's memory", 12, "middle"),
        Text(_LEFT - 8, _TOP - 10, f"{question.unit}/s", 12, "end"),
    )

    def position(one: Candidate) -> tuple[float, float]:
        x = _LEFT + _WIDTH * min(1.0, one.total_bytes / most_x)
        return x, bottom - _HEIGHT * one.tokens_per_s / most_y

    for plans, radius, colour in ((found.ranked, 3, PALETTE[5]), (found.pareto, 4, PALETTE[3])):
        for one in plans:
            speed = f"{format_bytes(one.total_bytes)}, {format_count(one.tokens_per_s)} {question.unit}/s"
            drawing.add(Dot(*position(one), radius, colour, f"{one.plan}\n{speed}"))
    drawing.add(Polyline(tuple(map(position, found.pareto)), PALETTE[3], 1.5))
    x, y = position(found.ranked[0])
    drawing.add(Text(min(x, _LEFT + _WIDTH - 10), y - 10, "best", 12, "end"))
    taken = [(x, y)]
    for one, (x, y) in zip(found.pareto, map(position, found.pareto), strict=True):
        if all(abs(x - other) > 150 or abs(y - above) > 16 for other, above in taken):
            words = " ".join(word for word in str(one.plan).split() if word.partition("=")[0] in _AXES) or "one device"
            drawing.add(Text(x + 9, y + 4, words, 10) if x <= _LEFT + 160 else Text(x - 6, y - 6, words, 10, "end"))
            taken.append((x, y))
    return drawing


def waterfall(one: Candidate) -> Drawing:
    """Draw a waterfall chart of a step: each part starts at the end of the previous one."""
    rows = sorted_terms(one)
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
    drawing.add(Text(20, 26, title, 16))
    lines = textwrap.wrap(str(one.plan), _LETTERS)
    for number, line in enumerate(lines):
        drawing.add(Text(20, 44 + number * _LINE, line, 11))
    return 44 + len(lines) * _LINE + 8


def memory_by_rank(one: Candidate, ranks: Sequence[dict[str, float]]) -> Drawing:
    """Draw the bytes by class on every rank of the pipeline."""
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


# Chart of a pipeline: one row per rank, one bar per step.

#: Colors of each kind of action, for a rank's first stage and for its later stages.
_COLOURS = {"F": ("#7fa9d6", PALETTE[0]), "B": ("#94c4a6", PALETTE[2]), "W": ("#ecc48b", PALETTE[1])}
_COLOURS["BW"] = _COLOURS["B"]
_WORDS = {"F": "forward", "B": "gradient of the input", "W": "gradient of the weights", "BW": "backward"}
_ROW, _GAP, _TIMELINE_LEFT, _TIMELINE_TOP = 26, 6, 64, 40
_TIMELINE_WIDTH = 1200
#: Narrower bars have no number.
_LEAST_LABEL = 13


class Bar(NamedTuple):
    """Bar from start_s to end_s, with a short label and a sentence as tooltip."""

    start_s: float
    end_s: float
    fill: str
    label: str = ""
    title: str = ""


def draw_schedule(schedule: Schedule, durations: Durations | None = None) -> Drawing:
    """Draw the schedule to scale. Without `durations`, all actions take equal times, and there is no time axis."""
    one = 1.0 / schedule.virtual_stages
    timeline = simulate(schedule, durations or Durations(one, one, one))
    rows = [
        [
            bar
            for step, start, end in zip(steps, timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
            for bar in _bars(schedule, rank, step, start, end)
        ]
        for rank, steps in enumerate(schedule.ranks)
    ]
    used = {action.kind for step in schedule.ranks[0] for action in parts(step)}
    legend = [(word, _COLOURS[kind][0]) for kind, word in _WORDS.items() if kind in used]
    named = [(f"rank {rank}", row) for rank, row in enumerate(rows)]
    share = 100 * sum(timeline.idle_s) / (timeline.makespan_s * schedule.num_ranks)
    stages = f" of {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    most = max(timeline.in_flight) / schedule.virtual_stages
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks{stages}, {schedule.num_microbatches} microbatches; "
        f"{share:.1f} % waiting, {most:g} microbatches in flight"
    )
    return draw_bars(named, title, legend, has_axis=durations is not None)


def _bars(schedule: Schedule, rank: int, step: Step, start: float, end: float) -> Iterator[Bar]:
    actions = parts(step)
    length = (end - start) / len(actions)
    for place, action in enumerate(actions):
        is_later = action.stage != schedule.stages_of(rank)[0]
        beside = "".join(f", beside {other}" for other in actions if other is not action)
        title = f"{_WORDS[action.kind]} of microbatch {action.microbatch} on stage {action.stage}{beside}"
        begin = start + place * length
        yield Bar(begin, begin + length, _COLOURS[action.kind][is_later], str(action.microbatch), title)


def draw_bars(
    rows: Sequence[tuple[str, Sequence[Bar]]],
    title: str,
    legend: Sequence[tuple[str, str]],
    *,
    has_axis: bool = False,
) -> Drawing:
    """Draw rows of bars on one scale of seconds.

    Args:
        rows: (name, bars) from top to bottom.
        title: text above the rows.
        legend: (label, color).
        has_axis: True to draw a time axis.
    """
    length = max((bar.end_s for _, bars in rows for bar in bars), default=0.0) or 1.0
    width = _TIMELINE_WIDTH - _TIMELINE_LEFT - 10
    drawing = Drawing(_TIMELINE_WIDTH, 0.0)
    drawing.add(Text(10, 22, title, 14))
    for place, (name, bars) in enumerate(rows):
        top = _TIMELINE_TOP + place * (_ROW + _GAP)
        drawing.add(Text(10, top + 17, name), Rect(_TIMELINE_LEFT, top, width, _ROW, "#f0f0f0"))
        for bar in bars:
            share = (bar.end_s - bar.start_s) / length
            left = _TIMELINE_LEFT + width * bar.start_s / length
            label = bar.label if bar.label and fits(bar.label, share) else ""
            # A gap of half a pixel separates bars of the same color.
            drawing.add(Rect(left, top, max(width * share - 0.5, 0.1), _ROW, bar.fill, bar.title, label))
    bottom = _TIMELINE_TOP + len(rows) * (_ROW + _GAP)
    for part in range(5 if has_axis else 0):
        x = _TIMELINE_LEFT + width * part / 4
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        drawing.add(
            Polyline(((x, _TIMELINE_TOP), (x, bottom)), FAINT, 0.5),
            Text(x, bottom + 14, format_seconds(length * part / 4), anchor=anchor),
        )
    drawing.height = drawing.legend(legend, _TIMELINE_LEFT, bottom + (40 if has_axis else 18), width)
    return drawing


def fits(label: str, share: float) -> bool:
    """Return True if a label fits on a bar with this share of the longest row."""
    return share * (_TIMELINE_WIDTH - _TIMELINE_LEFT - 10) >= max(_LEAST_LABEL, 7 * len(label) + 2)


# The answer as one self-contained HTML page: no script, no other file, no network access.

#: Maximum number of listed plans, of reasons why other plans were rejected, and of terms of a difference.
_LAYOUTS, _REASONS, _MOST_TERMS = 10, 12, 3
#: Maximum number of characters in a table cell without line breaks.
_SHORT = 16
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222222; background: #ffffff; max-width: 1240px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #bbbbbb; }
code, pre { font: 13px/1.4 ui-monospace, monospace; } code { overflow-wrap: anywhere; } pre { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid #eeeeee; }
.n { white-space: nowrap; } svg { max-width: 100%; height: auto; } .faint { color: #666666; }
"""


def html_page(found: Answer[Candidate], hour_price: float | None = None) -> str:
    """Return the HTML page for an answer that has a best plan."""
    best, question = found.ranked[0], found.question
    title = escape_html(f"{question.model.name} on {question.cluster}")
    rest = found.num_plans - found.num_estimated
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="faint">{escape_html(question.work)}; {found.num_plans:,} plans: {rest:,} break a rule, '
        f"{found.num_estimated:,} estimated, {found.num_fit:,} fit in memory</p>",
        f"<h2>The best plan</h2><p><code>{escape_html(str(best.plan))}</code></p>",
        f"<pre>{escape_html(explain(best, hour_price))}</pre>",
        waterfall(best).svg(),
        memory_by_rank(best, bytes_by_rank(best)).svg(),
    ]
    if best.plan.pp > 1:
        parts += ["<h2>The pipeline's schedule</h2>", draw_schedule(*timed_schedule(best)).svg()]
    others = found.layouts(_LAYOUTS)[1:]
    parts += [
        "<h2>Other layouts, and why they are not the best</h2>",
        _table(
            ("step", "slower", f"{question.unit}/s", "memory", "plan", "most of the difference"),
            (
                (
                    format_seconds(one.step_s),
                    f"{one.step_s / best.step_s - 1:+.1%}",
                    format_count(one.tokens_per_s),
                    format_bytes(one.total_bytes),
                    f"<code>{escape_html(str(one.plan))}</code>",
                    "; ".join(term_changes(best, one)[:_MOST_TERMS]),
                )
                for one in others
            ),
        ),
        "<h2>Memory against speed</h2>",
        pareto(found).svg(),
        "<h2>Time against energy, estimated under power caps</h2>",
        _table(
            ("step", "power cap of a device", f"kWh per billion {question.unit}", "plan"),
            (
                (
                    format_seconds(one.candidate.step_s),
                    f"{one.watts:,.0f} W",
                    f"{one.kwh * 1e9 / question.job.tokens:,.3g}",
                    f"<code>{escape_html(str(one.candidate.plan))}</code>",
                )
                for one in energy_front(found)
            ),
        ),
        "<h2>Why all other plans are out</h2>",
        _table(
            ("plans", "reason", "an example, and what is wrong with it"),
            ((f"{each.count:,}", each.name, f"{each.example}: {each.message}") for each in found.refused[:_REASONS]),
        ),
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    return f"{head}<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        inner = text if text.startswith("<code>") else escape_html(text)
        is_number = len(text) < _SHORT and (text[:1].isdigit() or text[:1] in ("+", "-"))
        return f"<td class='n'>{inner}</td>" if is_number else f"<td>{inner}</td>"

    first = f"<tr>{''.join(f'<th>{escape_html(word)}</th>' for word in head)}</tr>"
    return "\n".join(["<table>", first, *(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows), "</table>"])
