from __future__ import annotations

import io
import math
import time

import pytest

from weft.monitor.events import StepRecord
from weft.monitor.live import Eta, LiveDisplay, PlainDisplay, format_clock, format_loss, make_display


def record(step: int, **more) -> StepRecord:
    fields = {"loss": 4.312, "lr": 8.2e-4, "grad_norm": 0.912, "count": 4096, "count_per_s": 12_345.0}
    return StepRecord(step=step, **{**fields, "memory_bytes": int(1.2 * 2**30), **more})


def plain(total_steps: int = 300, **more) -> tuple[io.StringIO, PlainDisplay]:
    stream = io.StringIO()
    display = make_display(stream, total_steps=total_steps, **more)
    assert isinstance(display, PlainDisplay)
    return stream, display


def test_plain_line(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream, display = plain(start_step=100, every=10)
    for step in range(101, 121):
        now[0] += 0.25
        display.step(record(step))
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step 101/300  loss 4.312  lr 8.2e-04  grad 0.91  12.3 k tok/s  1.20 GiB  eta -:--",
        "step 110/300  loss 4.312  lr 8.2e-04  grad 0.91  12.3 k tok/s  1.20 GiB  eta 0:48",
        "step 120/300  loss 4.312  lr 8.2e-04  grad 0.91  12.3 k tok/s  1.20 GiB  eta 0:45",
    ]
    assert all(len(line) <= 100 for line in lines)


def test_first_last_skipped_and_every_nth_step_have_a_line():
    stream, display = plain(total_steps=25, every=10)
    for step in range(1, 26):
        display.step(record(step, skipped="the gradient norm is inf" if step == 7 else None, grad_norm=math.inf))
    starts = [line[:11].strip() for line in stream.getvalue().splitlines()]
    assert starts == ["step  1/25", "step  7/25", "step 10/25", "step 20/25", "step 25/25"]
    assert "step  7/25  skipped: the gradient norm is inf\n" in stream.getvalue()


def test_optional_values_are_shown_when_set():
    stream, display = plain(total_steps=5)
    display.step(record(1, mfu=0.4123, loss_scale=65536.0, loss=0.01234, grad_norm=12345.6))
    display.evaluation(5, 3.9, [(1.85, "bits/byte")])
    display.evaluation(5, math.nan)
    display.note("two\nlines")
    display.note("bell \a and \x1b[2J colour")
    assert stream.getvalue().splitlines() == [
        "step 1/5  loss 0.0123  lr 8.2e-04  grad 1.2e+04  12.3 k tok/s  1.20 GiB  mfu 41.2%  scale 65536  eta -:--",
        "eval 5/5  loss 3.900  1.850 bits/byte",
        "eval 5/5  loss nan",
        "two",
        "lines",
        "bell   and  [2J colour",
    ]


def test_display_kind_depends_on_stream(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    with make_display(Terminal(), total_steps=3) as display:
        assert isinstance(display, LiveDisplay)
    assert isinstance(make_display(io.StringIO(), total_steps=3), PlainDisplay)
    assert isinstance(make_display(Terminal(), total_steps=3, is_tty=False), PlainDisplay)
    monkeypatch.setenv("CI", "true")
    assert isinstance(make_display(Terminal(), total_steps=3), PlainDisplay)
    monkeypatch.delenv("CI")
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(Terminal(), total_steps=3), PlainDisplay)


def test_closed_pipe_does_not_end_the_run():
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    stream = Pipe()
    for is_tty in (False, True):
        with make_display(stream, total_steps=3, is_tty=is_tty) as display:
            display.step(record(1, skipped="x"))
            display.note("still here")
    stream.close()
    with make_display(stream, total_steps=3, is_tty=False) as display:
        display.step(record(1))


def test_characters_outside_the_encoding_are_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = make_display(stream, total_steps=3, is_tty=False)
    display.note("naïve ▁▂▃")
    display.step(record(1))
    assert raw.getvalue().startswith(b"na?ve ???\nstep 1/3")


def test_eta_counts_down_between_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    eta = Eta(100)
    assert eta.seconds() is None
    eta.observe(10)
    assert eta.seconds() is None
    now[0] = 20.0
    eta.observe(20)
    assert eta.seconds() == 160
    now[0] = 21.0
    assert eta.seconds() == 159
    now[0] = 500.0
    assert eta.seconds() == 158  # A hanging step must not reduce the remaining time.
    eta.observe(100)
    assert eta.seconds() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (41.4, "0:41"), (59.6, "1:00"), (4000, "1:06:40"), (200_000, "2d 7:33:20"), (math.inf, "-:--")],
)
def test_format_clock(seconds, text):
    assert format_clock(seconds) == text
    assert format_clock(None) == "-:--"


def test_format_loss():
    assert [format_loss(x) for x in (10.94, 4.3119, 0.0412, 0.0, math.inf)] == [
        "10.940", "4.312", "0.0412", "0.000", "inf",
    ]  # fmt: skip


@pytest.mark.parametrize("is_tty", [False, True])
def test_step_takes_less_than_200_us(is_tty):
    with make_display(io.StringIO(), total_steps=2000, is_tty=is_tty, every=1) as display:
        records = [record(step) for step in range(1, 2001)]
        began = time.perf_counter()
        for one in records:
            display.step(one)
        assert (time.perf_counter() - began) / len(records) < 0.2e-3


def test_one_long_pause_does_not_change_the_eta(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    eta = Eta(1000)
    for step in range(1, 201):
        now[0] += 450.0 if step == 120 else 3.0 if step % 25 == 0 else 0.5
        eta.observe(step)
    # 100 steps: 4 with an evaluation (3 s), and one pause that is clipped to the longest of these.
    assert eta.seconds() == pytest.approx(800 * (95 * 0.5 + 5 * 3.0) / 100, rel=0.01)
