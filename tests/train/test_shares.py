"""Runs with unequal shares: recorded, repeated after a resume, measured, and changed for a rank that becomes slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train import slow_ranks
from weft import env
from weft.config.partitioning import ShareTimeline
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import PlanError
from weft.monitor.events import read_events
from weft.monitor.stragglers import StragglerWatch
from weft.train.folder import RunFolder
from weft.train.hooks import Hook, Progress
from weft.train.shares.balancer import Balancer, LiveShares
from weft.train.shares.book import SHARES, ShareBook, data_rank_of

pytestmark = pytest.mark.usefixtures("forked_programs")

SETTINGS = [
    "launch.device=cpu", "tokenizer.kind=bytes", "model.dim=32", "model.num_layers=2", "model.num_heads=2",
    "model.num_kv_heads=1", "model.ffn_dim=64", "train.seq_len=32", "train.global_batch=8", "eval.every=0",
    "eval.batches=1", "data.holdout=0.2", "sample.prompt=", "checkpoint.verify=start",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    lines = [" ".join(str(index * step % 97) for step in range(1, 40)) for index in range(1, 41)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


def start(folder: Path, name: str, *settings: str, sleep: str = "0") -> subprocess.Popen[str]:
    places = [f"data.train={folder / 'text.jsonl'}", f"run.dir={folder}", f"run.name={name}"]
    return subprocess.Popen(
        [sys.executable, "-m", "weft", "train", *SETTINGS, *places, *settings],
        env=env.child_env(WEFT_HOME=str(folder / "home"), OMP_NUM_THREADS="1", **{slow_ranks.SLEEP: sleep}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finish(folder: Path, name: str, *settings: str, sleep: str = "0") -> tuple[RunFolder, str]:
    process = start(folder, name, *settings, sleep=sleep)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    return RunFolder(folder / name), shown


def losses(folder: RunFolder) -> dict[int, float]:
    """Return the loss of each step; repeated steps count once."""
    return {event["step"]: event["loss"] for event in read_events(folder.events) if event["event"] == "step"}


def final_bytes(folder: RunFolder, step: int) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.checkpoint(step).glob("*.safetensors"))]


@pytest.mark.full
def test_checkpoints_go_between_any_shares(text):
    """Continue one run under other shares, shards, ranks and ZeRO stages: every loss is that of one process."""
    numbers = ["train.steps=8", "checkpoint.every=1"]
    one, _ = finish(text, "one", "plan=precision=fp64", *numbers)
    for stop, plan in ((2, "dp_replicate=2 shares=5+3"), (4, "dp_shard=2 zero=2 shares=1+3 accumulation=2"),
                       (5, "dp_shard=2 zero=1 shard_shares=3+1"), (6, "dp_replicate=3 shares=1+2+3"),
                       (7, "dp_shard=3 zero=2 shard_shares=1+2+1 shares=1+2+1"), (8, "dp_shard=2 zero=1")):  # fmt: skip
        many, _ = finish(text, "many", f"plan={plan} precision=fp64", *numbers, f"train.stop_at={stop}")
    found, expected = losses(many), losses(one)
    assert sorted(found) == list(range(1, 9))
    assert found == pytest.approx(expected, rel=1e-9)


def test_recorded_changes_are_repeated_bit_by_bit(text):
    """Stop and resume a run whose shares changed: it repeats the changes, and ends with the bits of an undisturbed one.

    The record is written before the run, as an earlier start would have left it.
    """
    numbers = ["plan=dp_replicate=2", "balance=apply", "train.steps=6", "checkpoint.every=3"]
    record = {"ranks": 2, "plan": "none", "changes": [[0, []], [1, [3, 1]], [4, [1, 7]]]}
    for name in ("undisturbed", "resumed"):
        (text / name).mkdir()
        (text / name / SHARES).write_text(json.dumps(record))
    undisturbed, _ = finish(text, "undisturbed", *numbers)
    finish(text, "resumed", *numbers, "train.stop_at=3")
    resumed, shown = finish(text, "resumed", *numbers)
    assert "shares  3+1 (kept)" in shown
    assert final_bytes(resumed, 6) == final_bytes(undisturbed, 6)
    assert sorted(losses(resumed)) == list(range(1, 7))


@pytest.mark.full
def test_shares_are_measured_before_the_first_step(text):
    settings = ["plan=dp_replicate=2 shares=auto", "optimizer.name=tests.train.slow_ranks:SleepyAdamW"]
    folder, shown = finish(text, "auto", *settings, "train.steps=2", "train.stop_at=1", sleep="0.02,0.06")
    assert "shares  3+1 (measured)" in shown
    record = json.loads((folder.path / SHARES).read_text())
    assert record == {"ranks": 2, "plan": "auto", "changes": [[0, [3, 1]]]}
    # The ranks are equal now, and the run keeps its shares.
    _, again = finish(text, "auto", *settings, "train.steps=2")
    assert "shares  3+1 (kept)" in again


@pytest.mark.full
def test_killed_run_with_applied_shares_ends_with_equal_bits(text):
    """Slow a rank down, kill the run some steps after its shares changed, and resume it at another speed."""
    numbers = [
        "plan=dp_replicate=2", "balance=apply", "train.steps=100", "checkpoint.every=40", "monitor.every=1s",
        "optimizer.name=tests.train.slow_ranks:SleepyAdamW",
    ]  # fmt: skip
    process = start(text, "killed", *numbers, sleep="0.01,0.04")
    folder, deadline = RunFolder(text / "killed"), time.monotonic() + 90
    changed = 0
    while not changed:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        changed = next((event["step"] for event in read_events(folder.events) if event["event"] == "shares"), 0)
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    record = (folder.path / SHARES).read_text()
    assert changed == json.loads(record)["changes"][1][0]
    finish(text, "killed", *numbers)
    assert json.loads((folder.path / SHARES).read_text())["changes"][:2] == json.loads(record)["changes"]
    (text / "replayed").mkdir()
    (text / "replayed" / SHARES).write_text((folder.path / SHARES).read_text())
    replayed, _ = finish(text, "replayed", *numbers)
    assert final_bytes(folder, 100) == final_bytes(replayed, 100)


class _Pulse:
    def doing(self, what: str):
        raise AssertionError(what)


class _Engine:
    """An engine of one process that stands for rank 0."""

    def __init__(self, plan: Plan):
        self.plan, self.asks, self.ranks, self.pulse = plan, False, self, _Pulse()

    def on_first(self, act):
        return act()


def live(path: Path, plan: str, balance: str = "apply", batch: int = 16):
    engine, timeline = _Engine(Plan.parse(plan)), ShareTimeline(Plan.parse(plan).shares)
    book, progress = ShareBook(path, engine.plan, batch, timeline), Progress()
    book.open(engine, progress)
    config = RunConfig.model_validate({"plan": plan, "balance": balance, "train": {"global_batch": batch}})
    return engine, book, progress, Balancer(engine, book, config)


def reports(own_s: dict[int, list[float]], first: int) -> list[dict[str, object]]:
    return [
        {"pace": {"steps": {str(first + index): one * 1e6 for index, one in enumerate(seconds)}, "parts": {}}}
        for seconds in own_s.values()
    ]


def test_slow_rank_gets_fewer_samples_between_steps(tmp_path):
    engine, book, progress, balancer = live(tmp_path, "dp_replicate=4")
    watch = StragglerWatch([0, 0, 0, 0], balancer)
    (event,) = watch.observe(reports({0: [1.0] * 6, 1: [1.0] * 6, 2: [1.0] * 6, 3: [3.0] * 6}, 1))
    assert (event["rank"], event["shares"]) == (3, "5+5+5+1")
    assert "; shares=5+5+5+1 would take 42% of the time; they are applied between steps" in str(event["text"])
    assert engine.asks
    progress.step = 7
    told: list[object] = []
    hook = Hook()
    hook.on_shares = lambda *found: told.append(found)
    shares = LiveShares(engine, book, progress, balancer, hook)
    taken = shares.take()
    assert taken == [5, 5, 5, 1]
    assert shares.take() is None
    shares.change(taken)
    assert told == [(7, "5+5+5+1")]
    assert [book.timeline.at(step) for step in (6, 7)] == [(), (5, 5, 5, 1)]
    assert progress.shares == json.loads((tmp_path / SHARES).read_text())
    # Steps that began before the change are not compared with those after it.
    assert watch.observe(reports({0: [1.0] * 2, 1: [1.0] * 2, 2: [1.0] * 2, 3: [3.0] * 2}, 7)) == []
    assert watch.lag(3) is None


def test_told_shares_are_not_applied(tmp_path):
    engine, _, _, balancer = live(tmp_path, "dp_replicate=2", "tell")
    assert balancer.advise(10, [1.0, 3.0])["advice"] == (
        "shares=3+1 would take 50% of the time; use plan shares=3+1, or balance=apply"
    )
    assert balancer.advise(10, [1.0, 3.0])["shares"] == "3+1"
    assert not engine.asks
    assert balancer.take() is None
    # No advice for plans without shares, for even ranks, and without the times of all ranks.
    assert live(tmp_path, "dp_shard=2 zero=2 gather=diff4")[3].advise(10, [1.0, 3.0]) == {}
    assert balancer.advise(10, [1.0, 1.01]) == {}
    assert balancer.advise(10, [1.0, None]) == {}


def test_damaged_or_foreign_records_are_ignored(tmp_path):
    plan = Plan.parse("dp_replicate=2 shares=3+1")
    good = {"ranks": 2, "plan": "3+1", "changes": [[0, [3, 1]], [5, [1, 1]]]}
    bad = [
        "", "[]", "{", {**good, "ranks": 3}, {**good, "plan": "1+1"}, {**good, "changes": [[0, [3]]]},
        {**good, "changes": [[-1, [3, 1]]]}, {**good, "changes": [[0, [0, 1]]]}, {**good, "changes": [[True, [3, 1]]]},
        {**good, "changes": []}, {**good, "changes": [[0, "3+1"]]},
    ]  # fmt: skip
    for text in bad:
        (tmp_path / SHARES).write_text(text if isinstance(text, str) else json.dumps(text))
        book = ShareBook(tmp_path, plan, 8, ShareTimeline(plan.shares))
        book.open(_Engine(plan), Progress())
        assert book.timeline.changes == [(0, (3, 1))], text
    # The record of a checkpoint is used if the folder has none.
    (tmp_path / SHARES).unlink()
    book = ShareBook(tmp_path, plan, 8, ShareTimeline(plan.shares))
    assert book.open(_Engine(plan), Progress(step=6, shares=good)) == ["shares  1+1 (kept)"]
    assert book.timeline.changes == [(0, (3, 1)), (5, (1, 1))]


def test_engine_without_timed_passes_refuses_auto(tmp_path):
    plan = Plan.parse("dp_replicate=2 shares=auto")
    with pytest.raises(PlanError) as caught:
        ShareBook(tmp_path, plan, 8, ShareTimeline((1, 1))).open(_Engine(plan), Progress())
    assert str(caught.value) == (
        "shares=auto: this engine cannot measure its passes. Write numbers, such as shares=3+1."
    )


def test_data_rank_follows_the_order_of_axes():
    plan = Plan.parse("dp_replicate=2 dp_shard=2 zero=1 tp=2 order=tp+dp_shard+dp_replicate")
    assert [data_rank_of(plan, rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    plan = Plan.parse("pp=2 dp_replicate=2 tp=2")
    assert [data_rank_of(plan, rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
