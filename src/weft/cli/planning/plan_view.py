"""What `weft plan` prints for people: the ranked table, and the story of the best plan or of those that were named."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from weft.planner.tell import explain, fit_words
from weft.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from weft.cli.planning.findings import Findings
    from weft.planner.search import Answer, Candidate
    from weft.planner.tell import Scenario

#: Columns of text where nobody looks on, so that a file has no broken lines.
_WIDE = 150


def print_findings(found: Findings, *, top: int, reasons: bool, hour_price: float | None) -> None:
    """Print everything that was found."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    _heading(console, found.answer)
    if found.answer.best is None:
        _nothing(console, found.answer)
    elif not found.only_judges:
        console.print(_ranking(found.answer, top, hour_price))
        console.print()
        console.print(explain(found.answer.best, hour_price), markup=False, soft_wrap=True)
    if reasons:
        console.print(_reasons(found.answer))
    for part in (found.why_not, found.comparison):
        if part is not None:
            console.print()
            console.print("\n".join(part.lines()), markup=False, soft_wrap=True)
    if found.scenarios:
        console.print()
        console.print(_scenarios(found.answer, found.scenarios))


def _heading(console: Console, answer: Answer[Candidate]) -> None:
    question = answer.question
    assumed = f" (assumed: {' '.join(question.assumed)})" if question.assumed else ""
    console.print(
        f"[bold]{question.model.name}[/], {format_count(question.job.shape.num_params)} parameters, on "
        f"[bold]{question.cluster}[/]: {question.work}{assumed}"
    )
    kind = "plans" if question.built_only else "plans, including those that Weft does not run yet"
    console.print(
        f"{answer.num_plans:,} {kind}: {answer.num_plans - answer.num_estimated:,} break a rule, "
        f"{answer.num_estimated:,} estimated in {answer.seconds:.2f} s, {answer.num_fit:,} fit in memory",
        style="dim",
    )
    if answer.left_out:
        console.print(f"skipped: {'; '.join(answer.left_out)}", style="dim")


def _ranking(answer: Answer[Candidate], top: int, hour_price: float | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("#", justify="right")
    unit = answer.question.unit
    for title in ("step", f"{unit}/s", "MFU", "memory", f"$/B {unit}"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("plan (the best of each layout)", overflow="fold")
    for place, one in enumerate(answer.layouts(top), start=1):
        table.add_row(str(place), *_figures(one, hour_price), str(one.plan))
    return table


def _figures(one: Candidate, hour_price: float | None) -> tuple[str, ...]:
    price = one.cost(hour_price).price
    tokens = one.question.job.tokens
    return (
        format_seconds(one.step_s),
        format_count(one.tokens_per_s),
        f"{one.mfu:.1%}",
        format_bytes(one.total_bytes),
        "-" if price is None else f"{price * 1e9 / tokens:,.0f}",
        fit_words(one.fits).removeprefix("fits ").strip("()"),
    )


def _reasons(answer: Answer[Candidate]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="\nrefused", title_justify="left")
    table.add_column("plans", justify="right", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    table.add_column("an example and its error", overflow="fold")
    for each in answer.refused:
        table.add_row(f"{each.count:,}", each.name, f"{each.example}\n{each.message}")
    return table


def _nothing(console: Console, answer: Answer[Candidate]) -> None:
    from weft.planner.tell import nearest_yes

    question = answer.question
    if answer.num_estimated:
        console.print(f"\n[bold red]No plan fits[/] {question.model.name} on {question.cluster}.")
    else:
        console.print(f"\n[bold red]Every plan breaks a rule[/] for {question.model.name} on {question.cluster}:")
        for each in answer.refused[:3]:
            text = f"  {each.message}  ({each.count:,} plans, such as {each.example})"
            console.print(text, markup=False, soft_wrap=True)
    if answer.nearest is not None:
        one = answer.nearest
        console.print(
            f"The plan that needs the least memory: {one.plan}\n  {format_bytes(one.total_bytes)} on the fullest "
            f"rank, of {format_bytes(one.usable_bytes)}.",
            markup=False,
        )
    changes = nearest_yes(question)
    console.print("The nearest changes that fit:" if changes else "No small change helps.")
    for found in changes:
        best = found.answer.best
        if best is not None:
            figures = f"{format_seconds(best.step_s)} a step, {format_bytes(best.total_bytes)}"
            console.print(f"  {found.text:<28} {figures}  {best.plan}", markup=False, soft_wrap=True)


def _scenarios(answer: Answer[Candidate], scenarios: tuple[Scenario, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what if", no_wrap=True)
    unit = answer.question.unit
    for title in ("step", f"{unit}/s", "speed", "MFU", "memory", f"$/B {unit}"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("best plan", overflow="fold")
    base = answer.best
    if base is not None:
        table.add_row("(unchanged)", *_scenario(base, base), str(base.plan))
    for each in scenarios:
        best = each.answer.best
        if best is None:
            table.add_row(each.text, "-", "-", "-", "-", "-", "-", "no plan fits")
        else:
            table.add_row(each.text, *_scenario(best, base), str(best.plan))
    return table


def _scenario(one: Candidate, base: Candidate | None) -> tuple[str, ...]:
    step, tokens, mfu, memory, price, _ = _figures(one, None)
    speed = "" if base is None else f"{one.tokens_per_s / base.tokens_per_s:.2f}x"
    return step, tokens, speed, mfu, memory, price
