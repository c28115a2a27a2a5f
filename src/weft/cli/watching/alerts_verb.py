"""`weft alerts`: the figures there are, the alerts of a run, and what they would have said of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import say
from weft.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Try alerts on a run's events, and list figures and alerts.")

_RUN = typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.", show_default=False)


@app.command("test")
def replay(
    run: Annotated[Path, _RUN],
    config: Annotated[
        Path | None, typer.Option(help="Take the alerts of this config; by default those of the run.")
    ] = None,
    standard: Annotated[bool, typer.Option("--standard", help="Take the standard set too.")] = False,
) -> None:
    """Replay a run's events, and say which alerts would have fired, when and why."""
    from weft.monitor import read_events
    from weft.monitor.alerts import backtest, rules_of
    from weft.spec.files import load_config
    from weft.train import RunFolder

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
    from weft.monitor.alerts import rules_of
    from weft.spec import RunConfig
    from weft.spec.files import load_config

    settings = RunConfig(alerts="standard") if config is None else load_config(config).config
    for rule in rules_of(settings):
        does = f" -> {', '.join(rule.actions)}" if rule.actions else ""
        print(f"{rule.name:<20} {rule.severity:<9} {rule.when}{does}")


@app.command("figures")
def list_figures() -> None:
    """List the figures that conditions, sinks and events know."""
    from weft.spec.figures import FIGURES, series

    for figure in FIGURES.values():
        name = series(figure.name, figure.label.upper())
        print(f"{name:<28} {figure.unit:<8} {figure.owner:<5} {figure.help}")


def send(run: Annotated[Path, _RUN]) -> None:
    """Send a run's figures to the sinks of its config: what a sink missed while it was away, or all of it."""
    from weft.monitor.sinks import Pump, SinkJob, make_sink
    from weft.train import RunFolder

    folder = RunFolder(run)
    config = folder.config()
    wanted = [one for one in config.sink if one.kind not in ("prometheus", "pushgateway")]
    if not wanted:
        raise ConfigError(f"{run}: its config has no sink that keeps a past. Add a table [[sink]] to its config.toml.")
    values = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    pumps = [
        Pump(one.name or one.kind, make_sink, SinkJob(one, folder.path, config.run.name, values), say) for one in wanted
    ]
    for pump in pumps:
        pump.start()
        pump.finish()
    for pump in pumps:
        pump.join()
    say(f"{run}: all is sent")
