"""Text for terminals: wrapped between words, and a wait message that is erased."""

from __future__ import annotations

import io
import time

import pytest

from weft.monitor import terminal as terminal_module
from weft.monitor.terminal import busy, print_wrapped, wrapped

LINE = "time    1500 steps in 4.7 s on 2 ranks: compute 50%, host 28%, communication over dp_replicate 9%"


def test_lines_wrap_between_words_with_hanging_indent():
    assert wrapped(LINE, 79).splitlines() == [
        "time    1500 steps in 4.7 s on 2 ranks: compute 50%, host 28%, communication",
        "        over dp_replicate 9%",
    ]
    assert wrapped(LINE, None) == LINE
    assert wrapped("short\n\n  lines", 79) == "short\n\n  lines"


@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_words_are_never_broken(width):
    text = f"folder  {'/a/long/path' * 20}: events.jsonl\n        {LINE}"
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    words = max(len(word) for word in text.split())
    assert max(map(len, shown.splitlines())) <= max(width, words + 8)


def test_files_get_unwrapped_lines():
    stream = io.StringIO()
    print_wrapped(stream, [LINE, "next"])
    assert stream.getvalue() == f"{LINE}\nnext\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_wait_message_is_erased(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal_module, "_PATIENCE_S", 0.0)
    screen, file = Screen(), io.StringIO()
    with busy(screen, "loading torch"), busy(file, "loading torch"), busy(None, "nowhere"):
        for _ in range(100):
            if "loading" in screen.getvalue():
                break
            time.sleep(0.01)
    assert "loading torch ... 0 s" in screen.getvalue()
    assert screen.getvalue().endswith("\r\033[K")
    assert file.getvalue() == ""


def test_short_wait_shows_nothing(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with busy(screen, "loading torch"):
        pass
    assert screen.getvalue() == ""
