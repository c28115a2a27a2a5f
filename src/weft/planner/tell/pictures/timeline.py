"""A pipeline as a picture: one row for each rank, one bar for each step, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from weft.planner.cost.pipeline import Durations, Timeline, simulate
from weft.planner.tell.pictures.canvas import PALETTE
from weft.spec.schedule import Action, Pair, Schedule, Step, parts
from weft.units import format_seconds

#: Fill of each kind; of a rank's first and of its later stages.
_COLOURS = {"F": ("#7fa9d6", PALETTE[0]), "B": ("#94c4a6", PALETTE[2]), "W": ("#ecc48b", PALETTE[1])}
_COLOURS["BW"] = _COLOURS["B"]
_WORDS = {"F": "forward", "B": "gradient of the input", "W": "gradient of the weights", "BW": "backward"}
_ROW, _GAP, _LEFT, _TOP = 26, 6, 64, 40
_WIDTH = 1200
#: Narrower bars have no number on them.
_LEAST_LABEL = 13


class Bar(NamedTuple):
    """One bar: from start_s to end_s, with a short label on it and a sentence that shows under the pointer."""

    start_s: float
    end_s: float
    fill: str
    label: str = ""
    title: str = ""


def draw_schedule(schedule: Schedule, durations: Durations | None = None) -> str:
    """Draw the schedule to scale, as SVG text."""
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
    legend = [(_WORDS[kind], _COLOURS[kind][0]) for kind in _kinds(schedule)]
    named = [(f"rank {rank}", row) for rank, row in enumerate(rows)]
    return draw_bars(named, _title(schedule, timeline), legend, has_axis=durations is not None)


def _kinds(schedule: Schedule) -> list[str]:
    used = {action.kind for step in schedule.ranks[0] for action in parts(step)}
    return [kind for kind in _WORDS if kind in used]


def _title(schedule: Schedule, timeline: Timeline) -> str:
    share = 100 * sum(timeline.idle_s) / (timeline.makespan_s * schedule.num_ranks)
    stages = f" of {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    most = max(timeline.in_flight) / schedule.virtual_stages
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks{stages}, {schedule.num_microbatches} microbatches; "
        f"{share:.1f} % waiting, {most:g} microbatches in flight"
    )


def _bars(schedule: Schedule, rank: int, step: Step, start: float, end: float) -> list[Bar]:
    """One bar, or two that share the time of a pair in proportion."""
    if isinstance(step, Pair):
        middle = start + (end - start) / 2
        return [
            _bar(schedule, rank, step.forward, start, middle, f", beside {step.backward}"),
            _bar(schedule, rank, step.backward, middle, end, f", beside {step.forward}"),
        ]
    return [_bar(schedule, rank, step, start, end, "")]


def _bar(schedule: Schedule, rank: int, action: Action, start: float, end: float, beside: str) -> Bar:
    is_later = action.stage != schedule.stages_of(rank)[0]
    title = f"{_WORDS[action.kind]} of microbatch {action.microbatch} on stage {action.stage}{beside}"
    return Bar(start, end, _COLOURS[action.kind][is_later], str(action.microbatch), title)


def draw_bars(
    rows: Sequence[tuple[str, Sequence[Bar]]],
    title: str,
    legend: Sequence[tuple[str, str]],
    *,
    has_axis: bool = False,
) -> str:
    """Draw rows of bars on one scale of seconds, as SVG text.

    Args:
        rows: (name, bars) from top to bottom.
        title: above them.
        legend: (word, colour).
        has_axis: write seconds below the rows.
    """
    length = max((bar.end_s for _, bars in rows for bar in bars), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 10) / length
    legend_top = _TOP + len(rows) * (_ROW + _GAP)
    axis = _axis(length, scale, legend_top) if has_axis else []
    drawn_legend, height = _legend(legend, legend_top + (40 if has_axis else 18))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="22" font-size="14" fill="#222222">{escape(title)}</text>',
    ]
    for place, (name, bars) in enumerate(rows):
        top = _TOP + place * (_ROW + _GAP)
        lines.append(f'<text x="10" y="{top + 17}" fill="#222222">{escape(name)}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{top}" width="{length * scale:.1f}" height="{_ROW}" fill="#f0f0f0"/>')
        lines += [_drawn(bar, scale, top) for bar in bars]
    return "\n".join([*lines, *axis, *drawn_legend, "</svg>", ""])


def _axis(length: float, scale: float, top: int) -> list[str]:
    """Seconds from the begin of the step, at five places, each with a thin line through the rows."""
    lines: list[str] = []
    for part in range(5):
        x = _LEFT + length * scale * part / 4
        side = "start" if part == 0 else "end" if part == 4 else "middle"
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{top}" stroke="#bbbbbb" stroke-width="0.5"/>')
        words = format_seconds(length * part / 4)
        lines.append(f'<text x="{x:.1f}" y="{top + 14}" text-anchor="{side}" fill="#222222">{words}</text>')
    return lines


def _drawn(bar: Bar, scale: float, top: int) -> str:
    left, width = _LEFT + bar.start_s * scale, (bar.end_s - bar.start_s) * scale
    text = ""
    if bar.label and width >= max(_LEAST_LABEL, 7 * len(bar.label) + 2):
        middle = left + width / 2
        text = f'<text x="{middle:.1f}" y="{top + 17}" text-anchor="middle" fill="#111111">{escape(bar.label)}</text>'
    hint = f"<title>{escape(bar.title)}</title>" if bar.title else ""
    shape = f'x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}"'
    return f'<g>{hint}<rect {shape} fill="{bar.fill}" stroke="#ffffff" stroke-width="0.5"/>{text}</g>'


def fits(label: str, share: float) -> bool:
    """Return whether a label has room on a bar that takes this share of the longest row."""
    return share * (_WIDTH - _LEFT - 10) >= max(_LEAST_LABEL, 7 * len(label) + 2)


def _legend(legend: Sequence[tuple[str, str]], baseline: int) -> tuple[list[str], int]:
    """The words in rows that are no wider than the picture, and the picture's height with them."""
    lines: list[str] = []
    left = _LEFT
    for word, colour in legend:
        if left > _LEFT and left + 17 + 7 * len(word) > _WIDTH:
            left, baseline = _LEFT, baseline + 20
        lines.append(f'<rect x="{left}" y="{baseline - 10}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{left + 17}" y="{baseline}" fill="#222222">{escape(word)}</text>')
        left += 35 + 7 * len(word)
    return lines, baseline + 12
