"""What `weft plan --tune all` prints: ways to fine-tune by machines, with the best plan of each that fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.units import format_bytes, format_count, format_seconds

#: What `what_fits` gives one of.
Fit = Any

_WIDE = 150


def print_fits(found: Sequence[Fit]) -> None:
    """Print the table of what fits on what."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    first = found[0].question
    assumed = f" (assumed: {' '.join(first.assumed)})" if first.assumed else ""
    params = format_count(first.job.shape.num_params)
    console.print(f"[bold]{first.model.name}[/], {params} parameters: {first.work}{assumed}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("on", "tune"):
        table.add_column(title, no_wrap=True)
    for title in ("trained", "memory", "of", "step", f"{first.unit}/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("best plan", overflow="fold")
    for one in found:
        table.add_row(*_row(one))
    console.print(table)


def _row(one: Fit) -> tuple[str, ...]:
    cluster, plan = str(one.question.cluster), one.smallest
    if plan is None:
        return (cluster, one.tune, _trained(one), "-", "-", "-", "-", "no plan keeps all rules")
    sizes = format_bytes(plan.total_bytes), format_bytes(plan.usable_bytes)
    if one.best is None:
        return (cluster, one.tune, _trained(one), *sizes, "-", "-", f"does not fit; needs least: {plan.plan}")
    return (
        cluster, one.tune, _trained(one), *sizes, format_seconds(plan.step_s), format_count(plan.tokens_per_s),
        str(plan.plan),
    )  # fmt: skip


def _trained(one: Fit) -> str:
    return format_count(_num_trained(one))


def _num_trained(one: Fit) -> float:
    job = one.question.job
    return job.shape.num_params if job.adapter is None else job.shape.layers * job.adapter.params


def print_fits_json(found: Sequence[Fit]) -> None:
    """Print the same as JSON."""
    from weft.planner.tell import report

    tables: list[dict[str, Any]] = [
        {
            "cluster": str(one.question.cluster),
            "tune": one.tune,
            "num_trained": _num_trained(one),
            "fits": one.best is not None,
            "plan": None if one.smallest is None else report.candidate_table(one.smallest),
        }
        for one in found
    ]
    print(json.dumps(tables, indent=1))
