"""`weft plan --json`: everything that was found, for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from weft.planner.tell.report import answer_table, comparison_table, scenario_table, why_not_table

if TYPE_CHECKING:
    from weft.cli.planning.findings import Findings


def print_json(found: Findings, top: int, hour_price: float | None) -> None:
    """One JSON object on standard output."""
    table = answer_table(found.answer, top, hour_price)
    if found.why_not is not None:
        table["why_not"] = why_not_table(found.why_not)
    if found.comparison is not None:
        table["compare"] = comparison_table(found.comparison)
    if found.scenarios:
        table["what_if"] = [scenario_table(each) for each in found.scenarios]
    typer.echo(json.dumps(table, indent=2))
