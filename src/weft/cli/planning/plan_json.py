"""`weft plan --json`: everything that was found, for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from weft.planner.tell import nearest_yes, report

if TYPE_CHECKING:
    from weft.cli.planning.findings import Findings


def print_json(found: Findings, top: int, hour_price: float | None) -> None:
    """One JSON object on standard output."""
    table = report.answer_table(found.answer, top, hour_price)
    if found.answer.best is None:
        table["nearest_changes"] = [report.scenario_table(each) for each in nearest_yes(found.answer.question)]
    if found.why_not is not None:
        table["why_not"] = report.why_not_table(found.why_not)
    if found.comparison is not None:
        table["compare"] = report.comparison_table(found.comparison)
    if found.scenarios:
        table["what_if"] = [report.scenario_table(each) for each in found.scenarios]
    typer.echo(json.dumps(table, indent=2))
