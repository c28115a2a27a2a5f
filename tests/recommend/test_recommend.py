"""Recommenders trained under plans with sharded tables equal one process, and resume under other styles and ranks."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.choice import product
from tests.recommend.cases import MODELS, settings, write_jsonl
from weft import env
from weft.checkpoint.load import load_checkpoint
from weft.config.files import format_config, load_config
from weft.config.plan import Plan
from weft.monitor.events import read_events
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.verify.case_data import Settings
from weft.verify.subject import find_subject
from weft.verify.verifier import Verifier

#: Styles of each model's tables: all sharded by rows, or one sharded and the others replicated.
LAYOUTS = {
    "dlrm": ("tables.*=rows", "tables.user=rows tables.*=replicate"),
    "deepfm": ("tables.*=rows", "tables.item=rows tables.*=replicate"),
    "two_tower": ("*.tables.*=rows", "user.tables.user=rows item.tables.*=replicate"),
    "sasrec": ("tables.item=rows", "tables.item=rows pos_embed=replicate"),
    "sampled": ("tables.item=rows", "tables.item=one"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("records") / "events.jsonl")


@pytest.mark.parametrize(*product("optimizer, style, plan, name", ["rowwise_adagrad", "lazy_adamw"], [0, 1],
                                  ["dp_replicate=2", "dp_shard=2 zero=2 accumulation=2"], list(MODELS)))  # fmt: skip
def test_two_ranks_equal_one_process(name, plan, style, optimizer, data, tmp_path, ranks2):
    more = settings(name, data, data.parent, LAYOUTS[name][style], f"tables.optimizer={optimizer}")
    file = tmp_path / "run.toml"
    file.write_text(format_config(load_config(None, more).config))
    subject = find_subject(str(file), Settings(num_steps=3, global_batch=12))
    with Verifier(subject, 2, pool=ranks2) as verifier:
        verdict = verifier.verify(Plan.parse(plan))
    assert verdict.passed, verdict
    assert verdict.max_rel_diff < 1e-10


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.full) for one in MODELS if one != "two_tower"] +
                                 ["two_tower"])  # fmt: skip
def test_zero_3_without_a_layout_equals_one_process(name, data, tmp_path, ranks2):
    more = [one for one in settings(name, data, data.parent, "") if not one.startswith(("layout", "tables"))]
    file = tmp_path / "run.toml"
    file.write_text(format_config(load_config(None, more).config))
    with Verifier(find_subject(str(file), Settings(num_steps=3, global_batch=12)), 2, pool=ranks2) as verifier:
        verdict = verifier.verify(Plan.parse("dp_shard=2 zero=3"))
    assert verdict.passed, verdict
    assert verdict.max_rel_diff < 1e-10


def started(name: str, data: Path, folder: Path, *more: str) -> RunFolder:
    layout = "tables.user=rows tables.*=replicate"
    run = prepare_run(load_config(None, settings(name, data, folder, layout, *more)).config, world_size=1)
    run_rank(run, None, io.StringIO())
    return run


def weights(run: RunFolder, step: int) -> dict[str, torch.Tensor]:
    return load_checkpoint(run.checkpoint(step)).tensors("model")


def command(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "weft", "train", str(config), *more]


def run_command(arguments: list[str], folder: Path) -> str:
    surroundings = env.child_env(WEFT_HOME=str(folder / "home"), OMP_NUM_THREADS="1")
    done = subprocess.run(arguments, env=surroundings, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_run_learns_and_resumes_under_other_styles_with_equal_bits(data, tmp_path):
    more = ["train.steps=12", "eval.every=6"]
    run = started("deepfm", data, tmp_path, *more)
    first, *_, last = [event for event in read_events(run.events) if event["event"] == "eval"]
    assert last["loss"] < first["loss"]
    started("deepfm", data, tmp_path, *more, "run.name=halves", "train.stop_at=6")
    halves = started("deepfm", data, tmp_path, *more, "run.name=halves", "layout=tables.item=rows tables.*=one")
    once, again = weights(run, 12), weights(halves, 12)
    assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepfm", "two_tower", "sampled"])
def test_killed_run_resumes_under_other_styles_and_ranks(name, data, tmp_path):
    """Two ranks are killed after a checkpoint. One rank with other styles ends as an undisturbed run does."""
    plans = ("plan=dp_replicate=2 precision=fp64", "plan=dp_replicate=1 precision=fp64")
    rows, other = LAYOUTS[name]
    more = ["train.steps=120", "eval.every=60", "checkpoint.every=10"]
    config = tmp_path / "run.toml"
    config.write_text(format_config(load_config(None, settings(name, data, tmp_path, rows, *more)).config))
    process = subprocess.Popen(
        command(config, plans[0], "tables.prefetch=true", "run.name=killed"), stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT, env=env.child_env(WEFT_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1"),
        start_new_session=True,
    )  # fmt: skip
    saved, deadline = tmp_path / "killed" / "checkpoints", time.monotonic() + 120
    while not any(saved.glob("*/COMMIT")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    run_command(command(config, plans[1], f"layout={other}", "run.name=killed"), tmp_path)
    run_command(command(config, plans[1], "run.name=undisturbed"), tmp_path)
    resumed, plain = (RunFolder(tmp_path / one) for one in ("killed", "undisturbed"))
    found, expected = weights(resumed, 120), weights(plain, 120)
    assert found.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        assert float((found[tensor_name] - tensor).abs().max()) < 1e-9, tensor_name
    metrics, wanted = (
        [event for event in read_events(one.events) if event["event"] == "eval" and event["step"] == 120][-1]
        for one in (resumed, plain)
    )
    for key in ("loss", "auc", "recall_at_1", "ndcg_at_3"):
        if key in wanted:
            assert metrics[key] == pytest.approx(wanted[key], rel=1e-9)
