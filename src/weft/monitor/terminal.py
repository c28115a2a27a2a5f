"""Text for a terminal that stands still or is as wide as it is: wrapped lines, and a line that says what is awaited."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TextIO

from weft import env

#: Columns that labels such as "plan    " take; wrapped lines continue under the text beside them.
LABEL_COLUMNS = 8
_DRAWS_PER_S = 4
#: Shorter waits draw nothing: a line that flashes up tells nobody anything.
_PATIENCE_S = 0.3


def is_live(stream: TextIO) -> bool:
    """Whether a person looks on, at a terminal that moves its cursor."""
    return stream.isatty() and not env.is_ci() and env.get("TERM") != "dumb"


def columns_of(stream: TextIO) -> int | None:
    """Return the terminal's width behind `stream` less one column, which some wrap at; None for anything else."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns - 1) if stream.isatty() else None
    except (OSError, ValueError):
        return None


def wrapped(text: str, width: int | None, indent: int = LABEL_COLUMNS) -> str:
    """Return `text` with each line broken at spaces.

    A word that is longer than a line stays whole, so that a path can be copied.

    Args:
        text: one line or more.
        width: columns of a line; None: nothing is broken.
        indent: columns before what follows a break.
    """
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent=" " * min(indent, width // 2),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    lines = text.splitlines()
    return "\n".join(part for line in lines for part in (_broken(line, wrapper) if len(line) > width else [line]))


def _broken(line: str, wrapper: textwrap.TextWrapper) -> list[str]:
    # A label's own spaces are no place to break: they would leave the label alone on its line.
    label = re.match(r"\s*\S*\s\s*", line)
    head = label.group() if label and label.end() <= len(wrapper.subsequent_indent) else ""
    wrapper.initial_indent = head
    return wrapper.wrap(line[len(head) :])


def tell(stream: TextIO, lines: Iterable[str], indent: int = LABEL_COLUMNS) -> None:
    """Print lines, wrapped at words where `stream` is a terminal.

    Args:
        stream: where they go.
        lines: each is wrapped by itself.
        indent: columns before what follows a break.
    """
    width = columns_of(stream)
    print("\n".join(wrapped(line, width, indent) for line in lines), file=stream, flush=True)


@contextlib.contextmanager
def busy(stream: TextIO | None, text: str) -> Iterator[None]:
    """Show `text` and the seconds so far on a line of a terminal's own while inside; it is gone afterwards.

    Nothing else may write to the terminal meanwhile. Other streams show nothing.
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
    # A closed terminal ends the line and not the run.
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
    """Passes text on to a stream, and nothing once that is gone.

    A closed terminal or pipe does not end a run, whose numbers are in events.jsonl all the same. Letters that the
    stream
    cannot encode become '?'.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write a text as far as the stream takes it, and return its length."""
        if not self._gone:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._gone = True
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless it is gone."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._gone = True

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self._stream.fileno()
