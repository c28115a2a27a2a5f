"""`weft data`: show the data in the model's format, tokenise it before a run, and check stored shards."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft import units
from weft.cli.console import print_line, progress_report
from weft.monitor.plots import GridSample, check_grid, draw_grid
from weft.monitor.terminal import print_wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from weft.config.run_config import RunConfig
    from weft.data.order.loader import SampleView
    from weft.data.store.prepared import PreparedData
    from weft.train.tasks.decoder import DecoderTask
    from weft.train.tasks.media import MediaTask

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
    sheet: Annotated[
        Path | None, typer.Option(help="Also draw them into this file: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
) -> None:
    """Show decoded samples in training order: trained text with its weight, context, and borders.

    For preferences, show the chosen and the rejected answer. For pictures and sound, show the resulting tensors.
    """
    from weft.errors import DataError

    if split not in ("train", "eval"):
        raise DataError(f"split={split}: not a split. Use --split train or --split eval.")
    if sheet is not None:
        check_grid(sheet)
    config = _load(arguments)
    if (media := _media_task(config)) is not None:
        _preview_media(media, split, range(first, first + num), sheet)
        return
    task = _task(config)
    prepared = _prepare(task)
    if not (prepared.train if split == "train" else prepared.eval):
        raise DataError("split=eval: this run has no evaluation data. Set data.holdout or data.eval.")
    from rich.console import Console

    console = Console(soft_wrap=True)
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    samples = _answers if task.learns_preferences else _sequences
    title, shown = samples(task.config, prepared, split, range(first, first + num))
    legend = (
        "green: trained, yellow: with another weight, red: not wanted, dim: context, cyan: a border of documents"
        if coloured
        else "[[double brackets]]: masked; 0.5{text}: with that weight; -1{text}: not wanted"
    )
    console.print(f"{split}: {title}. {legend}", markup=False, highlight=False)
    drawn: list[GridSample] = []
    for head, view in shown:
        _show(console, head, view, coloured)
        drawn.append(GridSample(head, text=[(part.text, part.weight) for part in view.segments]))
    if sheet is not None:
        draw_grid(sheet, drawn)
        typer.echo(f"drawn in {sheet}")


def _media_task(config: RunConfig) -> MediaTask | None:
    if config.task.name is None:
        return None
    from weft.train.tasks.media import MediaTask
    from weft.train.tasks.registry import find_task

    task = find_task(config)
    return task if isinstance(task, MediaTask) else None


def _preview_media(task: MediaTask, split: str, which: range, sheet: Path | None) -> None:
    from weft.train.tasks.base import described

    with progress_report(sys.stderr) as report:
        source = task.media(split, report)
    print_wrapped(sys.stdout, task.data_lines(), indent=2)
    made = task.processor.decoded(source, split)
    for place in which:
        epoch, index = task.shown(place, split)
        typer.echo(f"\n--- sample {place}, epoch {epoch}: {task.processor.described(source, index)}")
        print_wrapped(sys.stdout, described(made.in_epoch(epoch, index)), indent=2)
    if sheet is not None:
        draw_grid(sheet, [task.grid_entry(place, split) for place in which])
        typer.echo(f"drawn in {sheet}")


@app.command()
def prepare(arguments: Arguments = None) -> None:
    """Tokenise the data now, so that the run starts without delay."""
    prepared = _prepare(_task(_load(arguments)))
    folders = dict.fromkeys(source.folder.parent for source in (*prepared.train, *prepared.eval))
    for folder in folders:
        typer.echo(f"stored in {folder}")


@app.command()
def verify(arguments: Arguments = None) -> None:
    """Read all tokenised shards and check their digests."""
    from weft.data.store.prepared import verify_data
    from weft.errors import DataError

    prepared = _prepare(_task(_load(arguments)))
    problems = verify_data(prepared)
    if problems:
        folders = dict.fromkeys(str(source.folder.parent) for source in (*prepared.train, *prepared.eval))
        remedy = f"Type rm -r {shlex.join(folders)} and run the command again: it tokenizes the data again."
        raise DataError("\n".join([*(f"{problem}." for problem in problems), remedy]))
    sources = (*prepared.train, *prepared.eval)
    num_bytes = sum(size for source in sources for size, _ in source.counts.files.values())
    typer.echo(f"ok: {units.counted(len(sources), 'split')}, {units.format_bytes(num_bytes)}, all digests match")


def _load(arguments: list[str] | None) -> RunConfig:
    """Load the config, and download the hub files that it names except weights.

    The first argument is the config's file unless it is a setting.
    """
    from weft.config.files import load_config
    from weft.train.folder import run_folder
    from weft.train.states.hub_names import download_all, resolved_config

    given = list(arguments or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    config = load_config(path, given).config
    config = resolved_config(config, run_folder(config))
    download_all(config, print_line, weights=False)
    return config


def _task(config: RunConfig) -> DecoderTask:
    from weft.errors import ConfigError, Problem
    from weft.train.tasks.decoder import DecoderTask
    from weft.train.tasks.registry import find_task

    task = find_task(config)
    if not isinstance(task, DecoderTask) or not task.has_documents:
        rule = f"task.name={config.task.name}: its data is not tokenised text. Leave the task out to look at text."
        raise ConfigError([Problem("task.name", rule)])
    return task


def _prepare(task: DecoderTask) -> PreparedData:
    from weft.data.store.prepare import check_trainable

    with progress_report(sys.stderr) as report:
        prepared = task.tokens(report)
    # Report problems as warnings instead of errors, so that the samples are shown.
    section = task.config.data
    told = section if section.check == "off" else section.model_copy(update={"check": "warn"})
    prepared = check_trainable(prepared, told, task.config.train.seq_len)
    print_wrapped(sys.stdout, prepared.summary, indent=2)
    return prepared


def _sequences(
    config: RunConfig, prepared: PreparedData, split: str, which: range
) -> tuple[str, Iterator[tuple[str, SampleView]]]:
    from weft.data.order.loader import view_sample
    from weft.data.order.stream import SampleStream
    from weft.data.store.prepare import cache_folder
    from weft.data.store.streamed import StreamedSequences

    sources = prepared.train if split == "train" else prepared.eval
    if is_streamed := split == "train" and config.data.stream:
        stream = StreamedSequences(prepared, config, cache_folder(config.data))
    else:
        stream = SampleStream(
            sources, seed=config.seed, seq_len=config.train.seq_len, packing=config.data.packing,
            borders=config.data.borders, shuffle=split == "train",
        )  # fmt: skip

    def views() -> Iterator[tuple[str, SampleView]]:
        for index in which:
            sample = stream.sample(index)
            view = view_sample(sample, prepared.tokenizer)
            yield f"sample {index}: {sources[sample.source].name}, epoch {sample.epoch}, {_counts(view)}", view

    return "a stream" if is_streamed else f"{stream.num_sequences} sequences per epoch", views()


def _answers(
    config: RunConfig, prepared: PreparedData, split: str, which: range
) -> tuple[str, Iterator[tuple[str, SampleView]]]:
    """Return the number of preferences as text, and an iterator over the answers of the preferences `which`."""
    from weft.data.order.loader import view_answer
    from weft.data.order.stream import permutation
    from weft.data.token_files import SplitReader

    sources = prepared.train if split == "train" else prepared.eval
    sizes = [(source, source.num_documents // (1 + (source.kind == "preference"))) for source in sources]
    rows = [(source, index) for source, size in sizes for index in range(size)]

    def views() -> Iterator[tuple[str, SampleView]]:
        for index in which:
            epoch, rest = divmod(index, len(rows))
            order = permutation(len(rows), "task", config.seed, epoch) if split == "train" else int
            source, place = rows[order(rest)]
            reader, each = SplitReader(source.folder, source.counts), 1 + (source.kind == "preference")
            for number in range(place * each, (place + 1) * each):
                start, end = (int(reader.offsets[number + more]) for more in (0, 1))
                mask = reader.trained(start, end - start)
                weights = [1.0] * (end - start) if mask is None else source.counts.weight_table[mask].tolist()
                view = view_answer(reader.tokens(start, end - start).tolist(), weights, prepared.tokenizer)
                verdict = "chosen" if max(weights, default=0.0) > 0 else "rejected"
                yield f"sample {index}, {verdict}: {source.name}, {_counts(view)}", view

    return f"{len(rows)} preferences per epoch", views()


def _counts(view: SampleView) -> str:
    documents = units.counted(view.num_documents, "document")
    return f"{documents}, {view.num_trained} trained, {view.num_masked} masked, {view.num_padding} padding"


def _show(console: Console, head: str, view: SampleView, coloured: bool) -> None:
    from rich.text import Text

    from weft.data.order.loader import marked, visible

    console.print(f"\n--- {head}", style="bold" if coloured else None, markup=False, highlight=False)
    if not coloured:
        console.print(marked(view), markup=False, highlight=False, emoji=False)
        return
    text = Text()
    for segment in view.segments:
        if segment.begins:
            text.append("│", style="cyan")
        weight = segment.weight
        colour = "dim" if weight == 0 else "red" if weight < 0 else "green" if weight == 1 else "yellow"
        text.append(visible(segment.text), style=f"{colour} reverse" if segment.special else colour)
    console.print(text)
