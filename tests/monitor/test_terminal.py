"""Text for terminals: wrapped at words, and a waiting line that leaves nothing behind."""

from __future__ import annotations

import io
import time

import pytest

from weft.monitor import terminal as terminal_module
from weft.monitor.terminal import busy, print_wrapped, wrapped

LINE = "time    1500 steps in 4.7 s on 2 ranks: compute 50%, host 28%, communication over dp_replicate 9%"


def test_lines_break_between_words_and_go_on_under_their_text():
    assert wrapped(LINE, 79).splitlines() == [
        "time    1500 steps in 4.7 s on 2 ranks: compute 50%, host 28%, communication",
        "        over dp_replicate 9%",
    ]
    assert wrapped(LINE, None) == LINE
    assert wrapped("short\n\n  lines", 79) == "short\n\n  lines"


@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_no_word_is_ever_broken(width):
    text = f"folder  {'/a/long/path' * 20}: events.jsonl\n        {LINE}"
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    words = max(len(word) for word in text.split())
    assert max(map(len, shown.splitlines())) <= max(width, words + 8)


def test_a_file_gets_lines_as_they_are():
    stream = io.StringIO()
    print_wrapped(stream, [LINE, "next"])
    assert stream.getvalue() == f"{LINE}\nnext\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_waiting_line_is_gone_afterwards(monkeypatch):
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


def test_a_short_wait_shows_nothing(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with busy(screen, "loading torch"):
        pass
    assert screen.getvalue() == ""
