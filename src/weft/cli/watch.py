"""`weft alerts` and other commands about runs: monitored series, alerts, and their replay on a finished run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import say
from weft.errors import ConfigError, LaunchError, did_you_mean

if TYPE_CHECKING:
    from weft.train.folder import RunFolder

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


@app.command("figures")
def list_figures() -> None:
    """List the series that conditions, sinks and events support."""
    from weft.config.metrics import FIGURES, series

    for figure in FIGURES.values():
        name = series(figure.name, figure.label.upper())
        print(f"{name:<28} {figure.unit:<8} {figure.owner:<5} {figure.help}")


def send(run: Annotated[Path, _RUN]) -> None:
    """Send a run's metrics to the sinks of its config: those that a sink missed, or all."""
    from weft.monitor.sinks.base import SinkJob
    from weft.monitor.sinks.pump import Pump
    from weft.monitor.sinks.registry import make_sink
    from weft.train.folder import RunFolder

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


# `weft explain`: the cause of a bad step, and its samples.


def explain(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(help="A step that went wrong, from 1; by default the last one.", show_default=False)
    ] = None,
    num: Annotated[int, typer.Option(min=0, help="Samples to show.")] = 3,
) -> None:
    """Locate a bad step by module, rank and samples, and show the samples in the model's format."""
    from weft.train.folder import RunFolder
    from weft.train.loop.reporting import explained_lines

    for line in explained_lines(RunFolder(run), step, num):
        print(line)


# `weft resume` and `weft ask`: continue a paused run, and send a request to a training run.


def resume(
    run: Annotated[Path, _RUN],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings to change, such as optimizer.lr=1e-4."),
    ] = None,
) -> None:
    """Continue a paused run. If no command is waiting, train here from the newest checkpoint."""
    from weft.monitor.alerts import PauseFiles, with_settings

    folder, words = _folder(run), settings or []
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: this is no setting. Write key=value, such as optimizer.lr=1e-4.")
    config = with_settings(folder.config(), words)
    training = [one for one in folder.with_replicas() if _trains(one)]
    held = [one for one in training if PauseFiles(one.path).is_held]
    if training and not held:
        raise ConfigError(f"{run}: this run is not held, it trains. Run `weft ask {run} hold` to hold it.")
    for one in held:
        PauseFiles(one.path).say(words)
        say(f"{one.path}: goes on{' with ' + ' '.join(words) if words else ''}")
    if not training:
        from weft.cli.train import train_locally

        PauseFiles(folder.path).end()
        train_locally(config)


def ask_run(
    run: Annotated[Path, _RUN],
    action: Annotated[
        str,
        typer.Argument(help="checkpoint, hold, stop, lower_lr, skip_data or roll_back.", show_default=False),
    ],
    why: Annotated[str, typer.Option(help="What is written into the run's events.")] = "",
    factor: Annotated[float, typer.Option(help="lower_lr: multiply the learning rate by this.")] = 0.5,
    since: Annotated[
        int | None, typer.Option(help="skip_data, roll_back: first step of the trouble; by default the last one.")
    ] = None,
) -> None:
    """Send a request to a training run. All its ranks handle it after the same step.

    Replicas with separate worlds each get the request, and each handles it after a step of its run.
    """
    from weft.monitor.alerts import RUN_ACTIONS, RunRequest, ask

    folder = _folder(run)
    if action not in RUN_ACTIONS or action == "tell":
        known = [one for one in RUN_ACTIONS if one != "tell"]
        raise ConfigError(
            f"action={action}: a run cannot do this.{did_you_mean(action, known)} Use one of {', '.join(known)}."
        )
    if not 0 < factor <= 1:
        raise ConfigError(f"--factor={factor:g}: it must be above 0 and at most 1. Use e.g. --factor=0.5.")
    if since is not None and since < 1:
        raise ConfigError(f"--since={since}: steps are counted from 1. Use e.g. --since=1.")
    training = [one for one in folder.with_replicas() if _trains(one)]
    if not training:
        raise ConfigError(f"{run}: no command trains in this folder. Start it: weft resume {run}.")
    for one in training:
        ask(one.path, RunRequest(action, why, "a person", since, factor))
        say(f"{one.path}: asked to {action}; the run hears of it after its next step")


def _trains(folder: RunFolder) -> bool:
    """Return True if a command trains in a folder now, or holds it."""
    from weft.train.folder import run_lock

    try:
        with run_lock(folder.path):
            return False
    except LaunchError:
        return True


def _folder(run: Path) -> RunFolder:
    """Return the run's folder, with its config read. Raise ConfigError if it is not a run."""
    from weft.train.folder import RunFolder

    folder = RunFolder(run)
    folder.config()
    return folder


# `weft watch`, `weft top` and `weft goodput`: views of runs.

_ROOT = Annotated[Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run folder, or the folder of several runs.")]
_PRICE = Annotated[
    str | None,
    typer.Option("--price", metavar="PRICE", help="What one device costs, such as 2.5usd/h; costs are shown then."),
]


def watch(
    root: _ROOT = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine it needs a token and TLS.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="A further name by which browsers call this server.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with what visitors must know; made where missing.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    price: _PRICE = None,
) -> None:
    """Serve a page that shows runs during and after training."""
    from weft.monitor.accounting import Price
    from weft.monitor.dashboard.server import Serving, serve

    cost = None if price is None else Price.parse(price)
    serving = Serving(host, port, tuple(name or ()), token_file, tls_cert, tls_key, cost, _go_on)
    serve(root, serving, say)


def top(
    root: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or the folder of several runs.")] = Path(
        "runs"
    ),
    once: Annotated[bool, typer.Option("--once", help="Show it once, as text, and end.")] = False,
    price: _PRICE = None,
) -> None:
    """Show a run in the terminal, like `weft watch` on a page."""
    from weft.monitor.accounting import Price
    from weft.monitor.dashboard.top import show_top

    show_top(root, sys.stdout, once=once, price=None if price is None else Price.parse(price))


def goodput(
    root: _ROOT = Path("runs"),
    price: _PRICE = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show how runs spent their time, over all their starts, and the cost."""
    from weft.monitor.accounting import Price
    from weft.monitor.dashboard.top import ledger_lines

    for line in ledger_lines(root, None if price is None else Price.parse(price), as_json=as_json):
        print(line)


def _go_on(folder: Path) -> None:
    """Send the resume request to a paused run. Raise LaunchError if no command is waiting."""
    from weft.errors import LaunchError
    from weft.monitor.alerts import PauseFiles

    place = PauseFiles(folder)
    if not place.is_held:
        raise LaunchError(f"No command waits in {folder} any more. Start it there: weft resume {folder}.")
    place.say([])
