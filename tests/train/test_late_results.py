"""The loop with an engine that does not wait for its device: order of results, saves and stops."""

from __future__ import annotations

import contextlib
import functools
import math
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from weft.comm.heartbeat import Heartbeat
from weft.config.files import load_config
from weft.errors import TrainingHalted
from weft.monitor.events import read_events
from weft.monitor.step_times import Meter
from weft.train.engine import Evaluation, LateResult, StepResult
from weft.train.hooks import Hook
from weft.train.loop.callbacks import Checkpoints
from weft.train.loop.trainer import Trainer
from weft.train.step.train_step import TrainStep
from weft.train.step.update import WeightUpdate


class LateEngine:
    """Log calls in `acts`. bad: steps without a finite loss. late: whether results are late."""

    device, wants_stop, evaluates = "cpu", False, True

    def __init__(self, acts, *, bad=(), late=True, prefetches=False):
        self.acts, self.bad, self.late, self.prefetches = acts, bad, late, prefetches
        self.plan, self.pulse, self.meter = SimpleNamespace(compile=False, world_size=1), Heartbeat(), Meter()
        self.batches = SimpleNamespace(
            iterate=lambda start, end: contextlib.nullcontext([[step] for step in range(start, end)])
        )

    @property
    def reports(self):
        return SimpleNamespace(peak_flops=lambda: None)

    def step(self, batches, number, lr_factor, following=None):
        step = number + 1
        assert batches == [number]
        self.acts.append(f"launch {step}" if following is None else f"launch {step} before {following[0] + 1}")
        found = StepResult(math.nan if step in self.bad else 1.0, 1.0, 8, wants_stop=self.wants_stop)
        return LateResult(lambda: found) if self.late else found

    def trace(self, kind, number):
        return None

    def evaluate(self):
        self.acts.append("evaluate")
        return Evaluation(1.0, 1)


class Watcher(Hook):
    def __init__(self, acts, engine, asks_at=None):
        self.acts, self.engine, self.asks_at = acts, engine, asks_at

    def on_step(self, record):
        self.acts.append(f"see {record.step}")
        return "enough" if record.step == self.asks_at else None

    def on_end(self, step, reason):
        self.acts.append(f"end {step}")


def trained(*settings, left_out=(), asks_at=None, **engine_options):
    words = ["task=tests.train.fake_engine:LineTask", "train.steps=5", "train.global_batch=8", "checkpoint.every=0"]
    config = load_config(None, [*words, "eval.every=0", *settings]).config
    acts: list[str] = []
    engine = LateEngine(acts, **engine_options)

    class Saved(Checkpoints):
        def save(self, progress, is_good, *, last=False):
            acts.append(f"save {progress.step}")

    task = SimpleNamespace(config=config, unit="points", has_loss_level=True, flops_per_count=lambda: None)
    hooks = [Watcher(acts, engine, asks_at)]
    trainer = Trainer(task, engine, Saved(), hooks, left_out)  # pyright: ignore[reportArgumentType]
    try:
        acts.append(str(trainer.fit()))
    except TrainingHalted as halt:
        acts.append(f"halted, first bad {halt.__dict__['first_bad']}")
    return acts


def test_step_is_reported_at_next_launch_and_last_step_before_evaluation():
    assert trained("train.steps=3") == [
        "launch 1", "launch 2", "see 1", "launch 3", "see 2", "see 3", "evaluate", "save 3", "end 3", "finished",
    ]  # fmt: skip


def test_engine_that_prefetches_gets_the_next_step():
    assert trained("train.steps=4", late=False, prefetches=True, left_out={2}) == [
        "launch 1", "see 1", "launch 3 before 4", "see 3", "launch 4", "see 4", "evaluate", "save 4", "end 4",
        "finished",
    ]  # fmt: skip


def test_steps_of_a_waiting_engine_are_reported_immediately():
    assert trained("train.steps=2", late=False) == [
        "launch 1", "see 1", "launch 2", "see 2", "evaluate", "save 2", "end 2", "finished",
    ]  # fmt: skip


def test_step_is_reported_before_its_evaluation_and_save():
    acts = trained("train.steps=6", "eval.every=2", "checkpoint.every=3", "checkpoint.keep_best=false")
    assert acts == [
        "launch 1", "launch 2", "see 1", "see 2", "evaluate", "launch 3", "see 3", "save 3", "launch 4", "see 4",
        "evaluate", "launch 5", "launch 6", "see 5", "see 6", "evaluate", "save 6", "end 6", "finished",
    ]  # fmt: skip


@pytest.mark.parametrize(("bad", "every"), [(3, 3), (3, 4), (2, 3)])
def test_nothing_is_saved_after_a_halting_step(bad, every):
    """The step after the bad one may be launched but is never saved."""
    acts = trained("train.max_bad_steps=0", f"checkpoint.every={every}", bad=(bad,))
    assert acts[-1] == f"halted, first bad {bad}"
    assert f"see {bad}" in acts
    assert not any(act.startswith("save") for act in acts)


def test_skipped_steps_at_the_end_do_not_hide_results():
    acts = trained(left_out=(3, 5))
    assert [act for act in acts if act.startswith("see")] == ["see 1", "see 2", "see 4"]
    assert "end 5" in acts


@pytest.mark.parametrize(("late", "last"), [(False, 3), (True, 5)])
def test_hook_stop_request_ends_the_run_after_the_same_step_on_all_ranks(late, last):
    """The next launched step sends the request to all ranks; it is read one step later."""
    acts = trained("train.steps=9", asks_at=2, late=late)
    assert acts[-3:] == [f"save {last}", f"end {last}", "asked to stop"]
    assert [act for act in acts if act.startswith("see")] == [f"see {step}" for step in range(1, last + 1)]


def event_log(folder):
    """Return a run's events of steps and evaluations, without times."""
    keys = ("event", "step", "loss", "lr", "grad_norm", "tokens", "loss_scale", "skipped", "reason")
    events = [event for event in read_events(folder.events) if event["event"] in ("step", "eval", "end")]
    return [[str(event.get(key)) for key in keys] for event in events]


def test_device_decided_run_is_bitwise_equal(start, monkeypatch):
    settings = ("plan=precision=fp16", "train.steps=7", "checkpoint.every=3", "checkpoint.keep=9", "eval.every=5")
    usual, _, _ = start("run.name=usual", *settings)
    init = TrainStep.__init__
    decide, decided = WeightUpdate.apply_late, []

    def decide_late(update, numbers, measures):
        decided.append(numbers)
        return decide(update, numbers, measures)

    monkeypatch.setattr(TrainStep, "__init__", functools.partialmethod(init, reads_late=True))
    monkeypatch.setattr(WeightUpdate, "apply_late", decide_late)
    late, _, _ = start("run.name=late", *settings)
    assert len(decided) == 6  # all but the first
    assert event_log(late) == event_log(usual)
    saved = sorted(path.relative_to(usual.path) for path in usual.checkpoints.rglob("*.safetensors"))
    assert len(saved) >= 3
    for path in saved:
        ours, theirs = load_file(late.path / path), load_file(usual.path / path)
        assert ours.keys() == theirs.keys()
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items()), path


def test_failing_run_halts_at_the_same_step_and_saves_the_same(start, monkeypatch, tmp_path):
    settings = ("optimizer.lr=1e38", "schedule.kind=constant", "schedule.warmup_steps=0", "train.max_bad_steps=2",
                "checkpoint.every=4", "eval.every=0")  # fmt: skip
    ends = []
    for name, reads_late in (("usual", False), ("late", True)):
        init = functools.partialmethod(TrainStep.__init__, reads_late=reads_late)
        with monkeypatch.context() as patch:
            patch.setattr(TrainStep, "__init__", init)
            with pytest.raises(TrainingHalted) as halted:
                start(f"run.name={name}", *settings)
        saved = [path.name for path in (tmp_path / name / "checkpoints").glob("step_*")]
        ends.append((str(halted.value).replace(name, ""), halted.value.__dict__["first_bad"], saved))
    assert ends[0] == ends[1]
