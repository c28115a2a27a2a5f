"""`weft resume` and `weft ask`: a held run goes on; a run that trains is asked for something."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import say
from weft.errors import ConfigError, LaunchError, did_you_mean

if TYPE_CHECKING:
    from weft.train import RunFolder

_RUN = typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.", show_default=False)


def resume(
    run: Annotated[Path, _RUN],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings to change, such as optimizer.lr=1e-4."),
    ] = None,
) -> None:
    """Let a held run go on. Where no command waits for this word any more, train here from the newest checkpoint."""
    from weft.monitor.alerts import HoldPlace, with_settings

    folder, words = _folder(run), settings or []
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: this is no setting. Write key=value, such as optimizer.lr=1e-4.")
    config = with_settings(folder.config(), words)
    training = [one for one in folder.with_replicas() if _trains(one)]
    held = [one for one in training if HoldPlace(one.path).is_held]
    if training and not held:
        raise ConfigError(f"{run}: this run is not held, it trains. Run `weft ask {run} hold` to hold it.")
    for one in held:
        HoldPlace(one.path).say(words)
        say(f"{one.path}: goes on{' with ' + ' '.join(words) if words else ''}")
    if not training:
        from weft.cli.train import train_here

        HoldPlace(folder.path).end()
        train_here(config)


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
    """Ask a run that trains for something; all its ranks do it after the same step.

    Replicas that are worlds of their own are each asked, and each does it after a step of its own.
    """
    from weft.monitor.alerts import RUN_ACTIONS, Wish, ask

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
        ask(one.path, Wish(action, why, "a person", since, factor))
        say(f"{one.path}: asked to {action}; the run hears of it after its next step")


def _trains(folder: RunFolder) -> bool:
    """Whether a command trains in a folder now, or holds it."""
    from weft.train.run import run_lock

    try:
        with run_lock(folder.path):
            return False
    except LaunchError:
        return True


def _folder(run: Path) -> RunFolder:
    """The run's folder, with its config read. Raises ConfigError where it is none."""
    from weft.train import RunFolder

    folder = RunFolder(run)
    folder.config()
    return folder
