"""Which checkpoints a run saves, retains and resumes from when steps have no finite loss."""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.save import SavedSlice, save_slices
from weft.errors import CheckpointError, TrainingHalted, UnfitError
from weft.monitor.events import read_events
from weft.train import rank_run as run_module
from weft.train.folder import RunFolder
from weft.train.loop import checkpointer as keeping
from weft.train.loop.checkpointer import steps_in
from weft.train.tasks.decoder import DecoderTask
from weft.train.tasks.decoder_loss import token_cross_entropy

#: Save at every step, evaluate at the end only, and retain the newest checkpoint only.
EACH = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=false", "eval.every=0")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch):
    """Make the loss of these steps (from 1) nan."""
    bad: set[int] = set()
    seen = [0]

    def loss_of(logits, batch):
        loss, count = token_cross_entropy(logits, batch)
        if torch.is_grad_enabled():
            seen[0] += 1
        return (loss * float("nan") if seen[0] in bad and torch.is_grad_enabled() else loss), count

    def begin(*steps: int) -> None:
        seen[0] = 0
        bad.clear()
        bad.update(steps)

    monkeypatch.setattr(DecoderTask, "loss", staticmethod(loss_of))
    return begin


def weights(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder.checkpoint(step) / "model.safetensors")


def set_aside(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.glob("*.aside*"))


def test_halt_saves_nothing_and_names_last_good_step(start, poison):
    folder, _, _ = start("train.steps=3")
    good = weights(folder, 3)
    poison(*range(1, 20))
    with pytest.raises(TrainingHalted) as caught:
        start("train.steps=12", "train.max_bad_steps=2", "checkpoint.every=1", "eval.every=0")
    assert str(caught.value).endswith("and run the command again: it resumes from step 3, the last good checkpoint.")
    assert steps_in(folder.checkpoints) == [3]
    assert set_aside(folder) == []  # an evaluation had shown that step 3 is good
    assert all(torch.equal(tensor, good[name]) for name, tensor in weights(folder, 3).items())
    poison()
    _, result, shown = start("train.steps=12")
    assert "resumed from step 3" in shown
    assert result.step == 12


def test_weights_beyond_fp32_are_never_saved(start):
    folder, _, _ = start("train.steps=3", *EACH)
    wild = ("optimizer.lr=1e30", "optimizer.max_grad_norm=0", "schedule.kind=constant", "schedule.warmup_steps=0")
    with pytest.raises(TrainingHalted, match=r"steps in a row \(5 to 7\).* it resumes from step 3, the last good"):
        start("train.steps=12", "train.max_bad_steps=2", *EACH, *wild)
    assert steps_in(folder.checkpoints) == [3]
    warnings = [event for event in read_events(folder.events) if event["event"] == "warning"]
    assert "step 4 is not saved: a weight exceeds 1e+18" in [event["text"] for event in warnings]
    _, result, shown = start("train.steps=6", *EACH)
    assert "resumed from step 3" in shown
    assert result.step == 6


def test_step_before_first_bad_one_is_set_aside_and_its_predecessor_retained(start, poison):
    poison(*range(6, 20))
    with pytest.raises(TrainingHalted) as caught:
        start("train.max_bad_steps=1", *EACH)
    assert "it resumes from step 4, the last good checkpoint (step 5 may be damaged and was set aside" in str(
        caught.value
    )
    poison()
    folder, result, shown = start(*EACH)
    assert "resumed from step 4" in shown
    assert result.step == 12
    assert set_aside(folder) == ["step_00000005.aside"]


def test_bad_steps_below_the_limit_are_saved_after_the_next_good_one(start, poison):
    poison(5, 6)
    folder, result, shown = start(*EACH[:1], "checkpoint.keep=20", "eval.every=0")
    assert result.step == 12
    assert steps_in(folder.checkpoints) == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    assert "step 5 is not saved: no step since 5 had a finite loss and gradient" in shown


def test_run_ending_on_a_bad_step_is_saved_if_its_evaluation_is_finite(start, poison):
    poison(12)
    folder, result, _ = start(*EACH)
    assert (result.reason, steps_in(folder.checkpoints)[-1]) == ("finished", 12)


def test_run_ending_on_a_bad_step_without_evaluation_reports_it(start, poison):
    poison(4)
    with pytest.raises(
        TrainingHalted, match=r"the run ended at step 4, which is not saved: .*: it resumes from step 2"
    ):
        start("data.holdout=0", "train.steps=4", "checkpoint.every=2")


def test_stop_within_bad_steps_does_not_report_a_complete_save(start, poison, monkeypatch):
    poison(*range(3, 20))
    steps = iter(range(1, 100))
    recorder = run_module.RunRecorder
    observe = recorder.on_step
    # Request a stop at the recorder's fifth step, as a signal would.
    monkeypatch.setattr(
        run_module.RunRecorder, "on_step", lambda self, record: observe(self, record) or next(steps) == 5
    )
    with pytest.raises(
        TrainingHalted, match=r"the run ended at step 6, which is not saved: no step since 3 had"
    ) as caught:
        start("train.steps=12", "train.max_bad_steps=9", *EACH)
    assert "resumes from step" in str(caught.value)


def test_resume_step_rolls_back_and_sets_newer_checkpoints_aside(start):
    folder, _, _ = start("checkpoint.keep=9", "train.steps=9")
    before = weights(folder, 6)
    with pytest.raises(CheckpointError, match=r"resume.step=5: there is no checkpoint of that step. Use one of: 3, "):
        start("checkpoint.keep=9", "resume.step=5")
    _, result, shown = start("checkpoint.keep=9", "resume.step=6", "train.steps=10")
    assert "resume.step=6: newer checkpoints are set aside as step_00000008.aside, step_00000009.aside" in shown
    assert "resumed from step 6" in shown
    assert result.step == 10
    assert set_aside(folder) == ["step_00000008.aside", "step_00000009.aside"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(folder, 6).items())
    (folder.checkpoint(6) / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"resume.step=6: model.safetensors has 3 bytes .* Use another one: 3, "):
        start("checkpoint.keep=9", "resume.step=6", "train.steps=12")
    assert set_aside(folder) == ["step_00000008.aside", "step_00000009.aside"]


def test_uncommitted_checkpoints_are_named_and_retained(start):
    folder, _, _ = start("train.steps=6", "checkpoint.keep=9")
    steps = steps_in(folder.checkpoints)
    for step in steps:
        (folder.checkpoint(step) / "COMMIT").unlink()
    _, result, shown = start("train.steps=6", "checkpoint.keep=1")
    named = ", ".join(map(str, steps))
    assert f"{len(steps)} unfinished checkpoints ignored: step {named}; COMMIT is missing" in shown
    assert result.step == 6
    assert set_aside(folder) == [f"step_{step:08d}.aside" for step in steps]


def test_more_steps_extend_the_schedule_with_a_message(start):
    start("train.steps=6")
    _, _, shown = start("train.steps=12")
    assert "train.steps=12 (before: 6): the cosine schedule then ends at step 12: lr goes from 1.0e-04 up to " in shown
    assert "to keep the old rate: schedule.kind=constant optimizer.lr=0.0001" in shown
    assert "time    6 steps since step 6" in shown


@pytest.mark.parametrize(
    ("group", "value", "message"),
    [
        ("model", 1.0, ""),
        ("model", float("nan"), "a weight is not finite"),
        ("model", -2e18, "a weight exceeds 1e+18"),
        ("optimizer", float("inf"), "a state of the optimizer is not finite"),
        ("optimizer", 2e30, ""),
        ("buffer", float("-inf"), ""),
        ("buffer", float("nan"), "a buffer is not a number"),
    ],
)
def test_values_that_spoil_tensors_are_detected_during_the_write(group, value, message, tmp_path):
    groups = {"model": {"w": torch.zeros(4)}, "optimizer": {"w/m": torch.zeros(4), "w/step": torch.tensor(3)}}
    buffers = {"x"} if group == "buffer" else set()
    groups["model" if buffers else group]["x"] = torch.tensor([0.0, value])
    pieces = [SavedSlice.full(f"{group}/{name}", t) for group, found in groups.items() for name, t in found.items()]
    with nullcontext() if not message else pytest.raises(UnfitError, match=re.escape(message)):
        save_slices(tmp_path, 1, pieces, {}, RankGroup(), look=functools.partial(keeping.refuse_unfit, buffers))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *([] if message else ["step_00000001"])]


def test_damaged_checkpoint_is_set_aside_when_skipped(start):
    keep = ("checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_best=false", "eval.every=0")
    folder, _, _ = start("train.steps=4", *keep)
    file = folder.checkpoint(4) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    left = folder.checkpoints / ".tmp-step_00000009-1-abcd"
    left.mkdir()
    start("train.steps=3", *keep)
    assert set_aside(folder) == ["step_00000004.aside"]
    assert not left.exists()
    start("train.steps=4", *keep)
    assert steps_in(folder.checkpoints) == [3, 4]
