"""Fixtures: a small run in this process, on forty short documents."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from weft.checkpoint.peer_copies import CopyHome
from weft.config.files import load_config
from weft.train.loop import observers as recorder
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank

SMALL = [
    "tokenizer.kind=bytes",
    "model.name=tiny",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "train.seq_len=32",
    "train.global_batch=4",
    "train.steps=12",
    "schedule.warmup_steps=2",
    "eval.every=4",
    "eval.batches=2",
    "checkpoint.every=3",
    "data.holdout=0.2",
    "sample.max_tokens=8",
    "launch.device=cpu",
]


class NoArtist:
    """Replacement for the loss plotter that draws nothing."""

    def __init__(self, *words: object):
        pass

    def draw_soon(self) -> None:
        pass

    def draw_when_late(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def plots() -> None:
    """Request this fixture in a test that reads loss.png."""


@pytest.fixture(autouse=True)
def no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable loss plots, which take half of the time of such short runs."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr(recorder, "plot_loss", lambda *words, **more: None)
        monkeypatch.setattr(recorder, "Artist", NoArtist)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write forty short documents with some structure."""
    file = tmp_path / "text.jsonl"
    words = ["warp", "weft", "loom", "thread", "cloth", "shuttle", "heddle"]
    lines = [" ".join(words[(i * k) % 7] for k in range(1, 40)) for i in range(1, 41)]
    file.write_text("".join(json.dumps({"text": f"{index} {line}"}) + "\n" for index, line in enumerate(lines)))
    return file


@pytest.fixture
def start(tmp_path: Path, text: Path):
    """Prepare and train with overrides; return (folder, result, terminal output)."""

    def run(*overrides: str, copies: CopyHome | None = None):
        settings = [*SMALL, f"data.train={text}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
        folder = prepare_run(load_config(None, [*settings, *overrides]).config, world_size=1)
        terminal = io.StringIO()
        result = run_rank(folder.path, None, terminal, Start(copies=copies))
        return folder, result, terminal.getvalue()

    return run
