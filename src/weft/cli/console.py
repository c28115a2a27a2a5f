"""How the command speaks: errors to stderr, one line per problem; colour and moving bars only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from weft import env

#: report(stage, done, total), as the preparation of data calls it.
Report = Callable[[str, int, int], None]

_STYLES = {"error": "1;31", "fail": "1;31", "warn": "1;33", "weft": "1;36", "faint": "2"}


def use_colour(stream: TextIO) -> bool:
    """Colour only for a person who looks on, and has not set NO_COLOR."""
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style of this module, where the stream shows colours."""
    return f"\033[{_STYLES[style]}m{text}\033[0m" if use_colour(stream) else text


def say(text: str) -> None:
    """One line of the command's own, on stderr."""
    print(f"{paint('weft:', 'weft', sys.stderr)} {_beside('weft: ', text)}", file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """One error, on stderr; further lines of it follow as they are."""
    print(f"{paint('error:', 'error', sys.stderr)} {_beside('error: ', text)}", file=sys.stderr, flush=True)


def _beside(label: str, text: str) -> str:
    """`text` wrapped for a place beside a label, where standard error is a terminal."""
    from weft.monitor.screen import columns_of, wrapped  # many commands say nothing

    return wrapped(label + text, columns_of(sys.stderr), indent=2)[len(label) :]


@contextmanager
def progress_report(stream: TextIO) -> Generator[Report]:
    """A report function for long preparations: a moving bar on a terminal, else one line per stage and per 10 s."""
    if not stream.isatty() or env.is_ci():
        yield _plain_report(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=stream), transient=True) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total or None)
            progress.update(tasks[stage], completed=done, total=total or None)

        yield report


def _plain_report(stream: TextIO) -> Report:
    last: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage not in last:
            print(f"{stage} ...", file=stream, flush=True)
            last[stage] = now
        elif now - last[stage] >= 10 and total:
            print(f"{stage} ... {100 * done // total} %", file=stream, flush=True)
            last[stage] = now

    return report


def table(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Return rows as lines with aligned columns. rows: of equal length. right: the columns to align to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
