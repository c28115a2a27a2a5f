"""What `weft plan --run` prints: a whole run on each cluster, the cheapest first, and the story of the first."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.planner.tell import report, whole_runs
from weft.units import format_count, format_seconds

#: What `whole_runs` gives one of.
Run = Any

_WIDE = 150


def tell_runs(
    model: Any, clusters: str, text: str, price: float | None, settings: dict[str, Any], *, as_json: bool
) -> bool:
    """Print the runs; whether any cluster holds the model.

    Args:
        model: what is trained.
        clusters: with commas.
        text: of the run.
        price: dollars of one device for one hour.
        settings: of the question.
        as_json: for programs.
    """
    found = whole_runs(model, clusters, text, price, **settings)
    if as_json:
        rows = [
            {"cluster": str(reply.question.cluster), "run": None if run is None else run.table()}
            | {"plan": None if reply.best is None else report.candidate_table(reply.best, price)}
            for reply, run in found
        ]
        print(json.dumps(rows, indent=2))
        return any(run is not None for _, run in found)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("on", no_wrap=True)
    for title in ("tokens", "days", "dollars", "goodput", "step"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("best plan", overflow="fold")
    for reply, run in found:
        table.add_row(str(reply.question.cluster), *_row(run))
    first = found[0][0].question
    assumed = f" (assumed: {' '.join(first.assumed)})" if first.assumed else ""
    console.print(f"[bold]{first.model.name}[/], {format_count(first.job.shape.num_params)} parameters{assumed}")
    console.print(table)
    best = found[0][1]
    if best is not None:
        console.print()
        console.print("\n".join(best.lines()), markup=False, soft_wrap=True)
    return best is not None


def _row(run: Run | None) -> tuple[str, ...]:
    if run is None:
        return "-", "-", "-", "-", "-", "no plan fits"
    money = "-" if run.dollars is None else f"{run.dollars:,.0f}"
    step = format_seconds(run.candidate.step_s)
    return format_count(run.tokens), f"{run.days:,.3g}", money, f"{run.goodput:.1%}", step, str(run.candidate.plan)
