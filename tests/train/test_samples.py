"""Samples of a run: the training ranks generate them, and training continues with the same numbers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import conftest as train_fixtures
from weft import env
from weft.config.files import load_config
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.tasks.generation import open_text_model

no_plots = train_fixtures.no_plots
SETTINGS = ["model.dim=16", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_dim=24",
            "model.max_seq_len=32", "tokenizer.kind=bytes", "data.train=text.txt", "data.cache_dir=cache",
            "train.seq_len=16", "train.global_batch=4", "train.steps=4", "eval.every=0", "optimizer.lr=0.01",
            "sample.max_tokens=9", "sample.temperature=0", "launch.device=cpu", "run.dir=runs",
            "monitor.figures=false"]  # fmt: skip
EXPERTS = ["model.num_experts=4", "model.top_k=2", "model.expert_ffn_dim=16", "model.capacity_factor=1.0"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"warp {number} and weft " for number in range(100)))
    return tmp_path


def trained(name: str, *more: str) -> tuple[RunFolder, str]:
    """Train on one rank, and return the run with its output."""
    found = prepare_run(load_config(None, [*SETTINGS, f"run.name={name}", *more]).config, world_size=1)
    run_rank(found.path, None, output := io.StringIO())
    return found, output.getvalue()


def weights(run: RunFolder, step: int = 4) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run.checkpoint(step).glob("*.safetensors"))]


def samples(run: RunFolder) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(run.path.glob("samples/*"))}


@pytest.mark.parametrize("more", [(), ("plan=precision=bf16 recompute=full",), tuple(EXPERTS)])
def test_training_with_samples_equals_training_without(more):
    plain, _ = trained("plain", "sample.prompt=", *more)
    run, output = trained("samples", "sample.every=2", "sample.prompt=warp", *more)
    assert weights(plain) == weights(run)
    assert not samples(plain)
    assert list(samples(run)) == ["step_00000002.txt", "step_00000004.txt"]
    assert all(text.startswith("warp") and len(text) > len("warp\n") for text in samples(run).values())
    assert "sample  warp" in output


def test_the_sample_equals_text_from_the_checkpoint():
    run, _ = trained("run", "sample.prompt=weft 7 a", "sample.temperature=0.9", "sample.top_k=20")
    found = open_text_model(run).continue_text("weft 7 a", run.config().sample)
    assert samples(run) == {"step_00000004.txt": f"weft 7 a{found}\n"}


def test_prompts_that_leave_no_room_give_no_sample():
    run, output = trained("run", "sample.prompt=" + "a" * 40)
    assert not samples(run)
    assert "done" in output


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["pp=2 microbatches=2", "tp=2", "tp=2 sp=on", "dp_shard=2 zero=3", "dp_shard=2 zero=3 offload=params",
             "cp=2", "dp_replicate=2 compile=on"]
)  # fmt: skip
def test_two_ranks_write_the_samples_of_one(folder, plan):
    one, _ = trained("one", "sample.every=2", "sample.prompt=warp", "plan=precision=fp64")
    for name, more in (("two", ["sample.every=2", "sample.prompt=warp"]), ("plain", ["sample.prompt="])):
        words = [*SETTINGS, *more, f"run.name={name}", "launch.ranks=2", f"plan={plan} precision=fp64"]
        done = subprocess.run([sys.executable, "-m", "weft", "train", *words], env=env.child_env(OMP_NUM_THREADS="1"),
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, json.dumps(done.stdout + done.stderr)
    two, plain = RunFolder(folder / "runs" / "two"), RunFolder(folder / "runs" / "plain")
    assert samples(two) == samples(one)
    assert weights(two) == weights(plain)
