"""Who draws while a run goes on: seldom, never two at a time, and with what the run has logged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from weft.monitor import plots as artist
from weft.monitor.plots import Artist


class Drawing:
    """A process that draws until it is told to be done."""

    started: list[Drawing]
    pid = 12345

    def __init__(self, command: list[str], **_: object):
        self.command, self.done = command, False
        self.started.append(self)

    def poll(self) -> int | None:
        return 0 if self.done else None

    def kill(self) -> None:
        self.done = True

    def wait(self) -> int:
        assert self.done  # nothing waits for a chart
        return 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """Time that a test sets, and the processes that were started."""
    now = [100.0]
    Drawing.started = []
    monkeypatch.setattr(artist.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(artist.subprocess, "Popen", Drawing)
    return now


def test_pictures_keep_their_distance(clock: list[float], tmp_path: Path) -> None:
    drawer = Artist(tmp_path / "events.jsonl", tmp_path / "loss.png", "run")
    drawer.draw_soon()
    assert Drawing.started == []  # a short run is drawn at its end
    clock[0] += artist.FIRST_S
    drawer.draw_soon()
    drawer.draw_soon()
    [first] = Drawing.started
    assert first.command[-3:] == [str(tmp_path / "events.jsonl"), str(tmp_path / "loss.png"), "run"]
    clock[0] += 1.0
    first.done = True
    drawer.draw_soon()
    assert len(Drawing.started) == 1  # it took a second: the next one waits for 50
    clock[0] += artist.REST + 1
    drawer.draw_soon()
    assert len(Drawing.started) == 2
    unfinished = tmp_path / f".loss.png.{Drawing.pid}.tmp"
    unfinished.touch()
    drawer.close()
    assert Drawing.started[1].done
    assert not unfinished.exists()
    drawer.close()


def test_a_picture_is_drawn_in_time_where_nothing_is_evaluated_or_saved(clock: list[float], tmp_path: Path) -> None:
    drawer = Artist(tmp_path / "events.jsonl", tmp_path / "loss.png", "run")
    drawer.draw_when_late()
    assert Drawing.started == []
    clock[0] += artist.LATE_S + 1
    drawer.draw_when_late()
    drawer.draw_when_late()
    assert len(Drawing.started) == 1


def test_what_the_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, png = tmp_path / "events.jsonl", tmp_path / "loss.png"
    events.write_text("".join(json.dumps({"event": "step", "step": n, "loss": 3.0, "lr": 1e-3}) + "\n" for n in (1, 2)))
    niced: list[int] = []
    monkeypatch.setattr(os, "nice", niced.append)
    monkeypatch.setattr(sys, "argv", ["artist", str(events), str(png), "run"])
    artist.main()
    assert niced == [19]
    assert png.read_bytes().startswith(b"\x89PNG")
