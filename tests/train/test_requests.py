"""Requests to a run while it trains, with an engine without torch. `full` also holds runs under three plans."""

from __future__ import annotations

import filecmp
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.train.conftest import SMALL
from tests.train.fake_engine import FakeEngine
from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import list_checkpoints
from weft.config.files import load_config
from weft.errors import ActionAsked
from weft.monitor.alerts import RunRequest, ask
from weft.monitor.events import read_events
from weft.train.hooks import steps_left_out
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank

ENGINE = "tests.train.fake_engine:FakeEngine"


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Train a line for 12 steps. requests: by the step during which each is made. Return (folder, result or error)."""

    def run(name: str, requests: dict[int, RunRequest], *settings: str):
        words = ["task=tests.train.fake_engine:LineTask", f"run.dir={tmp_path}", f"run.name={name}", "eval.every=4",
                 "train.steps=12", "train.global_batch=8", "checkpoint.every=3", "schedule.kind=constant",
                 "schedule.warmup_steps=0", "optimizer.lr=0.05", "checkpoint.keep=9",
                 "checkpoint.keep_best=false", *settings]  # fmt: skip
        folder = prepare_run(load_config(None, words).config, world_size=1)
        step, rates = FakeEngine.step, []

        def asked_step(engine, batches, number, lr_factor, following=None):
            rates.append(lr_factor)
            if number + 1 in requests:
                ask(folder.path, requests.pop(number + 1))
                end = time.monotonic() + 10
                while not engine.asks and time.monotonic() < end:  # until the request thread has received it
                    time.sleep(0.01)
            return step(engine, batches, number, lr_factor)

        monkeypatch.setattr(FakeEngine, "step", asked_step)
        try:
            found = run_rank(folder, None, io.StringIO(), Start(engine=ENGINE))
        except ActionAsked as asked:
            found = asked
        monkeypatch.setattr(FakeEngine, "step", step)
        return folder, found, rates

    return run


def saved(folder) -> list[int]:
    return [step_in_name(path.name) for path in list_checkpoints(folder.checkpoints)]


def actions(folder) -> list[tuple[str, int]]:
    return [(event["action"], event["step"]) for event in read_events(folder.events) if event["event"] == "action"]


def test_requested_checkpoint_changes_nothing_else(fit):
    plain, *_ = fit("plain", {})
    folder, result, _ = fit("asked", {5: RunRequest("checkpoint", "to look at it")})
    assert (result.step, result.reason) == (12, "finished")
    assert saved(folder) == [3, 5, 6, 9, 12]
    assert actions(folder) == [("checkpoint", 5)]
    for path in sorted((plain.path / "checkpoints" / "step_00000012").glob("*.safetensors")):
        assert filecmp.cmp(path, folder.path / "checkpoints" / "step_00000012" / path.name, shallow=False)


def test_held_run_saves_and_resumes_unchanged(fit):
    plain, *_ = fit("plain", {})
    folder, asked, _ = fit("held", {5: RunRequest("hold", "the loss is odd", "alert odd")})
    assert isinstance(asked, ActionAsked)
    assert (asked.action, asked.step, asked.exit_code) == ("hold", 5, 3)
    assert str(asked) == f"paused at step 5 (alert odd: the loss is odd). To continue: weft runs resume {folder.path}"
    assert saved(folder) == [3, 5]
    folder, result, _ = fit("held", {})
    assert (result.step, result.reason) == (12, "finished")
    for path in sorted((plain.path / "checkpoints" / "step_00000012").glob("*.safetensors")):
        assert filecmp.cmp(path, folder.path / "checkpoints" / "step_00000012" / path.name, shallow=False)


def test_requested_stop_reports_the_requester(fit):
    folder, result, _ = fit("stop", {4: RunRequest("stop")})
    assert (result.step, result.reason) == (4, "asked to stop by a person")
    assert saved(folder) == [3, 4]


def test_lowered_learning_rate_persists_over_restarts(fit):
    folder, _, rates = fit("low", {3: RunRequest("lower_lr", factor=0.5), 6: RunRequest("stop")})
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    _, _, rates = fit("low", {})
    assert rates == [0.5] * 6
    lrs = [event["lr"] for event in read_events(folder.events) if event["event"] == "step"]
    assert np.allclose(lrs, [0.05] * 3 + [0.025] * 9)


def test_rollback_sets_checkpoints_aside_and_may_skip_data(fit):
    folder, asked, _ = fit("back", {8: RunRequest("skip_data", "a spike", since=6)})
    assert (asked.action, asked.exit_code) == ("roll_back", 75)
    assert saved(folder) == [3]
    assert steps_left_out(folder) == {6, 7, 8}
    folder, result, _ = fit("back", {})
    assert result.reason == "finished"
    steps = [event["step"] for event in read_events(folder.events) if event["event"] == "step"]
    assert steps == [*range(1, 9), 4, 5, 9, 10, 11, 12]


def test_second_rollback_to_the_same_step_becomes_a_hold(fit):
    request = RunRequest("roll_back", "a spike", since=5)
    _, first, _ = fit("again", {6: request})
    folder, second, _ = fit("again", {6: request})
    assert (first.action, second.action) == ("roll_back", "hold")
    assert "there is no older checkpoint to try" in str(second)
    assert saved(folder)[0] == 3


def test_rollback_without_older_checkpoint_becomes_a_hold(fit):
    folder, asked, _ = fit("early", {2: RunRequest("roll_back", "nan", since=1)})
    assert asked.action == "hold"
    assert not (folder.path / "rolled_back.json").exists()


def test_figures_are_logged_and_can_be_disabled(fit):
    folder, *_ = fit("on", {})
    (event, *_), kinds = ([e for e in read_events(folder.events) if e["event"] == "figures"],
                          [e["event"] for e in read_events(folder.events)])  # fmt: skip
    assert {"busy_s", "process.memory_bytes", "disk.free_bytes"} <= event["figures"].keys()
    assert kinds[-1] == "end"
    folder, *_ = fit("off", {}, "monitor.figures=false")
    assert "figures" not in [event["event"] for event in read_events(folder.events)]


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3", "tp=2", "pp=2 microbatches=2"])
def test_hold_by_an_alert_is_bitwise_neutral(plan, tmp_path, text):
    """An alert requests a hold, the ranks end while the run is held, and `weft runs resume` restarts it."""
    config = tmp_path / "run.toml"
    config.write_text('[[alert]]\nname = "now"\nwhen = "step >= 4"\nactions = ["hold"]\nquiet = "1h"\n')
    words = [f"plan={plan}", f"data.train={text}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}",
             *SMALL, "model.num_kv_heads=2", "train.steps=300", "checkpoint.every=100", "eval.every=0",
             "sample.prompt="]  # fmt: skip
    weft = [sys.executable, "-m", "weft"]
    subprocess.run([*weft, "train", *words, "run.name=plain"], check=True, capture_output=True, timeout=900)
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen([*weft, "train", str(config), *words, "run.name=held"], stdout=out, stderr=out)
        try:
            note, end = tmp_path / "held" / "held.json", time.monotonic() + 600
            while not note.exists() and process.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.1)
            assert json.loads(note.read_text())["step"] < 300, (tmp_path / "out").read_text()
            beside = psutil.Process(process.pid).children(recursive=True)
            assert not [one.pid for one in beside if one.name().startswith("weft-rank-")]
            subprocess.run([*weft, "runs", "resume", str(tmp_path / "held")], check=True, timeout=120)
            assert process.wait(900) == 0, (tmp_path / "out").read_text()
        finally:
            process.kill()
    ends = [tmp_path / name / "checkpoints" / "step_00000300" for name in ("plain", "held")]
    for path in sorted(Path(ends[0]).rglob("*.safetensors")):
        assert filecmp.cmp(path, ends[1] / path.relative_to(ends[0]), shallow=False)
    kinds = [event["event"] for event in read_events(tmp_path / "held" / "events.jsonl")]
    assert [kind for kind in kinds if kind in ("action", "held", "go_on")] == ["action", "held", "go_on"]
