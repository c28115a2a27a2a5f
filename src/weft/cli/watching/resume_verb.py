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
    from weft.train.run import run_lock

    folder, words = _folder(run), settings or []
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: this is no setting. Write key=value, such as optimizer.lr=1e-4.")
    config = with_settings(folder.config(), words)
    place = HoldPlace(folder.path)
    try:
        with run_lock(folder.path):
            pass
    except LaunchError as error:
        if not place.is_held:
            text = f"{run}: this run is not held, it trains. Run `weft ask {run} hold` to hold it."
            raise ConfigError(text) from error
        place.say(words)
        say(f"{run}: goes on{' with ' + ' '.join(words) if words else ''}")
        return
    from weft.cli.train import train_here

    place.end()
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
    """Ask a run that trains for something; all its ranks do it after the same step."""
    from weft.monitor.alerts import RUN_ACTIONS, Wish, ask
    from weft.train.run import run_lock

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
    try:
        with run_lock(folder.path):
            pass
    except LaunchError:
        ask(folder.path, Wish(action, why, "a person", since, factor))
        say(f"{run}: asked to {action}; the run hears of it after its next step")
        return
    raise ConfigError(f"{run}: no command trains in this folder. Start it: weft resume {run}.")


def _folder(run: Path) -> RunFolder:
    """The run's folder, with its config read. Raises ConfigError where it is none."""
    from weft.train import RunFolder

    folder = RunFolder(run)
    folder.config()
    return folder
