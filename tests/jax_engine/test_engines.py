"""A run that changes engines: killed under one, resumed under the other, and equal to a run of torch alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("jax")

import torch

from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.object_store import located

_STEPS = 60
_SETTINGS = [
    "tokenizer.kind=bytes", "train.seq_len=16", "train.global_batch=4", f"train.steps={_STEPS}", "model.dim=16",
    "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=24", "model.max_seq_len=16",
    "checkpoint.every=2", "checkpoint.keep=100", "eval.every=0", "data.holdout=0", "launch.device=cpu",
]  # fmt: skip


def start(folder: Path, name: str, engine: str, plan: str) -> subprocess.Popen[bytes]:
    words = [f"run.dir={folder / 'runs'}", f"run.name={name}", f"launch.engine={engine}", f"plan={plan} precision=fp64"]
    data = [f"data.train={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]
    return subprocess.Popen([sys.executable, "-m", "weft", "train", *words, *data, *_SETTINGS])


def checkpoint(folder: Path, name: str, step: int) -> Path:
    return folder / "runs" / name / "checkpoints" / f"step_{step:08}"


def kill_at(folder: Path, name: str, engine: str, plan: str, step: int) -> None:
    """Train until a checkpoint of this step exists, and kill the process."""
    process = start(folder, name, engine, plan)
    while not (checkpoint(folder, name, step) / "COMMIT").exists():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def difference(folder: Path, one: str, other: str) -> float:
    """Return the largest relative difference of weights and optimizer states of two runs' last checkpoints."""
    ours, theirs = (load_checkpoint(located(str(checkpoint(folder, name, _STEPS)))) for name in (one, other))
    worst = 0.0
    for group in ("model", "optimizer"):
        mine, expected = ours.tensors(group), theirs.tensors(group)
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype
            apart = (mine[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-30)
            worst = max(worst, float(apart.to(torch.float64)))
    return worst


@pytest.mark.full
def test_killed_runs_change_engines(tmp_path: Path) -> None:
    chosen = random.Random(7)
    words = ["weft", "jax", "loom", "thread", "shuttle", "cloth"]
    lines = (" ".join(chosen.choices(words, k=12)) for _ in range(200))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    assert start(tmp_path, "alone", "torch", "").wait() == 0
    kill_at(tmp_path, "mixed", "jax", "dp_shard=2 zero=2", chosen.randrange(2, 10, 2))
    kill_at(tmp_path, "mixed", "torch", "", chosen.randrange(20, 30, 2))
    assert start(tmp_path, "mixed", "jax", "tp=2").wait() == 0
    assert difference(tmp_path, "mixed", "alone") <= 1e-10
