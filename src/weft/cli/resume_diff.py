"""`weft resume-diff`: changes since a run was started, on one screen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.ckpt_check import changed_values, flat
from weft.cli.console import table
from weft.errors import ConfigError, PlanError, nearest_name

#: Settings that affect only where and how a run starts, not its results.
_PLACES = ("config.run.dir", "config.launch.")
_MOST_LINES = 40


def resume_diff(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/quickstart.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [key=value ...]",
            help="The next command's config file and settings; by default the config of the last start.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show changes since a run was started: config, plan, data, versions, machine.

    Exit code 0: no change; 1: some change; 2: this is not a started run.
    """
    started = was(run)
    now = {**is_now(run, words or []), "world_size": started.get("world_size")}
    now = {key: value for key, value in now.items() if key in started}
    changes = list(changed_values(_comparable(started), _comparable(now)))
    if as_json:
        typer.echo(json.dumps([{"key": key, "started": old, "now": new} for key, old, new in changes], indent=1))
    else:
        for line in screen(run, started, changes):
            typer.echo(line)
    raise typer.Exit(int(bool(changes)))


def was(run: Path) -> dict[str, Any]:
    """Return the context of the run's first start from its events. Raise ConfigError if it was never started."""
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
    # Runs of older versions have this data only from their first start under this version.
    return next((event for event in starts if "config" in event), starts[0])


def is_now(run: Path, words: list[str]) -> dict[str, Any]:
    """Return the context of a command that would be typed now."""
    from weft.cli.console import split_words
    from weft.config.files import load_config
    from weft.train.folder import RunFolder
    from weft.train.rank_run import context

    path, overrides = split_words(words)
    config = load_config(path or run / "config.toml", overrides).config
    return {**context(RunFolder(run), config), "plan": config.plan}


def _comparable(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat keys for comparison, with plans parsed."""
    kept = {key: event[key] for key in ("weft", "torch", "python", "machine", "data", "config") if key in event}
    kept["plan"] = _plan(str(event.get("plan", "")), event.get("world_size"))
    if isinstance(kept.get("config"), Mapping):
        kept["config"] = {key: value for key, value in kept["config"].items() if key != "plan"}
    return {key: value for key, value in flat(kept).items() if not key.startswith(_PLACES)}


def _plan(text: str, world_size: Any) -> str:
    from weft.config.plan import Plan

    try:
        return Plan.parse(text, world_size).format() if world_size else text
    except PlanError:
        return text


def screen(run: Path, started: Mapping[str, Any], changes: list[tuple[str, str, str]]) -> list[str]:
    """Return one screen for users."""
    from datetime import datetime

    when = datetime.fromtimestamp(float(started.get("time", 0))).isoformat(sep=" ", timespec="seconds")
    if "config" not in started:
        told = [
            f"{run}: started {when} by a version of Weft that did not record config and machine; comparing versions "
            "and plan only:"
        ]
    else:
        told = [f"{run}: started {when} at step {started.get('step', 0)}"]
    if not changes:
        return [*told, "nothing changed since"]
    rows = [("", "started", "now"), *changes[:_MOST_LINES]]
    more = len(changes) - _MOST_LINES
    return [*told, *table(rows), *([f"... and {more} more; --json lists them"] if more > 0 else [])]
