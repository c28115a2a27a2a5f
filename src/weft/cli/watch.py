"""`weft watch`: the dashboard. `weft alerts`: list alerts and metrics, and replay alerts on a run's events."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import print_line
from weft.cli.runs import PriceOption, Run
from weft.errors import ConfigError, LaunchError

app = typer.Typer(no_args_is_help=True, help="Try alerts on a run's events, and list metrics and alerts.")


@app.command("test")
def replay(
    run: Run,
    config: Annotated[
        Path | None, typer.Option(help="Config with the alerts to test; by default the run's config.")
    ] = None,
    standard: Annotated[bool, typer.Option("--standard", help="Take the standard set too.")] = False,
) -> None:
    """Replay a run's events, and list the alerts that would have fired, with time and reason."""
    from weft.config.files import load_config
    from weft.monitor.alerts import backtest, rules_of
    from weft.monitor.events import read_events
    from weft.train.folder import RunFolder

    folder = RunFolder(run)
    settings = folder.config() if config is None else load_config(config).config
    if standard:
        settings = settings.model_copy(update={"alerts": "standard"})
    events = read_events(folder.events)
    if not events:
        raise ConfigError(f"{run}: it has no events yet. Train it first, or give another run folder.")
    if not (rules := rules_of(settings)):
        raise ConfigError(f"{run}: its config has no alerts. Add --standard, or --config with [[alert]] tables.")
    lines = backtest(events, settings)
    for line in lines:
        print(line)
    fired = sum(" fired " in line for line in lines)
    print(f"{len(rules)} alerts over {len(events)} events: {fired} fired")


@app.command("list")
def list_alerts(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="A config; without one, the standard set.")
    ] = None,
) -> None:
    """List the alerts of a config, or the standard set."""
    from weft.config.files import load_config
    from weft.config.run_config import RunConfig
    from weft.monitor.alerts import rules_of

    settings = RunConfig(alerts="standard") if config is None else load_config(config).config
    for rule in rules_of(settings):
        does = f" -> {', '.join(rule.actions)}" if rule.actions else ""
        print(f"{rule.name:<20} {rule.severity:<9} {rule.when}{does}")


@app.command("figures", hidden=True, deprecated=True)  # name before 0.1.0
@app.command("metrics")
def list_metrics() -> None:
    """List all metrics with their units: the names that alert conditions can use, and that sinks and events contain."""
    from weft.config.metrics import METRICS, series

    for metric in METRICS.values():
        name = series(metric.name, metric.label.upper())
        print(f"{name:<28} {metric.unit:<8} {metric.owner:<5} {metric.help}")


# `weft watch`: the dashboard, as a page or in the terminal.


def watch(
    root: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run folder, or the folder of several runs.")
    ] = Path("runs"),
    terminal: Annotated[bool, typer.Option("--terminal", help="Show it in this terminal, without a server.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine it needs a token and TLS.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 selects a free port.")] = 8765,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="A further name by which browsers call this server.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token that visitors need; created if missing.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    price: PriceOption = None,
) -> None:
    """Show runs during and after training, on a page or in the terminal."""
    from weft.monitor.accounting import Price

    cost = None if price is None else Price.parse(price)
    if terminal:
        from weft.monitor.dashboard.top import show_top

        show_top(root, sys.stdout, price=cost)
        return
    from weft.monitor.dashboard.server import Serving, serve

    serve(root, Serving(host, port, tuple(name or ()), token_file, tls_cert, tls_key, cost, _resume), print_line)


def _resume(folder: Path) -> None:
    """Send the resume request to a paused run. Raise LaunchError if no command is waiting."""
    from weft.monitor.alerts import PauseFiles

    pause = PauseFiles(folder)
    if not pause.is_paused:
        raise LaunchError(f"No command waits in {folder} any more. Start it there: weft runs resume {folder}.")
    pause.write_answer([])
