"""`weft train`: check, prepare, start the ranks."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft import env
from weft.cli.console import progress_report, say
from weft.cli.launch import launch_ranks
from weft.cli.typed import typed_command
from weft.cli.world import count_ranks, threads_variables, usable_cores, visible_gpus
from weft.errors import ConfigError, WeftError

if TYPE_CHECKING:
    from weft.env import RankEnv
    from weft.spec.config import RunConfig

#: How long (s) the other ranks keep silent about an error that rank 0 is likely to tell.
_FIRST_WORD_S = 3.0


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [key=value ...]",
            help="A config file, and settings that change it, such as train.steps=500. "
            "Without a file, a small model is trained on Python's own sources.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a model. The same command again resumes from the newest checkpoint.

    Started by torchrun or srun, the process is one of the ranks; else it starts the ranks of this machine itself.
    """
    from weft.spec.config_file import load_config

    path, overrides = split_words(words or [])
    place = env.rank_env()
    if place is None:
        train_here(load_config(path, overrides).config)
        return
    try:
        train_as_rank(load_config(path, overrides).config, place)
    except WeftError:
        # All ranks make the same mistake. The first one tells it, and its launcher then ends the others; a rank that
        # is still there afterwards is alone with its error, and tells it too.
        if place.rank != 0:
            time.sleep(_FIRST_WORD_S)
        raise


def train_here(config: RunConfig) -> None:
    """Prepare the run and start its ranks on this machine; returns when they have ended well."""
    cores = usable_cores()
    num_ranks = count_ranks(config, visible_gpus() if config.launch.device != "cpu" else 0, cores)
    from weft.train import prepare_run
    from weft.train.auto_plan import chosen_line, record_choice, settle_plan

    asked = config.plan
    config, chosen = settle_plan(config, num_ranks, num_ranks)
    if chosen is not None:
        say(chosen_line(chosen))
    with progress_report(sys.stdout) as report:
        folder = prepare_run(config, num_ranks, report)
    if chosen is not None:
        record_choice(folder.path, asked, chosen)
    command = [sys.executable, "-m", "weft.cli.rank", str(folder.path), *typed_command()]
    variables = threads_variables(num_ranks, cores)
    launch_ranks(command, num_ranks, folder.logs, variables=variables, notice=say)


def train_as_rank(config: RunConfig, place: RankEnv) -> None:
    """Be one of the ranks that torchrun or srun started; ends the process when training fails."""
    from weft.cli.rank import run_as_rank
    from weft.train import prepare_run, run_rank
    from weft.train.auto_plan import chosen_line, record_choice, settle_plan

    env.export_rank(place)
    asked = config.plan
    config, chosen = settle_plan(config, place.world_size, place.local_world_size)
    if place.rank == 0:
        with progress_report(sys.stdout) as report:
            folder = prepare_run(config, place.world_size, report)
        if chosen is not None:
            say(chosen_line(chosen))
            record_choice(folder.path, asked, chosen)
    else:
        folder = prepare_run(config, place.world_size, None)
    typed = typed_command() if place.rank == 0 else []
    run_as_rank(folder.logs, place, lambda terminal: run_rank(folder.path, place, terminal, typed))


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file and the overrides among the words of a command line.

    A word that holds '=' and names no file is an override. Raises ConfigError for a second or missing file.
    """
    overrides = [word for word in words if "=" in word and not Path(word).is_file()]
    files = [Path(word) for word in words if word not in overrides]
    if len(files) > 1:
        raise ConfigError(
            f"{files[1]}: a second config file after {files[0]}. Give one file; settings are written key=value."
        )
    for path in files:
        if path.is_dir():
            inside = path / "config.toml"
            hint = f"Use {inside}." if inside.is_file() else "Give the file inside it."
            raise ConfigError(f"{path}: this is a folder, not a config file. {hint}")
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file.{_file_hint(path)}")
    return (files[0] if files else None), overrides


def _file_hint(path: Path) -> str:
    if path.suffix == "" and path.parent == Path("."):
        return f" Write a path to a TOML file, or a setting such as {path}=..."
    places = {path.parent, path.parent / "configs"}
    known = sorted(str(found) for place in places for found in place.glob("*.toml") if found.name != "pyproject.toml")
    near = difflib.get_close_matches(str(path), known, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" Config files there: {', '.join(known[:5])}." if known else " Check the path."
