"""The live panel on a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import pty
import random
import re
import signal
import struct
import termios
import threading
import time

import pytest
from rich.cells import cell_len
from rich.progress_bar import ProgressBar

from weft.monitor.events import StepRecord
from weft.monitor.live import LiveDisplay, LossCurve, make_display

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record(step: int, **more) -> StepRecord:
    fields = {"loss": 4.312, "lr": 8.2e-4, "grad_norm": 0.912, "count": 4096, "count_per_s": 12_345.0, "mfu": 0.412}
    return StepRecord(step=step, **{**fields, "memory_bytes": int(1.2 * 2**30), **more})


class Terminal:
    """A pseudo-terminal of a given width whose output is collected in the background."""

    def __init__(self, columns: int):
        self.leader, follower = pty.openpty()
        self.stream = os.fdopen(follower, "w", encoding="utf-8")
        self.resize(columns)
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self.leader, 65536)
            except OSError:
                return
            if not part:
                return
            self._parts.append(part)

    def raw(self) -> str:
        return b"".join(self._parts).decode(errors="replace")

    def wait_for(self, text: str) -> None:
        for _ in range(200):
            if text in self.plain():
                return
            time.sleep(0.02)
        raise AssertionError(f"{text!r} never came:\n{self.plain()[-2000:]}")

    def plain(self) -> str:
        return CONTROL.sub("", self.raw())

    def close(self) -> None:
        self.stream.close()
        self._reader.join(2)
        os.close(self.leader)


@pytest.fixture
def colour(monkeypatch):
    for name in ("CI", "NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("colour")
def test_panel_shows_numbers_and_survives_resizing():
    terminal = Terminal(80)
    with make_display(terminal.stream, total_steps=300, start_step=100) as display:
        assert isinstance(display, LiveDisplay)
        display.note("data: 3 files")
        for step in range(101, 121):
            display.step(record(step, loss=5.0 - step / 100))
        display.evaluation(110, 3.95, [(1.91, "bits/byte")])
        display.evaluation(120, 4.401, [(1.92, "bits/byte")])
        terminal.wait_for("eval 4.401")
        for columns in (120, 40, 12, 1, 200):
            terminal.resize(columns)
            if threading.current_thread() is threading.main_thread():
                os.kill(os.getpid(), signal.SIGWINCH)
            display.step(record(121, skipped="the loss is nan", loss=math.nan))
            time.sleep(0.3)
        display.step(record(122, loss=3.777))
    display.close()  # A second close is no error.
    terminal.close()
    text = terminal.plain()
    for part in (
        "step 120/300",
        "40%",
        "loss 3.800",
        "lr 8.2e-04",
        "grad 0.91",
        "12.3 k tok/s",
        "1.20 GiB",
        "mfu 41.2%",
    ):
        assert part in text, part
    assert "data: 3 files" in text
    assert "step 121/300  skipped: the loss is nan" in text
    assert "eval 4.401 · 1.920 bits/byte at step 120 · best 3.950 at 110" in text
    assert "loss 3.777" in text.splitlines()[-2]
    assert "Traceback" not in text
    raw = terminal.raw()
    assert raw.rfind("\x1b[?25h") > raw.rfind("\x1b[?25l")  # The cursor is shown again.


@pytest.mark.usefixtures("colour")
@pytest.mark.parametrize("columns", [60, 80, 132])
def test_panel_is_one_column_narrower_than_terminal(columns):
    terminal = Terminal(columns)
    with make_display(terminal.stream, total_steps=30) as display:
        for step in range(1, 31):
            display.step(record(step, loss=math.sin(step)))
        display.evaluation(30, 4.4, [(1.9, "bits/byte")])
    terminal.close()
    lines = [line for line in re.split(r"[\r\n]+", terminal.plain()) if line]
    assert lines
    assert max(cell_len(line) for line in lines) == columns - 1


@pytest.mark.usefixtures("colour")
def test_closed_terminal_does_not_end_the_run():
    terminal = Terminal(80)
    display = make_display(terminal.stream, total_steps=30)
    display.step(record(1))
    os.close(terminal.leader)
    for step in range(2, 10):
        display.step(record(step, skipped="x"))
        display.note("more")
    time.sleep(0.3)
    display.close()
    with contextlib.suppress(OSError):  # the remaining buffer cannot be written
        terminal.stream.close()


@pytest.mark.parametrize("width", [10, 20, 39, 50, 79, 80, 119, 200])
def test_every_line_fits_the_width_and_has_the_loss(width):
    display = LiveDisplay(io.StringIO(), total_steps=1_000_000, start_step=0)
    assert len(display.lines(width)) == 1
    for step in range(1, 700):
        display.step(record(step, loss=10 / step, loss_scale=65536.0))
    display.evaluation(400, 3.9, [(1.9, "bits/byte")])
    display.evaluation(500, 4.4, [(2.0, "bits/byte")])
    head, *rest = display.lines(width)
    assert isinstance(head, tuple)
    label, bar, tail = head
    assert isinstance(bar, ProgressBar)
    assert label.plain == "step 699/1000000 "
    if width >= 39:
        assert cell_len(label.plain) + (bar.width or 0) + cell_len(tail.plain) <= width
    assert len(rest) == 2
    for line in rest:
        assert 0 < cell_len(line.plain) <= width
    assert rest[0].plain.startswith("loss 0.01")
    assert ("best 3.900 at 400" in rest[1].plain) == (width >= 79)
    assert ("eval 4.400" in rest[1].plain) == (width >= 39)
    display.close()


def test_curve_follows_the_loss_and_is_bounded():
    curve = LossCurve(max_points=16)
    assert curve.draw(20) == ""
    for step in range(10_000):
        curve.add(10.0 - step / 1000)
        curve.add(math.nan)
    drawn = curve.draw(8)
    assert drawn == "█▇▆▅▄▃▂▁"
    assert len(curve.draw(1000)) <= 16
    flat = LossCurve()
    for _ in range(5):
        flat.add(2.0)
    assert set(flat.draw(80)) == {"▁"}


def test_curve_preserves_the_mean_of_all_steps():
    chance = random.Random(0)
    losses = [chance.random() for _ in range(1024)]
    curve = LossCurve(max_points=64)
    for loss in losses:
        curve.add(loss)
    assert sum(curve._points) / len(curve._points) == pytest.approx(sum(losses) / len(losses))


def panel(width: int, **more) -> list[str]:
    display = LiveDisplay(io.StringIO(), total_steps=300, **{"start_step": 0, **more})
    try:
        lines = display.lines(width)
    finally:
        display.close()
    return [line.plain if not isinstance(line, tuple) else line[0].plain + line[2].plain for line in lines]


def test_first_line_has_name_and_epoch():
    title = ("mine", "dp_shard=2 zero=2")
    assert panel(79, title=title, start_step=50, steps_per_epoch=100.0)[0] == "mine · epoch 1.50 · dp_shard=2 zero=2"
    assert panel(79, title=title)[0] == "mine · dp_shard=2 zero=2"
    assert panel(20, title=title, steps_per_epoch=100.0)[0] == "mine · epoch 1.00"


def test_long_phase_is_shown_instead_of_eta(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("weft.monitor.live.time.monotonic", lambda: now[0])
    display = LiveDisplay(io.StringIO(), total_steps=4, start_step=0)

    def tail() -> str:
        return display.lines(79)[0][2].plain

    display.phase("first step")
    now[0] += 1
    assert tail().endswith("0:01  first step")
    display.step(record(4))
    assert "eta" in tail()
    display.phase("evaluating")
    assert "eta" in tail()  # not yet: the phase may end in a moment
    now[0] += 1
    assert tail().endswith("100%  0:02  evaluating")
    display.phase("")
    assert "eta" in tail()
    display.close()


def test_curve_continues_after_resume():
    past = [{"event": "step", "step": step, "loss": 10.0 - step} for step in range(1, 9)]
    past += [{"event": "eval", "step": 4, "loss": 3.0}, {"event": "eval", "step": 8, "loss": 2.5}]
    assert panel(79, start_step=6, past=past)[-1] == "█▇▅▄▂▁   eval 3.000 at step 4"
    assert len(panel(79, start_step=6)) == 1


@pytest.mark.usefixtures("colour")
def test_narrower_terminal_keeps_no_row_of_the_old_panel(monkeypatch):
    monkeypatch.delenv("XTERM_VERSION", raising=False)
    terminal = Terminal(120)
    with make_display(terminal.stream, total_steps=30, title=("mine", "dp_replicate=2")) as display:
        assert isinstance(display, LiveDisplay)
        for step in range(1, 31):
            display.step(record(step, loss=math.sin(step)))
        time.sleep(0.4)
        live = display._live
        assert live._live_render.last_render_height == 4
        with live._lock:  # stop its own thread from drawing
            terminal.resize(80)
            live.process_renderables([])
            # The bar's line has become two rows; the other lines fit.
            assert live._live_render.last_render_height == 5
    terminal.close()
