from __future__ import annotations

import math
import struct
import zlib

import pytest

from weft.errors import DataError
from weft.monitor import plots as plot
from weft.monitor.events import StepRecord
from weft.monitor.plots import plot_loss, smoothed


def step(number: int, loss: float, **more) -> dict[str, object]:
    fields = {"lr": 1e-3 / number, "grad_norm": 1.0, "count": 1, "count_per_s": 1.0}
    return StepRecord(step=number, loss=loss, **{**fields, **more}).to_event()


def size(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert zlib.crc32(data[-8:-4]) == int.from_bytes(data[-4:], "big")  # IEND: the file is complete.
    return struct.unpack(">II", data[16:24])


def test_plot_is_a_png_of_readable_size(tmp_path):
    events = [step(n, 8 / n**0.3) for n in range(1, 200)]
    events[50] = step(51, math.nan, skipped="the loss is nan")
    events += [{"event": "eval", "step": n, "loss": 3.0 - n / 200} for n in (50, 100, 150)]
    events += [{"event": "eval", "step": 199, "loss": "nan"}, {"event": "note", "text": "x"}]
    path = plot_loss(events, tmp_path / "loss.png", title="quickstart")
    width, height = size(path)
    assert width >= 1000
    assert height >= 500
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize(
    "losses",
    [
        [3.0],
        [3.0, 2.0],
        [math.nan],
        [math.nan] * 20,
        [0.0, 0.0, 0.0],
        [-1.0, 2.0, 500.0],
        [1e-9, 1e9, 3.0],
        [1e300] * 5,
    ],
    ids=str,
)
def test_unusual_runs_can_be_plotted(tmp_path, losses):
    size(plot_loss([step(n, loss, lr=0.0) for n, loss in enumerate(losses, start=1)], tmp_path / "loss.png"))


def test_plotted_values(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = {}
    plot = Axes.plot

    def watched(axis, x, y, *arguments, **options):
        drawn[options.get("label", "lr")] = (list(x), list(y))
        return plot(axis, x, y, *arguments, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    events = [step(1, 9.0), step(2, 8.0), step(3, 7.0), {"event": "resume", "step": 1}, step(2, 5.0), step(3, 4.0)]
    events += [step(4, math.inf, skipped="the loss is inf"), {"event": "eval", "step": 4, "loss": 4.5}]
    plot_loss(events, tmp_path / "loss.png")
    at, losses = drawn["train, each step"]
    assert at == [1, 2, 3, 4]
    assert losses[:3] == [9.0, 5.0, 4.0]
    assert math.isnan(losses[3])
    assert drawn["eval, lowest 4.500 at step 4"] == ([4], [4.5])
    assert drawn["skipped (1)"][0] == [4]
    assert drawn["lr"][1] == pytest.approx([1e-3, 5e-4, 1e-3 / 3, 2.5e-4])


def test_subtitle_describes_the_run():
    start = {"event": "start", "model": "tiny: 6 M parameters", "plan": "dp_shard=2", "world_size": 2, "device": "cpu"}
    events = [{**start, "plan": "dp_replicate=2"}, start, step(1, 3.0)]
    assert plot._subtitle(events, {"step": 1200, "time": 1.7e9}) == (
        "tiny: 6 M parameters · dp_shard=2 on 2 cpu ranks · 1,200 steps · 2023-11-14"
    )
    assert plot._subtitle([], {"step": 3}) == "3 steps"


def test_plot_of_nothing_or_to_missing_folder_raises(tmp_path):
    with pytest.raises(DataError, match=r"no step has been recorded, so there is nothing to draw\."):
        plot_loss([{"event": "note"}], tmp_path / "loss.png")
    with pytest.raises(DataError, match="the plot cannot be written"):
        plot_loss([step(1, 2.0)], tmp_path / "missing" / "loss.png")


def test_smoothing_neither_lags_nor_bends_at_the_end():
    falling = [10.0 - n for n in range(10)]
    assert smoothed(falling, 2)[:8] == falling[:8]  # A straight line stays unchanged.
    assert smoothed([1.0, 1.0, 1.0, 1.0, 9.0], 4)[-1] == pytest.approx(13 / 5)
    assert smoothed([1.0, math.nan, 3.0], 1) == [1.0, 2.0, 3.0]
    assert math.isnan(smoothed([math.nan], 3)[0])
    assert smoothed([], 3) == []
