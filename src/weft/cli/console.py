"""Console output: errors on stderr, one line per problem; colours and progress bars only on a terminal."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from weft import env
from weft.errors import ConfigError, shown

#: Progress callback of data preparation: report(stage, done, total).
Report = Callable[[str, int, int], None]

_STYLES = {"error": "1;31", "fail": "1;31", "warn": "1;33", "weft": "1;36", "faint": "2"}


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return `text` in a style of this module, if the stream shows colours."""
    shows_colours = stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    return f"\033[{_STYLES[style]}m{text}\033[0m" if shows_colours else text


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt(exit code) on SIGTERM and SIGHUP, unless they have another handler."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(128 + signum)

    for one in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) == signal.SIG_DFL:
            signal.signal(one, interrupt)


def print_line(text: str) -> None:
    """Print one line of text on stderr, after "weft:"."""
    print(f"{paint('weft:', 'weft', sys.stderr)} {_wrapped('weft: ', text)}", file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Print one error on stderr. Only its first line gets the label."""
    print(f"{paint('error:', 'error', sys.stderr)} {_wrapped('error: ', text)}", file=sys.stderr, flush=True)


def _wrapped(label: str, text: str) -> str:
    from weft.monitor.terminal import columns_of, wrapped  # imported late, because many commands print nothing

    return wrapped(label + text, columns_of(sys.stderr), indent=2)[len(label) :]


@contextmanager
def progress_report(stream: TextIO) -> Generator[Report]:
    """Yield a report function for long preparations.

    It shows a progress bar on a terminal, and otherwise prints a line per stage and per 10 s.
    """
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
    """Return rows of equal length as lines with aligned columns. Columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = [f"{{:{'>' if column in right else '<'}{width}}}" for column, width in enumerate(widths)]
    return ["  ".join(form).format(*row).rstrip() for row in rows]


def seconds_of(option: str, text: str) -> float:
    """Return the duration of an option in seconds.

    Raises:
        ConfigError: if the text is not a duration.
    """
    from weft.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}.") from error


# Positional arguments of commands with a config: one file, and settings that override it.


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file, or None, and the overrides among a command's positional arguments.

    An argument with "=" is an override unless it is an existing file.

    Raises:
        ConfigError: for a second file, a folder, or a file that does not exist.
    """
    overrides = [word for word in words if "=" in word and not _is_file(word)]
    files = [Path(word) for word in words if word not in overrides]
    if len(files) > 1:
        raise ConfigError(
            f"{files[1]}: a second config file after {files[0]}. Give one file; settings are written key=value."
        )
    for path in files:
        if os.path.isdir(path):
            inside = path / "config.toml"
            hint = f"Use {inside}." if inside.is_file() else "Give the file inside it."
            raise ConfigError(f"{path}: this is a folder, not a config file. {hint}")
        if not _is_file(str(path)):
            raise ConfigError(f"{shown(str(path))}: there is no such file.{_file_hint(path)}")
    return (files[0] if files else None), overrides


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _file_hint(path: Path) -> str:
    if path.suffix == "" and path.parent == Path("."):
        return f" Write a path to a TOML file, or a setting such as {shown(str(path))}=..."
    places = {path.parent, path.parent / "configs"}
    known = sorted(str(found) for place in places for found in place.glob("*.toml") if found.name != "pyproject.toml")
    near = difflib.get_close_matches(str(path), known, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" Config files there: {', '.join(known[:5])}." if known else " Check the path."
