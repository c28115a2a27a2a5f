"""A failed run resumes from its in-memory copy with equal weights, and never from a damaged copy."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from weft.checkpoint.peer_copies import CopyServer
from weft.checkpoint.save import save_slices
from weft.errors import CheckpointError, ConfigError
from weft.monitor.events import read_events
from weft.train import rank_run
from weft.train.folder import RunFolder
from weft.train.loop import peer_copies as copies_module
from weft.train.loop import run_checkpoints

COPIED = ("checkpoint.peer_every=2", "checkpoint.every=5", "checkpoint.background=false", "eval.every=0")


@pytest.fixture
def server():
    made = CopyServer()
    yield made
    made.close()


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch):
    """Raise an exception once, in step 9 of the next run."""
    observe, left = rank_run.RunRecorder.on_step, [1]

    def on_step(self, record):
        if record.step == 9 and left[0]:
            left[0] = 0
            raise ValueError("torn")
        return observe(self, record)

    monkeypatch.setattr(rank_run.RunRecorder, "on_step", on_step)


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.checkpoint(12) / "model.safetensors")


def copied_steps(folder: RunFolder) -> list[int]:
    return [event["step"] for event in read_events(folder.events) if event["event"] == "copy"]


def test_run_resumes_from_memory_with_equal_weights(start, server, fails_once):
    with pytest.raises(ValueError, match="torn"):
        start(*COPIED, copies=server.home)
    assert server.newest_step() == 8
    folder, result, shown = start(*COPIED, copies=server.home)
    assert "resumed from step 8 from memory" in shown
    assert result.step == 12
    # Step 10 is saved to disk and the last step is not copied. The run failed before it reported the copy of step 8.
    assert copied_steps(folder) == [2, 4, 6]
    plain, _, _ = start("checkpoint.every=5", "eval.every=0", "run.name=plain")
    assert all(torch.equal(one, weights(plain)[name]) for name, one in weights(folder).items())


def test_copy_due_during_a_save_is_made_at_the_first_step_after_it(start, server, monkeypatch):
    release, observe = threading.Event(), rank_run.RunRecorder.on_step

    def save(root, step, *args, **options):
        assert step != 3 or release.wait(20.0)
        return save_slices(root, step, *args, **options)

    def on_step(self, record):
        if record.step != 4:
            release.set() if record.step > 4 else None
            while any(thread.name == "weft-save" for thread in threading.enumerate()):
                time.sleep(0.001)
        return observe(self, record)

    monkeypatch.setattr(run_checkpoints, "save_slices", save)
    monkeypatch.setattr(rank_run.RunRecorder, "on_step", on_step)
    settings = ("checkpoint.peer_every=4", "checkpoint.every=3", "eval.every=0")
    folder, _, _ = start(*settings, copies=server.home)
    assert copied_steps(folder) == [5, 8]


def test_damaged_copy_and_resume_step_fall_back_to_disk(start, server, fails_once):
    with pytest.raises(ValueError, match="torn"):
        start(*COPIED, copies=server.home)
    server._files["run/step_00000008/optimizer.safetensors"][-1] ^= 1
    _, _, shown = start(*COPIED, "train.steps=6", copies=server.home)
    assert "copies in memory are not used" in shown
    assert "resumed from step 5 (" in shown
    assert server.newest_step() is None
    start(*COPIED, "train.steps=9", copies=server.home)
    assert server.newest_step() == 8
    _, _, shown = start(*COPIED, "resume.step=6", copies=server.home)
    assert "resumed from step 6 (" in shown


def test_failed_copy_is_a_warning_and_training_continues(start, server, monkeypatch):
    def away(*args, **kwargs):
        raise CheckpointError("the server is gone")

    monkeypatch.setattr(copies_module.Copies, "keep_only", away)
    folder, result, _ = start(*COPIED, "train.steps=5", copies=server.home)
    assert result.step == 5
    texts = [event["text"] for event in read_events(folder.events) if event["event"] == "warning"]
    assert texts == [f"step {step} is not copied to memory: the server is gone" for step in (2, 4)]


def test_copies_without_memory_are_rejected_and_without_restart_reported(start, server, monkeypatch):
    _, _, shown = start(*COPIED, "train.steps=2")
    assert "checkpoint.peer_every=2 has no effect: nothing starts these ranks again. Set launch.restarts" in shown
    monkeypatch.setattr(copies_module, "free_host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"checkpoint.peer_every=2: the copies take .* one has 1000 B free. Use"):
        start(*COPIED, copies=server.home)
