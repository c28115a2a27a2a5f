"""The dashboard in a terminal: one run, the runs of a folder, and metrics of compared runs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from weft.monitor.accounting import CAUSES, PRODUCTIVE, Price
from weft.monitor.dashboard.run_index import RunCatalog, RunIndex
from weft.monitor.energy_ledger import format_energy
from weft.monitor.terminal import sparkline
from weft.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = {
    PRODUCTIVE: "green", "start": "bright_blue", "compile": "magenta", "data": "yellow", "evaluation": "blue",
    "tracing": "bright_magenta", "checkpoint": "cyan", "lost work": "red", "held": "white", "restart": "bright_red",
    "other": "bright_black",
}  # fmt: skip
_STATES = {"running": "green", "starting": "green", "finished": "blue", "failed": "red"}
_EVERY_S = 1.0


def show_top(root: Path, terminal: TextIO, once: bool = False, price: Price | None = None) -> None:
    """Show a run, or all runs of a folder, until Ctrl-C. If the output is not a terminal, show them once.

    Args:
        root: a run folder, or a folder of run folders.
        terminal: the output.
        once: whether to show the runs once and return.
        price: price of one device.

    Raises:
        ConfigError: if there is no run.
    """
    from rich.console import Console
    from rich.live import Live

    shelf = RunCatalog(root)
    shelf.read_all()
    console = Console(file=terminal)
    if once or not terminal.isatty():
        console.print(_screen(shelf, price, None))
        return
    with Live(_screen(shelf, price, console.height), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(_EVERY_S)
            shelf.scan()
            shelf.read_all()
            live.update(_screen(shelf, price, console.height), refresh=True)


def print_runs(root: Path, out: TextIO, price: Price | None = None, as_json: bool = False) -> None:
    """Print the runs of a folder as a table, and how their time was spent.

    Args:
        root: a run folder, or a folder of run folders.
        out: the output.
        price: price of one device.
        as_json: whether to print one JSON value with the state, metrics and time of each run.

    Raises:
        ConfigError: if there is no run.
    """
    from rich.console import Console

    catalog = RunCatalog(root)
    catalog.read_all()
    accounts = {name: _account(run, price) for name, run in sorted(catalog.runs.items())}
    total = _added(list(accounts.values()))
    if as_json:
        runs = {name: _metrics(catalog.runs[name]) | account for name, account in accounts.items()}
        print(json.dumps({"runs": runs, "total": total}, indent=1), file=out)
        return
    # Without a terminal, rich would cut the table at 80 columns.
    console = Console(file=out) if out.isatty() else Console(file=out, width=160)
    console.print(_table(list(catalog.runs.values())))
    print("", *_words("all runs" if len(accounts) > 1 else next(iter(accounts)), total), sep="\n", file=out)


def comparison(folders: Sequence[Path]) -> dict[str, list[Any]]:
    """Return metrics by name. Each is a list of the runs' values, in the order of the folders.

    Losses are also compared at the last step that all runs have done. Of a folder with several runs, the newest counts.

    Raises:
        ConfigError: if a folder has no run.
    """
    catalogs = [RunCatalog(folder) for folder in folders]
    for catalog in catalogs:
        catalog.read_all()
    runs = [next(iter(catalog.runs.values())) for catalog in catalogs]
    rows = [_metrics(run) for run in runs]
    found = {name: [row[name] for row in rows] for name in rows[0]}
    common = set(runs[0].steps.steps.tolist()).intersection(*(run.steps.steps.tolist() for run in runs[1:]))
    if common:
        step = max(common)
        at_step = [run.steps.values("loss")[run.steps.steps == step] for run in runs]
        found[f"loss at step {step}"] = [float(loss[-1]) for loss in at_step]
    return found


def _metrics(run: RunIndex) -> dict[str, Any]:
    evals = run.evals.values("loss")
    finite = evals[evals == evals]
    return {
        "state": run.state()[0],
        "plan": str(run.start.get("plan", "")),
        "step": run.step,
        "loss": run.steps.last("loss"),
        "eval loss": run.evals.last("loss"),
        "best eval loss": float(finite.min()) if len(finite) else None,
        f"{run.rate_unit}/s": run.steps.last("rate"),
        "step_s": run.step_s(),
        "memory_bytes": run.steps.last("memory_bytes"),
        "wall_s": round(run.ledger.wall_s, 3),
        "goodput": round(run.ledger.share, 4),
        "kwh": run.ledger.energy_summary().kwh,
    }


def _account(run: RunIndex, price: Price | None) -> dict[str, Any]:
    ledger = run.ledger
    found: dict[str, Any] = {
        "seconds": {cause: round(seconds, 3) for cause, seconds in ledger.seconds().items()},
        "wall_s": round(ledger.wall_s, 3),
        "device_s": round(ledger.device_s, 3),
        "failures": ledger.failures,
        "starts": ledger.starts,
        "energy": ledger.energy_summary().as_json(),
    }
    if price is not None:
        found["cost"], found["currency"] = round(price.of(ledger.device_s), 4), price.currency
    return found


def _added(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    first = accounts[0]
    found: dict[str, Any] = {
        "seconds": {cause: round(sum(one["seconds"][cause] for one in accounts), 3) for cause in first["seconds"]}
    }
    for key in ("wall_s", "device_s", "failures", "starts", *(["cost"] if "cost" in first else [])):
        found[key] = round(sum(one[key] for one in accounts), 4)
    if "currency" in first:
        found["currency"] = first["currency"]
    known = [one["energy"]["kwh"] for one in accounts if one["energy"]["kwh"] is not None]
    found["kwh"] = round(sum(known), 9) if known else None
    return found


def _words(name: str, account: dict[str, Any]) -> list[str]:
    wall, seconds = account["wall_s"], account["seconds"]
    share = f"{seconds[PRODUCTIVE] / wall:.1%}" if wall else "nothing"
    failures = (
        f", {account['failures']} failure{'' if account['failures'] == 1 else 's'}" if account["failures"] else ""
    )
    cost = f", {account['cost']:,.2f} {account['currency']}" if "cost" in account else ""
    energy = "" if account["kwh"] is None else f", {format_energy(account['kwh'])}"
    lines = [f"{name}: {share} of {format_seconds(wall)} made steps that count{failures}{cost}{energy}"]
    for cause in (PRODUCTIVE, *CAUSES):
        took = seconds[cause]
        if took > 0 and wall:
            money = f"  {account['cost'] * took / wall:>12,.2f} {account['currency']}" if "cost" in account else ""
            lines.append(f"  {cause:<12}{format_seconds(took):>12}{took / wall:>8.1%}{money}")
    return lines


def _screen(shelf: RunCatalog, price: Price | None, height: int | None) -> RenderableType:
    runs = list(shelf.runs.values())
    if len(runs) == 1:
        return _one(runs[0], price)
    return _table(runs[: (height or 10_000) - 2])


def _table(runs: Sequence[RunIndex]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for title, kind in (
        ("run", "left"), ("state", "left"), ("step", "right"), ("loss", "right"), ("eval", "right"), ("rate", "right"),
        ("goodput", "right"), ("loss curve", "left"),
    ):  # fmt: skip
        table.add_column(title, justify="right" if kind == "right" else "left", no_wrap=True)
    for run in runs:
        state = run.state()[0]
        wanted = f" of {run.num_steps}" if run.num_steps else ""
        table.add_row(
            run.name,
            f"[{_STATES.get(state, 'yellow')}]{state}[/]",
            f"{run.step}{wanted}",
            _number(run.steps.last("loss")),
            _number(run.evals.last("loss")),
            _number(run.steps.last("rate")),
            f"{run.ledger.share:.0%}",
            sparkline(run.steps.values("loss").tolist(), 24),
        )
    return table


def _one(run: RunIndex, price: Price | None) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    state, reason = run.state()
    head = Text.assemble(
        (run.name, "bold"), "  ", (state, _STATES.get(state, "yellow")), "  ", (str(run.start.get("plan", "")), "dim"),
        f"  {reason}" if reason else "",
    )  # fmt: skip
    step_s, wanted = run.step_s(), run.num_steps
    left = ""
    if wanted and step_s and wanted > run.step:
        left = f", about {format_seconds((wanted - run.step) * step_s)} left"
    planned, rate = run.planned.get("figures", {}).get("tokens_per_s"), run.steps.last("rate")
    against = f" ({rate / planned - 1:+.0%} against the plan)" if planned and rate else ""
    facts = [
        f"step {run.step}{f' of {wanted}' if wanted else ''}{left if state == 'running' else ''}",
        f"loss {_number(run.steps.last('loss'))}   eval {_number(run.evals.last('loss'))}   "
        f"lr {_number(run.steps.last('lr'))}   gradient norm {_number(run.steps.last('grad_norm'))}   "
        f"update {_number(run.steps.last('update_ratio'))}",
        f"{_number(rate)} {run.rate_unit}/s{against}   step "
        f"{format_seconds(step_s) if step_s else '-'}   "
        f"memory {format_bytes(int(run.steps.last('memory_bytes') or 0))}",
    ]
    body: list[RenderableType] = [head, *facts, Text(sparkline(run.steps.values("loss").tolist(), 70), style="blue")]
    body += [Panel(_ledger_text(run, price), title="goodput", title_align="left", border_style="dim")]
    if ranks := _ranks_text(run):
        body.append(Panel(ranks, title="ranks, newest reports", title_align="left", border_style="dim"))
    told = [mark for mark in run.marks if mark["level"] != "quiet"][-6:]
    if told:
        clock = (time.strftime("%H:%M:%S", time.localtime(mark["time"])) for mark in told)
        lines = (f"{when}  {mark['kind']}: {mark['text']}" for when, mark in zip(clock, told, strict=True))
        events = Text("\n".join(lines), overflow="ellipsis", no_wrap=True)
        body.append(Panel(events, title="events", title_align="left", border_style="dim"))
    return Group(*body)


def _ledger_text(run: RunIndex, price: Price | None) -> Any:
    from rich.text import Text

    seconds, wall = run.ledger.seconds(), run.ledger.wall_s
    if wall <= 0:
        return Text("no step yet")
    cost = f", {price.text(run.ledger.device_s)}" if price is not None else ""
    text = Text(f"{run.ledger.share:.1%} of {format_seconds(wall)}{cost}\n")
    for cause, took in seconds.items():
        text.append("█" * round(60 * took / wall), style=_COLOURS[cause])
    energy = run.ledger.energy_summary()
    for cause, took in seconds.items():
        if took >= wall / 1000:
            text.append("\n■ ", style=_COLOURS[cause])
            text.append(f"{cause:<12}{format_seconds(took):>10}{took / wall:>8.1%}")
            if energy.kwh is not None:
                used = energy.shares.get(cause)
                text.append(f"{'unmeasured' if used is None else format_energy(energy.kwh * used):>13}")
    for line in energy.lines(run.rate_unit, with_causes=False) if run.ledger.energy.devices else ():
        text.append(f"\n{line}")
    return text


def _ranks_text(run: RunIndex) -> Any:
    from rich.text import Text

    steps, picture = run.heat.picture()
    if not steps or len(picture) < 2:
        return None
    slowest = run.heat.slowest()
    text = Text()
    for value in picture[:, -1].tolist()[:600]:
        level = min(8, max(1, round((value - 70) / 60 * 8)))
        text.append(_BLOCKS[level] if value else "x", style="red" if value > 115 or not value else "green")
    if slowest and slowest[1] > 1.05:
        text.append(f"\nslowest: rank {slowest[0]}, {slowest[1]:.2f} x the median")
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
