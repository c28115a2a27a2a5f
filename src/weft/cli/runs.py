"""`weft runs`: list, show, compare and control runs, during and after training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weft.cli.checkpoints.ckpt_check import changed_values, flat
from weft.cli.console import print_line, table
from weft.errors import ConfigError, LaunchError, PlanError, nearest_name

if TYPE_CHECKING:
    from weft.monitor.accounting import Price
    from weft.train.folder import RunFolder

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, show, compare and steer runs.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.", show_default=False)]
PriceOption = Annotated[
    str | None, typer.Option("--price", metavar="PRICE", help="Price of one device, such as 2.5usd/h, to show costs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Why = Annotated[str, typer.Option(help="Reason for the run's events.")]
Since = Annotated[int | None, typer.Option(help="First bad step; by default the last step.", show_default=False)]


@app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A folder of runs.")] = Path("runs"),
    price: PriceOption = None,
    as_json: Json = False,
) -> None:
    """List the runs of a folder: state, step, loss, speed, and time by cause."""
    from weft.monitor.dashboard.top import print_runs

    print_runs(root, sys.stdout, _price(price), as_json=as_json)


@app.command()
def show(run: Run, price: PriceOption = None, as_json: Json = False) -> None:
    """Show a run's state, figures, events, time by cause, and cost."""
    from weft.monitor.dashboard.top import print_runs, show_top

    if not (run / "events.jsonl").is_file():
        raise ConfigError(
            f"{str(run)!r}: there is no run in it (no events.jsonl). Give a run folder, such as runs/quickstart; "
            "weft runs list FOLDER lists the runs of a folder."
        )
    if as_json:
        print_runs(run, sys.stdout, _price(price), as_json=True)
    else:
        show_top(run, sys.stdout, once=True, price=_price(price))


def _price(text: str | None) -> Price | None:
    from weft.monitor.accounting import Price

    return None if text is None else Price.parse(text)


@app.command()
def explain(
    run: Run,
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


# `weft runs compare`: two runs, or a run's first start and the next command.

#: Prefixes of settings that affect only how a run starts and its location, not its results.
_PLACES = ("config.run.dir", "config.run.name", "config.launch.")
_MOST_LINES = 40


@app.command()
def compare(
    run: Run,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN ...] | [CONFIG.toml] [key=value ...]",
            help="Other runs; or the next command's config file and settings, by default the config of the last start.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the loss curves of the runs.")] = None,
    at: Annotated[Literal["tokens", "steps", "time"], typer.Option(help="Horizontal axis of --plot.")] = "tokens",
    as_json: Json = False,
) -> None:
    """Compare the settings, plan, data, versions and machine of several runs.

    Given one run, compare its first start with the next start. Several runs are also compared by loss, evaluation,
    speed and time. Exit code 0: no setting differs; 1: some differ; 2: a folder has no started run.
    """
    others = [Path(word) for word in words or [] if "=" not in word and Path(word).is_dir()]
    if others and len(others) < len(words or []):
        raise ConfigError(
            f"{' '.join(words or [])}: other runs and settings cannot be mixed. Give other runs, or the settings of "
            "the next command."
        )
    if plot is not None:
        from weft.experiments.pictures import plot_runs
        from weft.experiments.run_log import RunLog

        for one in (run, *others):
            first_start(one)  # raises an error if it is no run
        print_line(str(plot_runs([RunLog.read(one) for one in (run, *others)], plot, at)))
    if others:
        found = _compared_runs([run, *others])
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        else:
            figures = [(name, *(_cell(value) for value in values)) for name, values in found["figures"].items()]
            print("\n".join([*table([("", *found["runs"]), *figures]), ""]))
            settings = ((key, *values) for key, values in found["settings"].items())
            _print_rows([("setting", *found["runs"]), *settings], "all settings are equal")
        raise typer.Exit(int(bool(found["settings"])))
    started = first_start(run)
    now = {**_next_start(run, words or []), "world_size": started.get("world_size")}
    now = {key: value for key, value in now.items() if key in started}
    changes = list(changed_values(_comparable(started), _comparable(now)))
    if as_json:
        typer.echo(json.dumps([{"key": key, "started": old, "now": new} for key, old, new in changes], indent=1))
    else:
        _print_changes(run, started, changes)
    raise typer.Exit(int(bool(changes)))


def first_start(run: Path) -> dict[str, Any]:
    """Return the "start" event of the run's first start. Raise ConfigError without one.

    If an older version of Weft began the run, this is the first start whose event has the config.
    """
    from weft.monitor.events import read_events

    if not run.is_dir():
        near = nearest_name(run.name, [path.name for path in run.parent.iterdir()] if run.parent.is_dir() else [])
        hint = f" Did you mean '{run.parent / near}'?" if near else " Give a run's folder, such as runs/quickstart."
        raise ConfigError(f"RUN={run}: there is no such folder.{hint}")
    starts = [event for event in read_events(run / "events.jsonl") if event.get("event") == "start"]
    if not starts:
        raise ConfigError(
            f"RUN={run}: no run has started in this folder. Give a run's folder, such as runs/quickstart."
        )
    # A run of an older version has this data only since its first start with this version.
    return next((event for event in starts if "config" in event), starts[0])


def _next_start(run: Path, words: list[str]) -> dict[str, Any]:
    from weft.cli.console import split_words
    from weft.config.files import load_config
    from weft.train.folder import RunFolder
    from weft.train.rank_run import context

    path, overrides = split_words(words)
    config = load_config(path or run / "config.toml", overrides).config
    return {**context(RunFolder(run), config), "plan": config.plan}


def _comparable(event: Mapping[str, Any]) -> dict[str, Any]:
    from weft.config.plan import Plan

    kept = {key: event[key] for key in ("weft", "torch", "python", "machine", "data", "config") if key in event}
    text, world_size = str(event.get("plan", "")), event.get("world_size")
    try:
        kept["plan"] = Plan.parse(text, world_size).format() if world_size else text
    except PlanError:
        kept["plan"] = text
    if isinstance(kept.get("config"), Mapping):
        kept["config"] = {key: value for key, value in kept["config"].items() if key != "plan"}
    return {key: value for key, value in flat(kept).items() if not key.startswith(_PLACES)}


def _print_changes(run: Path, started: Mapping[str, Any], changes: list[tuple[str, str, str]]) -> None:
    from datetime import datetime

    when = datetime.fromtimestamp(float(started.get("time", 0))).isoformat(sep=" ", timespec="seconds")
    old = "by a version of Weft that did not record config and machine; comparing versions and plan only:"
    began = f"at step {started.get('step', 0)}"
    print(f"{run}: started {when} {began if 'config' in started else old}")
    _print_rows([("", "started", "now"), *changes], "nothing changed since")


def _print_rows(rows: list[tuple[str, ...]], if_none: str) -> None:
    if len(rows) == 1:
        print(if_none)
        return
    more = len(rows) - 1 - _MOST_LINES
    for line in table(rows[: _MOST_LINES + 1]):
        print(line)
    if more > 0:
        print(f"... and {more} more; --json lists them")


def _compared_runs(runs: list[Path]) -> dict[str, Any]:
    from weft.monitor.dashboard.top import comparison

    tables = [_comparable(first_start(run)) for run in runs]
    settings: dict[str, list[str]] = {}
    for at, other in enumerate(tables[1:], start=1):
        for key, first, value in changed_values(tables[0], other):
            settings.setdefault(key, [first] * len(runs))[at] = value
    return {"runs": [str(run) for run in runs], "figures": comparison(runs), "settings": settings}


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


# Requests to a training run, and resuming a paused run.


@app.command()
def pause(run: Run, why: Why = "") -> None:
    """Save, release the devices, and wait for `weft runs resume`."""
    _request(run, "hold", "Pause requested; the run pauses after its next step", why)


@app.command()
def save(run: Run, why: Why = "") -> None:
    """Save a checkpoint now."""
    _request(run, "checkpoint", "Checkpoint requested; the run saves after its next step", why)


@app.command()
def stop(run: Run, why: Why = "") -> None:
    """Save, and end the run's command."""
    _request(run, "stop", "Stop requested; the run saves and stops after its next step", why)


@app.command()
def rollback(
    run: Run,
    since: Since = None,
    skip_data: Annotated[bool, typer.Option("--skip-data", help="Leave out the data of the steps since.")] = False,
    why: Why = "",
) -> None:
    """Return to the checkpoint before a bad step, and train on with the same or the following data."""
    action = "skip_data" if skip_data else "roll_back"
    _request(run, action, "Rollback requested; the run returns after its next step", why, since=since)


@app.command("lower-lr")
def lower_lr(
    run: Run, factor: Annotated[float, typer.Option(help="Multiply the learning rate by this.")] = 0.5, why: Why = ""
) -> None:
    """Lower the learning rate from the next step on, and after resumes too."""
    if not 0 < factor <= 1:
        raise ConfigError(f"--factor={factor:g}: it must be above 0 and at most 1. Use e.g. --factor=0.5.")
    _request(run, "lower_lr", f"Learning rate x {factor:g} requested from the next step on", why, factor=factor)


def _request(run: Path, action: str, done: str, why: str, *, factor: float = 0.5, since: int | None = None) -> None:
    """Send a request to a training run. All its ranks execute it after the same step.

    If replicas have separate worlds, each gets the request and executes it after one of its steps.
    """
    from weft.monitor.alerts import RunRequest, ask

    if since is not None and since < 1:
        raise ConfigError(f"--since={since}: steps are counted from 1. Use e.g. --since=1.")
    training = [one for one in known_run(run).with_replicas() if is_training(one)]
    if not training:
        raise ConfigError(f"{run}: no command trains in this folder. Start it: weft runs resume {run}.")
    for one in training:
        ask(one.path, RunRequest(action, why, "a person", since, factor))
        print_line(f"{one.path}: {done}.")


@app.command()
def resume(
    run: Run,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings to change, such as optimizer.lr=1e-4."),
    ] = None,
) -> None:
    """Continue a paused run. If no command is waiting, train here from the newest checkpoint."""
    from weft.monitor.alerts import PauseFiles, with_settings

    folder, words = known_run(run), settings or []
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: this is no setting. Write key=value, such as optimizer.lr=1e-4.")
    config = with_settings(folder.config(), words)
    training = [one for one in folder.with_replicas() if is_training(one)]
    paused = [one for one in training if PauseFiles(one.path).is_paused]
    if training and not paused:
        raise ConfigError(f"{run}: this run is not paused, it trains. Run `weft runs pause {run}` to pause it.")
    for one in paused:
        PauseFiles(one.path).write_answer(words)
        print_line(f"{one.path}: resumes{' with ' + ' '.join(words) if words else ''}")
    if not training:
        from weft.cli.launch.spec import LaunchSpec
        from weft.cli.train import execute

        PauseFiles(folder.path).end()
        execute(LaunchSpec.of(config))


@app.command()
def send(run: Run) -> None:
    """Send a run's metrics to the sinks of its config: those that a sink missed, or all."""
    from weft.monitor.sinks.base import SinkJob
    from weft.monitor.sinks.pump import Pump
    from weft.monitor.sinks.registry import make_sink

    folder = known_run(run)
    config = folder.config()
    wanted = [one for one in config.sink if one.kind not in ("prometheus", "pushgateway")]
    if not wanted:
        raise ConfigError(f"{run}: its config has no sink that keeps a past. Add a table [[sink]] to its config.toml.")
    jobs = [SinkJob.of(sink, folder.path, config) for sink in wanted]
    pumps = [Pump(job.settings.name or job.settings.kind, make_sink, job, print_line) for job in jobs]
    for pump in pumps:
        pump.start()
        pump.finish()
    for pump in pumps:
        pump.join()
    print_line(f"{run}: all is sent")


def is_training(folder: RunFolder) -> bool:
    """Return True if a command has locked a folder, because it trains or is paused."""
    from weft.train.folder import run_lock

    try:
        with run_lock(folder.path):
            return False
    except LaunchError:
        return True


def known_run(run: Path) -> RunFolder:
    """Return a run's folder with its config. Raise ConfigError if it is not a run."""
    from weft.train.folder import RunFolder

    folder = RunFolder(run)
    folder.config()
    return folder
