"""`weft ckpt`: look at checkpoints, prove them, compare, take out, bring in and delete them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.ckpt.which import ONE_HELP, RUN_HELP, folder_of, one_of, root_of, settled_steps
from weft.cli.console import say
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.train import RunFolder

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, check, compare and move checkpoints.")

Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
One = Annotated[str, typer.Argument(metavar="RUN[@STEP]", help=ONE_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_them(run: Run, as_json: Json = False) -> None:
    """List the checkpoints of a run: step, time, size, whether it is committed, plan."""
    from weft.cli.ckpt.listing import listed, listing_text

    found = listed(root_of(run))
    _print([json.dumps([one.as_json() for one in found], indent=1)] if as_json else listing_text(found))


@app.command()
def verify(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help=RUN_HELP)],
    fast: Annotated[bool, typer.Option("--fast", help="Check sizes and headers only, without digests.")] = False,
    as_json: Json = False,
) -> None:
    """Check every file against its digest. Exit code 0: all are whole; 1: some are damaged; 2: nothing to check."""
    from weft.checkpoint import step_in_name
    from weft.checkpoint.targets import located
    from weft.cli.ckpt.damage import inspect

    path = located(run)
    if step_in_name(path.name) is not None or not path.is_dir():
        paths = [path if path.is_dir() else one_of(run)]
    else:
        paths = sorted(one for one in root_of(path).iterdir() if step_in_name(one.name) is not None and one.is_dir())
    found = inspect(paths, digests=not fast)
    _print([found.as_json()] if as_json else found.lines())
    raise typer.Exit(found.exit_code)


@app.command()
def show(
    run: One,
    pattern: Annotated[str, typer.Argument(help="Tensors to show, such as 'optimizer/*exp_avg'.")] = "*",
    as_json: Json = False,
) -> None:
    """Show the tensors of a checkpoint: name, dtype, shape, size, files."""
    from weft.checkpoint import load_checkpoint
    from weft.cli.ckpt.contents import contents_text, shown_tensors

    opened = load_checkpoint(one_of(run), lazily=True)
    found = list(shown_tensors(opened, pattern))
    if as_json:
        said = {"step": opened.step, "path": str(opened.path), "written_by": dict(opened.written_by)}
        _print([json.dumps({**said, "tensors": [one.as_json() for one in found]}, indent=1)])
    else:
        _print([f"{opened.path}: step {opened.step}, {opened.state.get('plan', 'no plan')}", *contents_text(found)])


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help=ONE_HELP)],
    right: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare A with, in the same form.")],
    everything: Annotated[bool, typer.Option("--all", help="Print all lines instead of 20 of each kind.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: tensors, numbers, settings. Exit code 0: they are equal; 1: they differ."""
    from weft.checkpoint import load_checkpoint
    from weft.cli.ckpt.differences import differences

    found = differences(load_checkpoint(one_of(left)), load_checkpoint(one_of(right)))
    _print([json.dumps(found.as_json(), indent=1)] if as_json else found.lines(left, right, everything=everything))
    raise typer.Exit(found.exit_code)


@app.command("export", help="Write a model's weights: the same as weft export.")
def export(
    run: One,
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to create.")],
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to use.", show_default="newest valid")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="as saved")] = None,
    group: Annotated[str, typer.Option(help="model, or ema if a script saved one.")] = "model",
    like: Annotated[
        Path | None,
        typer.Option(help="Folder of a Hugging Face model: write a folder of the same form, with its tokenizer."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write an adapter's whole model: the base it was trained on, with it added.")
    ] = False,
    own_names: Annotated[
        bool, typer.Option("--own-names", help="Write safetensors files alone, under Weft's names of tensors.")
    ] = False,
) -> None:
    """Write a model that transformers loads: safetensors, config, tokenizer, model card; from any plan's checkpoint."""
    from weft.checkpoint import load_checkpoint
    from weft.cli.ckpt.whole_weights import export_weights

    _expect_format(dtype)
    if merge and (like is not None or own_names or group != "model"):
        other = "--like" if like is not None else "--own-names" if own_names else "--group"
        raise ConfigError(f"--merge: {other} says otherwise what is written. Use one of both.")
    folder = folder_of("FOLDER", out)
    opened = load_checkpoint(one_of(run if step is None else f"{run}@{step}"), verify=True)
    trained = None if own_names or like is not None or group != "model" else _trained(run)
    files = export_weights(opened, folder, group=group, dtype=dtype, like=like, run=trained, merged=merge)
    say(f"step {opened.step} of {opened.path} is in {out}: {', '.join(file.name for file in files)}.")


def _trained(run: str) -> RunFolder | None:
    """The folder of a run of `weft train` whose model transformers knows; None for any other checkpoint."""
    from weft.train import RunFolder

    path = Path(run)
    folder = RunFolder(path if path.is_dir() else Path(run.rpartition("@")[0]))
    if not (folder.path / "config.toml").is_file():
        return None
    from weft.train.tasks import is_exportable  # which needs torch

    return folder if is_exportable(folder) else None


@app.command()
def prune(
    run: Run,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    every: Annotated[int, typer.Option(min=0, help="Also keep steps that are a multiple of this; 0: off.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without --yes, only list what would be deleted.")] = False,
) -> None:
    """Delete old checkpoints, never the newest whole one, the best one, nor the newest that was evaluated."""
    from weft.checkpoint import prune_checkpoints
    from weft.checkpoint.targets import target_at
    from weft.cli.ckpt.spared import spared_steps
    from weft.units import counted, format_bytes

    root = root_of(run)
    spared = spared_steps(root, every)
    sizes = {path: sum(target_at(root).file_sizes(path).values()) for path in settled_steps(root).values()}
    gone = prune_checkpoints(root, keep_last, spared=spared, delete=yes)
    found = f"{counted(len(gone), 'checkpoint')}, {format_bytes(sum(sizes.get(path, 0) for path in gone))}"
    _print([f"{'deleted' if yes else 'would delete'} {path}" for path in gone])
    if yes or not gone:
        say(f"deleted {found}.")
    else:
        say(f"dry run: add --yes to delete {found}.")


@app.command("import")
def import_them(
    source: Annotated[str, typer.Argument(help="Checkpoint folder of torch.distributed.checkpoint or DeepSpeed ZeRO.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of the run, created if missing; or a URL.")],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of optimizer steps that the checkpoint has done.", show_default="as the source says"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the state dict with the weights, if the source has several.", show_default=False),
    ] = None,
    limit: Annotated[str, typer.Option(help="Time limit for reading.")] = "30min",
) -> None:
    """Import weights and optimizer states of another trainer; weft train and run.load go on from them.

    A process without network and secrets reads the files, and refuses whatever is no weight.
    """
    from weft.checkpoint import step_in_name
    from weft.checkpoint.targets import located
    from weft.train.foreign import bring_in
    from weft.units import counted

    limit_s = _seconds(limit)
    place = located(run)
    holds_steps = place.is_dir() and any(step_in_name(path.name) is not None for path in place.iterdir())
    is_root = holds_steps or place.name == "checkpoints" or not isinstance(place, Path)
    root = place if is_root else place / "checkpoints"
    found = bring_in(folder_of("SOURCE", source), root, step=step, model_key=model, limit_s=limit_s)
    counts = f"{counted(found.num_weights, 'weight')} and {counted(found.num_states, 'optimizer state')}"
    say(f"imported {counts} of {found.kind}, step {found.step}, into {found.path}.")
    if found.left_out:
        say(f"skipped, because Weft's checkpoints have no place for it: {_listed(found.left_out)}.")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder of a Hugging Face model whose weights are .bin or .pt files.")],
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to create.")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="as saved")] = None,
    limit: Annotated[str, typer.Option(help="Time limit for reading.")] = "30min",
) -> None:
    """Write a model's pickled weights as safetensors, and copy its config and tokenizer.

    A process without network and secrets reads the files, and refuses whatever is no weight.
    """
    from weft.cli.ckpt.converted import convert_pickles

    _expect_format(dtype)
    files, left_out = convert_pickles(
        folder_of("SOURCE", source), folder_of("FOLDER", out), dtype=dtype, limit_s=_seconds(limit)
    )
    say(f"the weights of {source} are in {out}: {', '.join(file.name for file in files)}.")
    if left_out:
        say(f"skipped, because it is no weight: {_listed(left_out)}.")


def _expect_format(dtype: str | None) -> None:
    from weft.cli.ckpt.whole_weights import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: not a format for weights. Use {', '.join(DTYPES)}.")


def _seconds(limit: str) -> float:
    from weft.units import parse_seconds

    try:
        return parse_seconds(limit)
    except ValueError as error:
        raise ConfigError(f"--limit {limit}: {error}.") from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _print(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)
