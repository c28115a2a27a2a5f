"""Text for a terminal: wrapped lines, a progress line, and a stream that survives a closed terminal."""

from __future__ import annotations

import contextlib
import math
import os
import re
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TextIO

from weft import env

#: Width of labels such as "plan    ". Wrapped lines are indented by it, below the text.
LABEL_COLUMNS = 8
_BLOCKS = "▁▂▃▄▅▆▇█"
_DRAWS_PER_S = 4
#: Shorter waits (s) show no line, because it would only flash.
_PATIENCE_S = 0.3


def is_live(stream: TextIO) -> bool:
    """Return True if the stream is a terminal with cursor control, and this is no CI job."""
    return stream.isatty() and not env.is_ci() and env.get("TERM") != "dumb"


def columns_of(stream: TextIO) -> int | None:
    """Return the terminal's width minus one, but at least 20, or None if the stream is not a terminal.

    One column is left free, because some terminals wrap full lines.
    """
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns - 1) if stream.isatty() else None
    except (OSError, ValueError):
        return None


def wrapped(text: str, width: int | None, indent: int = LABEL_COLUMNS) -> str:
    """Return `text` with each line wrapped at spaces.

    A word longer than a line is not split, so that a path can be copied.

    Args:
        text: one line or more.
        width: columns of a line, or None for no wrapping.
        indent: columns before a continued line, at most half of `width`.
    """
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * min(indent, width // 2), break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False,
    )  # fmt: skip
    lines: list[str] = []
    for line in text.splitlines():
        if len(line) <= width:
            lines.append(line)
            continue
        # Do not break at the spaces of a label, which would leave it alone on its line.
        label = re.match(r"\s*\S*\s\s*", line)
        wrapper.initial_indent = label.group() if label and label.end() <= len(wrapper.subsequent_indent) else ""
        lines += wrapper.wrap(line[len(wrapper.initial_indent) :])
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` block characters, each for the mean of consecutive finite values.

    Return "" if no value is finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [index * len(finite) // width for index in range(width + 1)]
    means = [sum(finite[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_BLOCKS[round((mean - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 1))] for mean in means)


def print_wrapped(stream: TextIO, lines: Iterable[str], indent: int = LABEL_COLUMNS) -> None:
    """Print lines, each wrapped if `stream` is a terminal.

    Args:
        stream: where to print.
        lines: lines of text.
        indent: columns before a continued line.
    """
    width = columns_of(stream)
    print("\n".join(wrapped(line, width, indent) for line in lines), file=stream, flush=True)


@contextlib.contextmanager
def busy(stream: TextIO | None, text: str) -> Iterator[None]:
    """Show `text` and the elapsed seconds on a terminal line while the `with` block runs, and erase it afterwards.

    Nothing else may write to the terminal in the meantime. Nothing is shown in the first 0.3 s, or if `stream` is None
    or not a live terminal (`is_live`).
    """
    if stream is None or not is_live(stream):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_draw_busy, args=(stream, text, done), name="weft-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _draw_busy(stream: TextIO, text: str, done: threading.Event) -> None:
    began = time.monotonic()
    if done.wait(_PATIENCE_S):
        return
    # A closed terminal ends this line but not the run.
    with contextlib.suppress(OSError, ValueError):
        while True:
            line = f"{text} ... {time.monotonic() - began:.0f} s"
            stream.write(f"\r\033[K{line[: columns_of(stream)]}")
            stream.flush()
            if done.wait(1 / _DRAWS_PER_S):
                break
        stream.write("\r\033[K")
        stream.flush()


class LastingStream:
    """Forwards text to a stream until a write fails, and drops all later text.

    So a closed terminal or pipe does not end a run, whose metrics are in events.jsonl too. Characters that the stream
    cannot encode become '?'.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write a text, unless a write has failed before, and return its length in any case."""
        if not self._gone:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._gone = True
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless a write has failed before."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._gone = True

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self._stream.fileno()
