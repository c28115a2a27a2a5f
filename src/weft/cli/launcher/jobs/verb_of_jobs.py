"""`weft launch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.launcher.jobs.asked import JobAsked, check_asked
from weft.cli.launcher.jobs.cluster_jobs import kubernetes_job, ray_job, skypilot_job
from weft.cli.launcher.jobs.shell_jobs import slurm_job, torchrun_job
from weft.errors import ConfigError, did_you_mean

MAKERS: dict[str, Callable[[JobAsked], str]] = {
    "slurm": slurm_job,
    "torchrun": torchrun_job,
    "kubernetes": kubernetes_job,
    "skypilot": skypilot_job,
    "ray": ray_job,
}


def launch(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(MAKERS)}.")],
    words: Annotated[
        list[str], typer.Argument(metavar="CONFIG.toml [key=value ...]", help="The run's config file, and settings.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks per machine, one per GPU.")] = 8,
    time: Annotated[
        str | None, typer.Option(help="Time limit of one job in the scheduler, such as 4h.", show_default="none")
    ] = None,
    warn: Annotated[str, typer.Option(help="How long before the time limit the run saves and stops.")] = "5min",
    workdir: Annotated[
        Path | None, typer.Option(help="Folder shared by all machines.", show_default="this folder")
    ] = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment to activate on each machine.", show_default=False)
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(help="Container image with Weft installed; required for kubernetes.", show_default=False),
    ] = None,
    head: Annotated[str | None, typer.Option(help="torchrun: name of the first machine.", show_default=False)] = None,
    array: Annotated[
        int | None,
        typer.Option(min=1, help="slurm: use a job array of this many tasks instead of --requeue.", show_default=False),
    ] = None,
    gpu: Annotated[str, typer.Option(help="skypilot: the kind of GPU.")] = "H100",
    claim: Annotated[str, typer.Option(help="kubernetes, skypilot: the volume to mount at workdir.")] = "shared",
) -> None:
    """Print the text of a job for several machines; nothing is started. The job resumes by itself."""
    from weft.cli.command_words import split_words
    from weft.spec.files import load_config

    if kind not in MAKERS:
        hint = did_you_mean(kind, MAKERS) or f" Use one of: {', '.join(MAKERS)}."
        raise ConfigError(f"KIND={kind}: not a launcher that Weft knows.{hint}")
    path, overrides = split_words(words)
    if path is None:
        raise ConfigError("CONFIG: a job needs a config file. Give one, such as configs/quickstart.toml.")
    config = load_config(path, overrides).config
    job = JobAsked(
        name=config.run.name,
        train=(str(path), *overrides),
        events=str(Path(config.run.dir) / config.run.name / "events.jsonl"),
        nodes=nodes,
        ranks=gpus_per_node,
        on_gpus=config.launch.device != "cpu",
        time_s=None if time is None else _seconds("--time", time),
        warn_s=_seconds("--warn", warn),
        workdir=str((workdir or Path()).absolute()),
        venv=None if venv is None else str(venv),
        container=container,
        head=head,
        array=array,
        gpu=gpu,
        claim=claim,
    )
    check_asked(config, job)
    typer.echo(MAKERS[kind](job), nl=False)


def _seconds(option: str, text: str) -> int:
    from weft.units import parse_seconds

    try:
        return int(parse_seconds(text))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}.") from error
