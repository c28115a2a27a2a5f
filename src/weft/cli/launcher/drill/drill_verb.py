"""`weft drill`."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from weft import env
from weft.cli.console import say, table
from weft.cli.launcher.drill.drill_kinds import KINDS, chosen
from weft.cli.launcher.drill.trial import DrillRow, Trial
from weft.cli.launcher.world import count_ranks, usable_cores, visible_gpus
from weft.errors import ConfigError, LaunchError
from weft.spec.files import load_config
from weft.train import RunFolder

#: A drill needs two checkpoints before its fault and a step after it.
_FEWEST_STEPS = 10
#: In the folder of the runs: a line of JSON for each fault that is over.
ROWS_NAME = "drill.jsonl"


def drill(
    words: Annotated[
        list[str], typer.Argument(metavar="CONFIG.toml [key=value ...]", help="The run's config file, and settings.")
    ],
    faults: Annotated[str, typer.Option(help="Kinds, with commas between; without it, all.", show_default=False)] = "",
    steps: Annotated[int, typer.Option(min=_FEWEST_STEPS, help="Steps of each run.")] = 12,
    every: Annotated[int, typer.Option(min=1, help="Steps between its checkpoints.")] = 3,
    seed: Annotated[int, typer.Option(help="Chooses the steps and ranks of the faults.")] = 0,
    timeout: Annotated[int, typer.Option(min=2, help="Seconds after which a rank that waits gives up.")] = 20,
    limit: Annotated[int, typer.Option(min=10, help="Seconds for one fault, all starts included.")] = 600,
    keep: Annotated[
        Path | None, typer.Option(help="A new folder for the runs, which stays.", show_default="a temporary one")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try faults, one by one, on a config and this machine: does the run come back, how fast, with the same numbers?

    Each fault gets a run of its own of a few steps, and the last checkpoint is compared with that of an undisturbed
    run. Exit code 0: all were survived; 1: some were not. The run of the config itself is left alone.
    """
    from weft.cli.command_words import split_words

    path, overrides = split_words(words)
    config = load_config(path, overrides).config
    if config.launch.replicas_apart:
        raise ConfigError(
            "launch.replicas_apart=true: a drill tries faults on the ranks of one world. Leave it out of the drill."
        )
    num_ranks = count_ranks(config, visible_gpus() if config.launch.device != "cpu" else 0, usable_cores())
    kinds = chosen(faults, num_ranks)
    if config.train.epochs is not None:
        raise ConfigError("train.epochs: a drill counts steps. Use a config without train.epochs.")
    place = _place(keep)
    given = [
        *words, f"run.dir={place}", f"train.steps={steps}", f"checkpoint.every={every}", "checkpoint.keep=3",
        "train.max_bad_steps=0", "train.on_bad=restart", "launch.restarts=3", "launch.restart_pause=1s",
        "launch.min_ranks=1", f"launch.timeout={timeout}s", f"launch.warn_after={max(1, timeout // 4)}s",
        "sample.prompt=",
    ]  # fmt: skip
    if config.checkpoint.dir is not None:  # nothing is written to where the user keeps checkpoints
        given.append(f"checkpoint.dir={place / 'kept'}")
    try:
        sound = _undisturbed(given, place, limit)
        rows = []
        for kind in kinds:
            chance = random.Random(f"{seed} {kind}")
            step, rank = chance.randint(2 * every + 1, steps - 2), chance.randrange(num_ranks)
            row = Trial(given, place, kind, step, rank, num_ranks, limit).run(sound)
            rows.append(row)
            with (place / ROWS_NAME).open("a") as out:  # a drill takes long: what is known so far outlives it
                out.write(json.dumps({**row.as_json(), "seed": seed}) + "\n")
            told = "survived" if row.survived else row.error or row.state
            say(f"{len(rows)} of {len(kinds)}: {kind}: {told}, back in {_seconds(row.back_s)}")
    finally:
        if keep is None:
            shutil.rmtree(place, ignore_errors=True)
    print(json.dumps([row.as_json() for row in rows], indent=1) if as_json else "\n".join(report(rows)))
    raise typer.Exit(int(not all(row.survived for row in rows)))


def report(rows: list[DrillRow]) -> list[str]:
    """The table for people."""
    head = ("fault", "at step", "detected in", "back in", "steps lost", "starts", "final state", "")
    cells = [
        (
            row.kind,
            "-" if row.step is None else str(row.step),
            _seconds(row.detected_s),
            _seconds(row.back_s),
            str(row.steps_lost),
            str(row.starts),
            row.state,
            "survived" if row.survived else f"NOT SURVIVED {row.error}{f' {row.left} processes left' * bool(row.left)}",
        )
        for row in rows
    ]
    good = sum(row.survived for row in rows)
    return [*table([head, *cells], right=(1, 2, 3, 4, 5)), "", f"{good} of {len(rows)} faults survived"]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _place(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="weft-drill-"))
    if keep.exists():
        raise ConfigError(f"--keep {keep}: it is there already. Give a folder that is not there yet.")
    keep.mkdir(parents=True)
    return keep.resolve()


def _undisturbed(words: list[str], place: Path, limit_s: float) -> RunFolder:
    """The run that all others are compared with. LaunchError where the config does not even run without faults."""
    say(f"the undisturbed run, then {len(KINDS)} kinds of fault at most; the runs are in {place}")
    command = [sys.executable, "-m", "weft", "train", *words, "run.name=undisturbed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env.child_env())
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"--limit {limit_s:g}: the run without a fault takes longer. Give more time.") from error
    if done.returncode:
        raise LaunchError(f"without a fault the run fails too: {done.stderr.strip()[-500:]} Mend it, then drill.")
    return RunFolder(place / "undisturbed")
