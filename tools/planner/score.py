"""Compare the planner's predictions with published measurements, also on held-out runs.

python tools/planner/score.py RUNS.csv [MORE.csv ...] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder, whose modules have common names

from tools.planner.metrics import experience_text
from tools.planner.scores import ScoreReport, score
from weft.cli.app import show_error
from weft.errors import WeftError
from weft.planner.cost.machine import TIERS

#: Maximum number of skipped rows to show; --json has all.
_SHOWN = 10


def score_runs(paths: Sequence[Path | str], as_json: bool = False, experience: Path | None = None) -> None:
    """Print the prediction errors on runs of CSV files.

    Also write the error statistics to the file `experience`, if given.

    Raises:
        ConfigError: if a file cannot be used.
    """
    report = score(*paths)
    if experience is not None:
        experience.write_text(experience_text(report.experience()), encoding="utf-8")
    if as_json:
        print(json.dumps(report.to_json(), allow_nan=False))
    else:
        _show(report)


def _show(report: ScoreReport) -> None:
    summary = report.summary()
    console = Console(highlight=False)
    console.print(f"{summary['num_runs']} runs, {summary['num_skipped']} skipped")
    if summary["tables"]["time"]["count"]:
        console.print(_time_table(summary))
        console.print(_foresight_table(summary["foresight"]))
        _show_coverage(console, summary["coverage"])
        _show_order(console, summary)
        factors = ", ".join(f"{name} {value:.2f}" for name, value in report.refitted.factors.items())
        console.print(f"factors fitted to all: {factors}")
    if summary["tables"]["memory"]:
        console.print(_memory_table(summary["tables"]["memory"]))
    verdicts = summary["tables"]["verdicts"]
    if verdicts["count"]:
        shares = ", ".join(f"{name} {_percent(verdicts[name])}" for name in ("accuracy", "precision", "recall"))
        console.print(f"out of memory: {verdicts['count']} runs, {shares}")
    if verdicts["sure"]:
        console.print(
            f"said to fit with 99 %: {verdicts['sure']} runs, of which {verdicts['surely_wrong']} fell short; "
            f"of {verdicts['ran']} others that ran, {verdicts['ran_was_to_fit']} were to fit"
        )
    for name, found in summary["finetune"].items():
        if "macro" in found:
            console.print(f"fine-tuning, {name}: {found['count']} runs, mean of sources {_percent(found['macro'])}")
        elif found["count"]:
            console.print(f"fine-tuning, out of memory: {found['count']} runs, accuracy {_percent(found['accuracy'])}")
    unread = sum(len(each.run.unread) for each in report.of_tier(TIERS[-1]))
    console.print(f"{unread} remarks decide nothing, because the vocabulary lacks them: see not_understood in --json")
    for each in report.skipped[:_SHOWN]:
        console.print(f"skipped {each.id}: {each.reason}", style="dim")
    if len(report.skipped) > _SHOWN:
        console.print(f"and {len(report.skipped) - _SHOWN} more: see --json", style="dim")


def _time_table(summary: Mapping[str, Any]) -> Any:
    table = Table(box=None, pad_edge=False, header_style="bold", title="step time: mean error (bias)")
    table.add_column("source")
    table.add_column("runs", justify="right")
    for tier in TIERS:
        table.add_column(tier, justify="right")
    for source, errors in summary["tables"]["sources"].items():
        cells = [_error(summary[tier]["sources"][source]) for tier in TIERS]
        table.add_row(source, str(errors["count"]), *cells)
    table.add_section()
    every = [summary[tier]["time"] for tier in TIERS]
    table.add_row("all", str(every[0]["count"]), *(_error(each) for each in every))
    for name in ("macro", "median", "p90", "max", "within_10", "within_15", "within_20"):
        table.add_row(name.replace("_", " "), "", *(_percent(each[name]) for each in every))
    return table


#: Columns of the table of unseen runs, by their names in the report.
_SEEN = {
    "publisher_out": "without its publisher",
    "refitted": "refitted to all",
    "shipped": "as shipped",
    "constant_rate": "constant share of peak",
}


def _foresight_table(foresight: Mapping[str, Any]) -> Any:
    title = "step time: mean over sources of the mean error, by what the fitted factors include"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title)
    for name in ("runs of kind", "sources", "runs", *_SEEN.values()):
        table.add_column(name, justify="left" if name == "runs of kind" else "right")
    for family, found in foresight.items():
        if found["shipped"]["count"]:
            cells = [_percent(found[name]["macro"]) if name in found else "" for name in _SEEN]
            table.add_row(family, str(found["shipped"]["sources"]), str(found["shipped"]["count"]), *cells)
    return table


def _show_coverage(console: Any, coverage: Mapping[str, Mapping[str, float]]) -> None:
    levels = {name: held for name, held in coverage.items() if name[0].isdigit()}
    for level, held in levels.items():
        console.print(
            f"bands for {_percent(float(level))} of cases hold {_percent(held['runs'])} of runs whose publisher took "
            f"no part ({_percent(held['sources'])} as a mean over sources)"
        )
    kinds = ", ".join(f"{name} {_percent(held['sources'])}" for name, held in coverage.items() if name not in levels)
    if kinds:
        console.print(f"bands for 80 % of cases by kind, as means over sources: {kinds}")


def _show_order(console: Any, summary: Mapping[str, Any]) -> None:
    figures = summary["tables"]
    if figures["kendall_tau"] is not None:
        console.print(f"order within tables: Kendall tau {figures['kendall_tau']:.2f}")
    regret = figures["regret"]
    if regret["sweeps"]:
        console.print(
            f"regret of the pick: mean {_percent(regret['mean'])}, at most {_percent(regret['max'])}, "
            f"within 3 % in {_percent(regret['within_3'])} of {regret['sweeps']} sweeps"
        )


def _memory_table(memory: Mapping[str, Any]) -> Any:
    table = Table(box=None, pad_edge=False, header_style="bold", title="memory, by what was counted")
    for name in ("counter", "runs", "mean error (bias)", "median", "p90", "max"):
        table.add_column(name, justify="left" if name == "counter" else "right")
    for counter, errors in memory.items():
        cells = [_percent(errors[name]) for name in ("median", "p90", "max")]
        table.add_row(counter, str(errors["count"]), _error(errors), *cells)
    return table


def _error(errors: Mapping[str, Any]) -> str:
    return f"{100 * errors['mean']:.1f} % ({100 * errors['bias']:+.1f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="RUNS.csv", help="tables of measured runs")
    parser.add_argument("--json", action="store_true", help="print every prediction as JSON")
    parser.add_argument(
        "--experience",
        type=Path,
        metavar="FILE.toml",
        help="write the errors on unseen runs, from which bands are made",
    )
    settings = parser.parse_args(words)
    try:
        score_runs(settings.files, settings.json, settings.experience)
    except WeftError as error:
        show_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
