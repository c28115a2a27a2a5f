"""`launch.evaluate_on=cpu`: checkpoints are evaluated in another process while training goes on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from weft.checkpoint.load import load_checkpoint
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.monitor.events import read_events
from weft.train.engine import Evaluation
from weft.train.folder import RunFolder
from weft.train.hooks import Progress, SaveEnd
from weft.train.loop.cpu_evaluation import CpuEvaluator
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank

pytestmark = pytest.mark.usefixtures("forked_programs")

TASK = ["task=tests.train.table_task:RatingTask", "train.steps=6", "train.global_batch=16", "eval.every=3",
        "checkpoint.every=3", "checkpoint.keep=1", "launch.device=cpu", "optimizer.lr=0.01"]  # fmt: skip
APART = "launch.evaluate_on=cpu"


@pytest.fixture
def start(tmp_path: Path):
    def train(name: str, *overrides: str) -> RunFolder:
        config = load_config(None, [*TASK, f"run.dir={tmp_path}", f"run.name={name}", *overrides]).config
        folder = prepare_run(config, world_size=1)
        run_rank(folder, None, io.StringIO())
        return folder

    return train


def evaluations(folder: RunFolder) -> list[dict[str, object]]:
    found = [event for event in read_events(folder.events) if event["event"] == "eval"]
    return [{key: value for key, value in event.items() if key != "time"} for event in found]


def test_results_equal_those_of_ranks_and_a_lost_one_is_repeated(start):
    expected = evaluations(start("ranks", "plan=accumulation=2"))
    run = start("cpu", "plan=accumulation=2", APART)
    assert [one["step"] for one in expected] == [3, 6]
    assert evaluations(run) == expected
    # A run that ended before its evaluation of step 3 was written.
    events = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(line for line in events if '"eval"' not in line))
    start("cpu", "plan=accumulation=2", APART, "train.steps=9")
    assert [one["step"] for one in evaluations(run)] == [6, 9]
    assert evaluations(run)[0] == expected[1]
    best = min(evaluations(run), key=lambda one: one["loss"])
    CpuEvaluator(run, run.config(), Plan()).resume(progress := Progress(step=9))
    assert (progress.best_step, progress.best_loss) == (best["step"], best["loss"])


def test_failed_evaluation_is_a_warning_and_training_goes_on(start, monkeypatch):
    monkeypatch.setattr("weft.train.loop.cpu_evaluation._PROGRAM", "tests.train.no_such_program")
    run = start("fails", APART)
    warnings = [event for event in read_events(run.events) if event["event"] == "warning"]
    assert [(one["step"], one["text"].partition(": ")[0]) for one in warnings] == [
        (3, "step 3 is not evaluated"), (6, "step 6 is not evaluated"),
    ]  # fmt: skip
    assert "No module named tests.train.no_such_program (logs/evaluation.log)" in warnings[0]["text"]
    assert load_checkpoint(run.checkpoint(6)).step == 6


def test_checkpoint_that_waits_is_kept_and_gives_way_to_a_newer_one(start, monkeypatch):
    monkeypatch.setattr("weft.train.loop.cpu_evaluation._PROGRAM", "tests.train.constant_evaluation")
    run = start("waits", "checkpoint.keep=9", "train.steps=9", "eval.every=9")
    config = load_config(None, [*TASK, "train.steps=9", APART]).config
    evaluator = CpuEvaluator(run, config, Plan())
    evaluator.resume(Progress())
    try:
        for step in (3, 6, 9):
            evaluator.on_checkpoint(SaveEnd(step, run.checkpoint(step)))
        assert [step for step in range(12) if evaluator.keeps(step)] == [3, 9]
        assert evaluator.take() == [(6, "the CPU still evaluates step 3, and step 9 is newer")]
        found = []
        while evaluator.is_busy:
            evaluator.wait(30)
            found += evaluator.take()
        assert found == [(3, Evaluation(0.5, 3)), (9, Evaluation(0.5, 9))]
        assert not evaluator.keeps(9)
    finally:
        evaluator.close()


def test_task_that_evaluates_only_in_its_step_is_refused(tmp_path: Path):
    config = load_config(None, [f"run.dir={tmp_path}", "adapter.rank=2", APART, "launch.device=cpu"]).config
    with pytest.raises(ConfigError) as caught:
        prepare_run(config, world_size=1)
    assert str(caught.value) == (
        "launch.evaluate_on=cpu: a run with an adapter is evaluated only while it trains. Use launch.evaluate_on=ranks."
    )
