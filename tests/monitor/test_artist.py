"""Background plotting of a run: rarely, one process at a time, from the run's event log."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from weft.monitor import plots as artist
from weft.monitor.plots import Artist


class PlotProcess:
    """A fake plot process that runs until `done` is set."""

    started: list[PlotProcess]
    pid = 12345

    def __init__(self, command: list[str], **_: object):
        self.command, self.done = command, False
        self.started.append(self)

    def poll(self) -> int | None:
        return 0 if self.done else None

    def kill(self) -> None:
        self.done = True

    def wait(self) -> int:
        assert self.done  # nothing waits for a plot
        return 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """A settable clock; plot processes are recorded and not started."""
    now = [100.0]
    PlotProcess.started = []
    monkeypatch.setattr(artist.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(artist.subprocess, "Popen", PlotProcess)
    return now


def test_plots_are_spaced_in_time(clock: list[float], tmp_path: Path) -> None:
    drawer = Artist(tmp_path / "events.jsonl", tmp_path / "loss.png", "run")
    drawer.draw_soon()
    assert PlotProcess.started == []  # a short run is plotted at its end
    clock[0] += artist.FIRST_S
    drawer.draw_soon()
    drawer.draw_soon()
    [first] = PlotProcess.started
    assert first.command[-3:] == [str(tmp_path / "events.jsonl"), str(tmp_path / "loss.png"), "run"]
    clock[0] += 1.0
    first.done = True
    drawer.draw_soon()
    assert len(PlotProcess.started) == 1  # it took 1 s, so the next one waits 50 s
    clock[0] += artist.REST + 1
    drawer.draw_soon()
    assert len(PlotProcess.started) == 2
    unfinished = tmp_path / f".loss.png.{PlotProcess.pid}.tmp"
    unfinished.touch()
    drawer.close()
    assert PlotProcess.started[1].done
    assert not unfinished.exists()
    drawer.close()


def test_plot_is_made_in_time_without_evaluations_or_saves(clock: list[float], tmp_path: Path) -> None:
    drawer = Artist(tmp_path / "events.jsonl", tmp_path / "loss.png", "run")
    drawer.draw_when_late()
    assert PlotProcess.started == []
    clock[0] += artist.LATE_S + 1
    drawer.draw_when_late()
    drawer.draw_when_late()
    assert len(PlotProcess.started) == 1


def test_plot_process_is_niced_and_writes_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, png = tmp_path / "events.jsonl", tmp_path / "loss.png"
    events.write_text("".join(json.dumps({"event": "step", "step": n, "loss": 3.0, "lr": 1e-3}) + "\n" for n in (1, 2)))
    niced: list[int] = []
    monkeypatch.setattr(os, "nice", niced.append)
    monkeypatch.setattr(sys, "argv", ["artist", str(events), str(png), "run"])
    artist.main()
    assert niced == [19]
    assert png.read_bytes().startswith(b"\x89PNG")
