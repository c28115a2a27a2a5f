"""`weft sweep` with real runs: kill -9 at random moments, and equality with one run of the same length."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from weft import env

ROOT = Path(__file__).parents[2]
CONFIG = """
plan = "dp_replicate=1"
data = {train = ["TEXT"], holdout = 0.2}
tokenizer = {kind = "bytes"}
model = {dim = 32, num_layers = 1, num_heads = 2, num_kv_heads = 2, ffn_dim = 64}
train = {steps = 16, seq_len = 32, global_batch = 4}
eval = {every = 0, batches = 2}
checkpoint = {every = 3}
launch = {device = "cpu"}
"""
SWEEP = """
config = "config.toml"
trials = 4
on = "local:2"
[halving]
rungs = 2
[search]
"optimizer.lr" = {low = 1e-4, high = 1e-1, log = true}
"schedule.kind" = ["cosine", "constant"]
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weft", *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=env.child_env(WEFT_HOME=str(folder / "home"), PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1", CI="1"),
    )  # fmt: skip


def outcomes(folder: Path) -> dict[str, object]:
    """Return the values and the rung results of a sweep, without times."""
    found: dict[str, object] = {path.name: path.read_text() for path in folder.glob("generations/*")}
    for path in sorted(folder.glob("rungs/*/results.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [(line["item"], line["result"]["value"], line["result"]["curve"]) for line in lines]
    return found


def weights_in(run: Path) -> dict[str, bytes]:
    """Return the files of the last step's weights, {} if the run did not get there."""
    return {path.name: path.read_bytes() for path in (run / "checkpoints" / "step_00000016").glob("*.safetensors")}


@pytest.mark.full
def test_a_real_sweep_through_kills(tmp_path):
    words = [" ".join(f"{(i * k) % 7}" for k in range(1, 60)) for i in range(1, 41)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in words))
    (tmp_path / "config.toml").write_text(CONFIG.replace("TEXT", str(tmp_path / "text.jsonl")))
    (tmp_path / "s.toml").write_text(SWEEP)
    out, _ = (first := start(tmp_path, "sweep", "s.toml", "--out", "undisturbed")).communicate(timeout=600)
    assert first.returncode == 0, out
    rng = random.Random(5)
    for _ in range(4):
        process = start(tmp_path, "sweep", "s.toml", "--out", "killed")
        try:
            process.wait(rng.uniform(5, 25))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
    out, _ = (last := start(tmp_path, "sweep", "s.toml", "--out", "killed")).communicate(timeout=600)
    assert last.returncode == 0, out
    assert outcomes(tmp_path / "killed") == outcomes(tmp_path / "undisturbed")
    # The best trial was paused at a rung. It equals one run of the same settings.
    best = tmp_path / "undisturbed" / "best.toml"
    out, _ = (whole := start(tmp_path, "train", str(best))).communicate(timeout=300)
    assert whole.returncode == 0, out
    expected = weights_in(tmp_path / "runs" / "undisturbed-best")
    assert expected
    assert expected in [weights_in(folder) for folder in (tmp_path / "undisturbed" / "trials").iterdir()]
