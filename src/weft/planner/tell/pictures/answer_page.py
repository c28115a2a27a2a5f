"""The whole answer as one HTML page that needs nothing else: no script, no file beside it, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from weft.planner.search import Answer, Candidate, drawn_schedule
from weft.planner.search import memory_by_rank as bytes_by_rank
from weft.planner.tell.explanation import TERM_WORDS, differences, fit_words, headline
from weft.planner.tell.pictures.charts import CLASS_COLOURS, TERM_COLOURS, memory_by_rank, pareto, waterfall
from weft.planner.tell.pictures.timeline import draw_schedule
from weft.units import format_bytes, format_count, format_seconds

#: Plans that are listed, and reasons why others are out.
_LAYOUTS, _REASONS = 10, 12
#: Terms that make up most of a difference.
_MOST_TERMS = 3
#: Letters up to which a figure is not broken into lines.
_SHORT = 16
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222222; background: #ffffff; max-width: 1240px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #bbbbbb; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 3px 14px 3px 0; border-bottom: 1px solid #eeeeee; }
.n { white-space: nowrap; } .swatch { display: inline-block; width: 11px; height: 11px; }
svg { max-width: 100%; height: auto; } .faint { color: #666666; }
"""


def html_page(found: Answer[Candidate], hour_price: float | None = None) -> str:
    """Return the page of an answer that has a best plan.

    Args:
        found: what the search answered.
        hour_price: dollars of one device for one hour.
    """
    best, question = found.ranked[0], found.question
    title = f"{question.model.name} on {question.cluster}"
    rest = found.num_plans - found.num_estimated
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(question.work)}; {found.num_plans:,} plans: {rest:,} break a rule, '
        f"{found.num_estimated:,} estimated, {found.num_fit:,} fit in memory</p>",
        f"<h2>The best plan</h2><p><code>{escape(str(best.plan))}</code></p>",
        _table((), [line.split(maxsplit=1) for line in _joined(headline(best, hour_price)[1:])]),
        f"<h2>Where a step of {format_seconds(best.step_s)} goes</h2>",
        _terms(best),
        waterfall(best).svg(),
        f"<h2>Memory: {format_bytes(best.total_bytes)} of {format_bytes(best.usable_bytes)}, "
        f"{escape(fit_words(best.fits))}</h2>",
        _classes(best),
        memory_by_rank(best, bytes_by_rank(best)).svg(),
    ]
    if best.plan.pp > 1:
        parts += ["<h2>The pipeline's schedule</h2>", draw_schedule(*drawn_schedule(best))]
    parts += [
        "<h2>Other layouts, and why they are not the best</h2>",
        _others(best, found.layouts(_LAYOUTS)[1:]),
        "<h2>Memory against speed</h2>",
        pareto(found).svg(),
        "<h2>Why all other plans are out</h2>",
        _table(
            ("plans", "reason", "an example, and what is wrong with it"),
            ((f"{each.count:,}", each.name, f"{each.example}: {each.message}") for each in found.refused[:_REASONS]),
        ),
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _joined(lines: Iterable[str]) -> list[str]:
    """Lines of text with those that go on from the one before."""
    found: list[str] = []
    for line in lines:
        if line.startswith(" ") and found:
            found[-1] += f"; {line.strip()}"
        else:
            found.append(line)
    return found


def _terms(one: Candidate) -> str:
    rows = sorted(((name, value) for name, value in one.terms.items() if value > 0), key=lambda row: -row[1])
    return _table(
        ("", "part of the step", "time", "share"),
        (
            (TERM_COLOURS.get(name, ""), TERM_WORDS.get(name, name), format_seconds(value), f"{value / one.step_s:.1%}")
            for name, value in rows
        ),
    )


def _classes(one: Candidate) -> str:
    return _table(
        ("", "class of memory, on the fullest rank", "bytes", "share"),
        (
            (colour, name, format_bytes(one.memory[name]), f"{one.memory[name] / one.usable_bytes:.1%}")
            for name, colour in CLASS_COLOURS.items()
            if one.memory.get(name, 0.0) > 0
        ),
    )


def _others(best: Candidate, layouts: Sequence[Candidate]) -> str:
    """The best plan of each other layout, with the terms that cost it most."""

    def why(one: Candidate) -> str:
        rows = differences(best.terms, one.terms)[:_MOST_TERMS]
        words = (
            f"{TERM_WORDS.get(name, name)} {'+' if after >= before else ''}{format_seconds(after - before)}"
            for name, before, after in rows
        )
        return "; ".join(words)

    return _table(
        ("step", "slower", f"{best.question.unit}/s", "memory", "plan", "most of the difference"),
        (
            (
                format_seconds(one.step_s),
                f"{one.step_s / best.step_s - 1:+.1%}",
                format_count(one.tokens_per_s),
                format_bytes(one.total_bytes),
                f"<code>{escape(str(one.plan))}</code>",
                why(one),
            )
            for one in layouts
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{escape(word)}</th>' for word in head)}</tr>")
    lines += [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _cell(text: str) -> str:
    if text.startswith("#") and len(text) == len("#rrggbb"):
        return f'<td><span class="swatch" style="background:{text}"></span></td>'
    inner = text if text.startswith("<code>") else escape(text)
    is_number = len(text) < _SHORT and (text[:1].isdigit() or text[:1] in ("+", "-"))
    return f"<td class='n'>{inner}</td>" if is_number else f"<td>{inner}</td>"
