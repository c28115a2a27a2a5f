"""`weft ckpt` and its subcommands, and checkpoints by name: a run, its folder of checkpoints, or a step of either."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import Checkpoint, list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.object_store import Location, StorePath, located
from weft.checkpoint.targets import target_at
from weft.cli.console import print_line, seconds_of, table
from weft.errors import CheckpointError, ConfigError, nearest_name
from weft.hub import downloaded_folder
from weft.train.folder import RunFolder
from weft.units import counted, format_bytes

#: Forms of the argument, for help texts.
RUN_HELP = "A run's folder, its folder of checkpoints (or URL, such as s3://bucket/prefix), or one step_NNNNNNNN in it."
ONE_HELP = f"{RUN_HELP} RUN@120 is its step 120; without @STEP, the newest intact checkpoint."


def root_of(word: str | Location) -> Location:
    """Return the folder of checkpoints that an argument names.

    Raise ConfigError if it does not exist or contains no checkpoint.
    """
    word = located(word)
    if not word.is_dir():
        if isinstance(word, StorePath) and not word.bucket.exists():
            raise ConfigError(f"RUN={word}: the store has no {word.bucket}. Check its name.")
        siblings = [found.name for found in word.parent.iterdir()] if word.parent.is_dir() else []
        near = nearest_name(word.name, siblings)
        hint = f" Did you mean '{word.parent / near}'?" if near else " Give a run's folder, such as runs/quickstart."
        raise ConfigError(f"RUN={word}: there is no such folder.{hint}")
    own = RunFolder(word).checkpoints if isinstance(word, Path) else word / "checkpoints"
    for root in (own, word):
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        if any(step_in_name(path.name.split(".")[0]) is not None for path in folders):
            return root
    raise ConfigError(
        f"RUN={word}: it has no checkpoints. Give a run's folder, such as runs/quickstart, or the folder that holds "
        "the step_NNNNNNNN folders."
    )


def one_of(word: str) -> Location:
    """Return the folder of the checkpoint that an argument names.

    The argument is the folder itself, RUN@STEP, or a run for its newest checkpoint. A folder with COMMIT or
    manifest.json is returned without a check. Raise ConfigError if no checkpoint exists, and CheckpointError if a
    step's folder has neither file.
    """
    path = located(word)
    if (path / "COMMIT").exists() or (path / "manifest.json").exists():
        return path
    run, at, step = word.rpartition("@")
    if at and not path.exists():
        return _of_step(root_of(run), step, word)
    if step_in_name(path.name) is not None and path.is_dir():
        load_checkpoint(path, lazily=True)  # raises an error that names the missing file
    root = root_of(path)
    found = newest_checkpoint(root, verify=False)
    if found is None:
        raise ConfigError(f"RUN={word}: it has no finished checkpoint. `weft ckpt list {word}` lists its contents.")
    return found.path


def folder_of(field: str, word: str) -> Path:
    """Return the path of a local folder. Raise ConfigError for a URL of an object store."""
    place = located(word)
    if not isinstance(place, Path):
        raise ConfigError(f"{field}={place}: it is a URL, and only a folder works here. Give a path.")
    return place


def settled_steps(root: Location) -> dict[int, Location]:
    """Return the finished checkpoints by step, oldest first."""
    return {step: path for path in list_checkpoints(root) if (step := step_in_name(path.name)) is not None}


def _of_step(root: Location, step: str, word: str) -> Location:
    saved = settled_steps(root)
    if not step.isdecimal() or int(step) not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise ConfigError(f"RUN={word}: it has no finished checkpoint of step {step!r}. Use one of: {known}.")
    return saved[int(step)]


# `weft ckpt list`: every checkpoint of a folder, one per line, including unfinished ones.


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint in the list of `weft ckpt list`.

    `state` is "committed", "unfinished", "set aside" or "unreadable: ...". `when` is local time in ISO format.
    """

    step: int
    name: str
    state: str
    when: str
    num_bytes: int
    num_files: int
    plan: str
    written_by: str


def listed(root: Location) -> list[ListedCheckpoint]:
    """Return all checkpoints in a folder, also unfinished ones, oldest step first. Their bytes are not verified."""
    found = []
    present = {path.name for path in root.iterdir()}
    for path in root.iterdir():
        step = step_in_name(path.name.split(".")[0])
        if step is not None and path.is_dir():
            found.append(_one(path, step, ".aside" in path.name or f"{path.name}.aside" in present))
    return sorted(found, key=lambda one: (one.step, one.name))


def _one(path: Location, step: int, is_aside: bool) -> ListedCheckpoint:
    sizes = target_at(path.parent).file_sizes(path)
    commit = path / "COMMIT"
    moment = commit if "COMMIT" in sizes else path / next(iter(sizes)) if sizes else path
    try:
        when = datetime.fromtimestamp(moment.lstat().st_mtime).isoformat(sep=" ", timespec="seconds")
    except FileNotFoundError:  # deleted in the meantime
        when = "-"
    plan = written_by = ""
    state = "set aside" if is_aside else "committed" if "COMMIT" in sizes else "unfinished"
    if state == "committed":
        try:
            opened = load_checkpoint(path, lazily=True)
            plan = str(opened.state.get("plan", ""))
            written_by = ", ".join(f"{name} {version}" for name, version in opened.written_by.items())
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{path}: ").removesuffix(". Use another checkpoint.")
            state = f"unreadable: {reason}"
    return ListedCheckpoint(step, path.name, state, when, sum(sizes.values()), len(sizes), plan, written_by)


# `weft ckpt show`: tensors of a checkpoint with shape, dtype and files.


@dataclass(frozen=True, slots=True)
class ShownTensor:
    """A row of `weft ckpt show`. `name` is "group/name". `same_as` is the tensor that shares its memory, or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    files: tuple[str, ...]
    same_as: str | None


def shown_tensors(checkpoint: Checkpoint, pattern: str) -> Iterator[ShownTensor]:
    """Yield the tensors whose "group/name" matches the pattern.

    A pattern without *, ? and [ matches any part of the name.
    """
    if not any(letter in pattern for letter in "*?["):
        pattern = f"*{pattern}*"
    for group in checkpoint.groups:
        for name, entry in checkpoint.entries(group).items():
            if fnmatchcase(f"{group}/{name}", pattern):
                files = tuple(checkpoint.files_of(group, name))
                yield ShownTensor(f"{group}/{name}", entry.dtype, entry.shape, entry.num_bytes, files, entry.same_as)


def contents_text(found: list[ShownTensor]) -> list[str]:
    """Return the table of tensors as lines, with the total size."""
    rows = [("tensor", "dtype", "shape", "size", "files")]
    for one in found:
        files = ", ".join(one.files[:2]) + (f" and {len(one.files) - 2} more" if len(one.files) > 2 else "")
        shared = f"shared with {one.same_as}" if one.same_as else files
        rows.append((one.name, one.dtype, str(list(one.shape)), format_bytes(one.num_bytes), shared))
    own = [one for one in found if one.same_as is None]
    total = f"{counted(len(found), 'tensor')}, {format_bytes(sum(one.num_bytes for one in own))}"
    return [*table(rows, right=(3,)), total]


# `weft ckpt prune`: checkpoints to keep in addition to the newest ones.


def retained_steps(root: Location, every: int) -> set[int]:
    """Return the saved steps that pruning must keep.

    They are multiples of `every` (0: none), the newest step whose weights had a finite loss, and the best step that the
    newest readable checkpoint records.
    """
    saved = settled_steps(root)
    spared = {step for step in saved if every and step % every == 0}
    states = {}
    for step, path in saved.items():
        try:
            states[step] = load_checkpoint(path, lazily=True).state
        except CheckpointError:
            continue  # a damaged checkpoint is not retained
    evaluated = [step for step, state in states.items() if state.get("evaluated")]
    progress = states[max(states)].get("progress") if states else None
    best = progress.get("best_step") if isinstance(progress, dict) else None
    return spared | set(evaluated[-1:]) | ({best} if isinstance(best, int) else set())


# `weft ckpt`: list, verify, compare, import and delete checkpoints. `weft export`.

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, check, compare and move checkpoints.")

Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
One = Annotated[str, typer.Argument(metavar="RUN[@STEP]", help=ONE_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_them(run: Run, as_json: Json = False) -> None:
    """List the checkpoints of a run: step, time, size, commit state, plan."""

    found = listed(root_of(run))
    if as_json:
        _print([json.dumps([asdict(one) for one in found], indent=1)])
        return
    rows = [("step", "when", "size", "files", "state", "plan")]
    for one in found:
        size = format_bytes(one.num_bytes)
        rows.append((str(one.step), one.when, size, str(one.num_files), one.state, one.plan))
    _print(table(rows, right=(0, 2, 3)))


@app.command()
def verify(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help=RUN_HELP)],
    fast: Annotated[bool, typer.Option("--fast", help="Check sizes and headers only, without digests.")] = False,
    as_json: Json = False,
) -> None:
    """Check every file against its digest. Exit code 0: all are valid; 1: some are damaged; 2: nothing to check."""
    from weft.cli.checkpoints.ckpt_check import inspect

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
    opened = load_checkpoint(one_of(run), lazily=True)
    found = list(shown_tensors(opened, pattern))
    if as_json:
        said = {"step": opened.step, "path": str(opened.path), "written_by": dict(opened.written_by)}
        _print([json.dumps({**said, "tensors": [asdict(one) for one in found]}, indent=1)])
    else:
        _print([f"{opened.path}: step {opened.step}, {opened.state.get('plan', 'no plan')}", *contents_text(found)])


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help=ONE_HELP)],
    right: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare A with, in the same form.")],
    everything: Annotated[bool, typer.Option("--all", help="Print all lines instead of 20 of each kind.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: tensors, values, settings. Exit code 0: equal; 1: different."""
    from weft.cli.checkpoints.ckpt_check import differences

    found = differences(load_checkpoint(one_of(left)), load_checkpoint(one_of(right)))
    _print([json.dumps(found.as_json(), indent=1)] if as_json else found.lines(left, right, everything=everything))
    raise typer.Exit(found.exit_code)


def export(
    run: One,
    out: Annotated[str | None, typer.Argument(metavar="FOLDER", help="Folder to create.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to use.", show_default="newest valid")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; with --gguf also q8_0.", show_default="as saved")
    ] = None,
    group: Annotated[str, typer.Option(help="model, or ema if a script saved one.")] = "model",
    like: Annotated[
        str | None,
        typer.Option(help="Hugging Face folder or OWNER/NAME: write a folder of the same form, with its tokenizer."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base and write the full model.")
    ] = False,
    own_names: Annotated[
        bool, typer.Option("--own-names", help="Write safetensors files alone, under Weft's names of tensors.")
    ] = False,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a GGUF file for llama.cpp instead of a folder.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="With --gguf: read the file back and compare greedy tokens, in fp32.")
    ] = True,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="program", help="Write a program of torch.export, FOLDER is then OUT.pt2."),
    ] = None,
) -> None:
    """Write a model that transformers loads: safetensors, config, tokenizer, model card. Any plan may have saved it."""
    if to is not None:
        others = {"gguf": gguf, "like": like, "own-names": own_names, "group": group != "model", "no-check": not check}
        _export_program(to, run, out, step, dtype, others)
        return
    from weft.cli.export import DTYPES, GGUF_DTYPES, expect_format, export_gguf, export_weights

    if (out is None) == (gguf is None):
        raise ConfigError("weft export: give a FOLDER, or --gguf FILE, and not both.")
    if gguf is not None and (own_names or group != "model"):
        raise ConfigError(f"--gguf: {'--own-names' if own_names else '--group'} sets something else to write.")
    if gguf is None and not check:
        raise ConfigError("--no-check: only a GGUF file is read back. Add --gguf FILE, or leave it out.")
    expect_format(dtype, GGUF_DTYPES if gguf is not None else DTYPES)
    if merge and (like is not None or own_names or group != "model"):
        other = "--like" if like is not None else "--own-names" if own_names else "--group"
        raise ConfigError(f"--merge: {other} sets something else to write. Use one of them.")
    folder = folder_of("--gguf" if out is None else "FOLDER", out or str(gguf))
    opened = load_checkpoint(one_of(run if step is None else f"{run}@{step}"), verify=True)
    trained = None if own_names or like is not None or group != "model" else _trained(run)
    base = Path(downloaded_folder(like, "--like")) if like is not None else None
    if gguf is not None:
        line = export_gguf(opened, folder, dtype=dtype, like=base, run=trained, merged=merge, checks=check)
        print_line(f"step {opened.step} of {opened.path} is in {gguf}, {line}.")
        return
    files = export_weights(opened, folder, group=group, dtype=dtype, like=base, run=trained, merged=merge)
    print_line(f"step {opened.step} of {opened.path} is in {out}: {', '.join(file.name for file in files)}.")


def _export_program(
    to: str, run: str, out: str | None, step: int | None, dtype: str | None, others: Mapping[str, Any]
) -> None:
    """Write a program of torch.export. `others`: options that do not belong to it."""
    from weft.cli.export import expect_format

    if to != "program":
        raise ConfigError(f"--to {to}: it is program. Leave it out for a folder, or use --gguf FILE for llama.cpp.")
    if other := next((name for name, value in others.items() if value), ""):
        raise ConfigError(f"--{other}: it sets something else to write than --to program. Leave it out.")
    expect_format(dtype)
    name, _, at = run.rpartition("@")
    if name and at.isdecimal() and not Path(run).exists():
        run, step = name, int(at) if step is None else step
    source = Path(run if Path(run).is_dir() else downloaded_folder(run, "RUN"))
    if step is not None and not (source / "config.toml").is_file():
        raise ConfigError(f"--step={step}: {source} is not a run, and has no checkpoints. Leave it out.")
    file = folder_of("OUT", out or f"{source.resolve().name}.pt2")
    from weft.inference.program import export_program

    line = export_program(source, file, step=step, dtype=dtype or "fp32")
    print_line(f"{source} is in {file}: {line}.")


def _trained(run: str) -> RunFolder | None:
    """Return the folder of a `weft train` run whose model transformers supports; None for any other checkpoint."""
    path = Path(run)
    folder = RunFolder(path if path.is_dir() else Path(run.rpartition("@")[0]))
    if not (folder.path / "config.toml").is_file():
        return None
    from weft.train.tasks.export import is_exportable  # imported late, because it needs torch

    return folder if is_exportable(folder) else None


@app.command()
def prune(
    run: Run,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    every: Annotated[int, typer.Option(min=0, help="Also keep steps that are a multiple of this; 0: off.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without --yes, only list what would be deleted.")] = False,
) -> None:
    """Delete old checkpoints, except the newest valid one, the best one, and the newest that was evaluated."""
    from weft.checkpoint.prune import prune_checkpoints

    root = root_of(run)
    spared = retained_steps(root, every)
    sizes = {path: sum(target_at(root).file_sizes(path).values()) for path in settled_steps(root).values()}
    gone = prune_checkpoints(root, keep_last, spared=spared, delete=yes)
    found = f"{counted(len(gone), 'checkpoint')}, {format_bytes(sum(sizes.get(path, 0) for path in gone))}"
    _print([f"{'deleted' if yes else 'would delete'} {path}" for path in gone])
    print_line(f"deleted {found}." if yes or not gone else f"dry run: add --yes to delete {found}.")


@app.command("import")
def import_them(
    source: Annotated[str, typer.Argument(help="Checkpoint folder of torch.distributed.checkpoint or DeepSpeed ZeRO.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of the run, created if missing; or a URL.")],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of optimizer steps that the checkpoint has done.", show_default="from the source"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the state dict with the weights, if the source has several.", show_default=False),
    ] = None,
    limit: Annotated[str, typer.Option(help="Time limit for reading.")] = "30min",
) -> None:
    """Import weights and optimizer states of another trainer, for weft train and run.load to resume from.

    A process without network and secrets reads the files, and refuses everything except weights.
    """
    from weft.train.weights.foreign_checkpoint import bring_in

    limit_s = seconds_of("--limit", limit)
    place = located(run)
    holds_steps = place.is_dir() and any(step_in_name(path.name) is not None for path in place.iterdir())
    is_root = holds_steps or place.name == "checkpoints" or not isinstance(place, Path)
    root = place if is_root else place / "checkpoints"
    found = bring_in(folder_of("SOURCE", source), root, step=step, model_key=model, limit_s=limit_s)
    counts = f"{counted(found.num_weights, 'weight')} and {counted(found.num_states, 'optimizer state')}"
    print_line(f"imported {counts} of {found.kind}, step {found.step}, into {found.path}.")
    if found.left_out:
        print_line(f"skipped, because Weft's checkpoints cannot store it: {_listed(found.left_out)}.")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder of a Hugging Face model whose weights are .bin or .pt files.")],
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to create.")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="as saved")] = None,
    limit: Annotated[str, typer.Option(help="Time limit for reading.")] = "30min",
) -> None:
    """Write a model's pickled weights as safetensors, and copy its config and tokenizer.

    A process without network and secrets reads the files, and refuses everything except weights.
    """
    from weft.cli.export import convert_pickles, expect_format

    expect_format(dtype)
    files, left_out = convert_pickles(
        folder_of("SOURCE", source), folder_of("FOLDER", out), dtype=dtype, limit_s=seconds_of("--limit", limit)
    )
    print_line(f"the weights of {source} are in {out}: {', '.join(file.name for file in files)}.")
    if left_out:
        print_line(f"skipped, because it is no weight: {_listed(left_out)}.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _print(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)
