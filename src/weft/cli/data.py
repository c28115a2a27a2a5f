"""`weft data`: look at the data as the model will see it, tokenise it ahead of a run, check what is stored."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft import units
from weft.cli.console import progress_report
from weft.monitor.screen import tell

if TYPE_CHECKING:
    from rich.console import Console

    from weft.data import PreparedData, SampleView
    from weft.spec import RunConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Inspect, tokenise and check the data of a run.")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A config file, and settings that override it."),
]


@app.command()
def preview(
    arguments: Arguments = None,
    num: Annotated[int, typer.Option(min=1, help="Samples to show.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="Global index of the first sample.")] = 0,
    split: Annotated[str, typer.Option(help="train or eval.")] = "train",
) -> None:
    """Show decoded samples in training order, and which of their tokens are trained."""
    from weft.data import SampleStream, view_sample
    from weft.errors import DataError

    if split not in ("train", "eval"):
        raise DataError(f"split={split}: not a split. Use --split train or --split eval.")
    config = _load(arguments)
    prepared = _prepare(config)
    sources = prepared.train if split == "train" else prepared.eval
    if not sources:
        raise DataError("split=eval: this run has no evaluation data. Set data.holdout or data.eval.")
    stream = SampleStream(
        sources, seed=config.seed, seq_len=config.train.seq_len, packing=config.data.packing,
        borders=config.data.borders, shuffle=split == "train",
    )  # fmt: skip
    console = _console()
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    legend = "green: trained, dim: masked" if coloured else "[[double brackets]]: masked"
    console.print(f"{split}: {stream.num_sequences} sequences per epoch. {legend}", markup=False, highlight=False)
    for index in range(first, first + num):
        sample = stream.sample(index)
        view = view_sample(sample, prepared.tokenizer)
        head = f"sample {index}: {sources[sample.source].name}, epoch {sample.epoch}, {_counts(view)}"
        _show(console, head, view, coloured)


@app.command()
def prepare(arguments: Arguments = None) -> None:
    """Tokenise the data now, so that the run starts at once."""
    prepared = _prepare(_load(arguments))
    folders = dict.fromkeys(source.folder.parent for source in (*prepared.train, *prepared.eval))
    for folder in folders:
        typer.echo(f"stored in {folder}")


@app.command()
def verify(arguments: Arguments = None) -> None:
    """Read all tokenised shards and check their digests."""
    from weft.data import verify_data
    from weft.errors import DataError

    prepared = _prepare(_load(arguments))
    problems = verify_data(prepared)
    if problems:
        folders = dict.fromkeys(str(source.folder.parent) for source in (*prepared.train, *prepared.eval))
        remedy = f"Type rm -r {shlex.join(folders)} and run the command again: it tokenises the data anew."
        raise DataError("\n".join([*(f"{problem}." for problem in problems), remedy]))
    sources = (*prepared.train, *prepared.eval)
    num_bytes = sum(size for source in sources for size, _ in source.counts.files.values())
    typer.echo(f"ok: {units.counted(len(sources), 'split')}, {units.format_bytes(num_bytes)}, all digests match")


def _load(arguments: list[str] | None) -> RunConfig:
    """The first argument is the config file unless it is a setting."""
    from weft.spec.files import load_config

    given = list(arguments or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    return load_config(path, given).config


def _prepare(config: RunConfig) -> PreparedData:
    from weft.data import prepare_data

    with progress_report(sys.stderr) as report:
        prepared = prepare_data(config, report)
    tell(sys.stdout, prepared.summary, indent=2)
    return prepared


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True)


def _counts(view: SampleView) -> str:
    documents = units.counted(view.num_documents, "document")
    return f"{documents}, {view.num_trained} trained, {view.num_masked} masked, {view.num_padding} padding"


def _show(console: Console, head: str, view: SampleView, coloured: bool) -> None:
    from rich.text import Text

    from weft.data import marked, visible

    console.print(f"\n--- {head}", style="bold" if coloured else None, markup=False, highlight=False)
    if not coloured:
        console.print(marked(view), markup=False, highlight=False, emoji=False)
        return
    text = Text()
    for segment in view.segments:
        colour = "green" if segment.trained else "dim"
        text.append(visible(segment.text), style=f"{colour} reverse" if segment.special else colour)
    console.print(text)
