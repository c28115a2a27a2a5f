"""Background saves: they contain their step's state, run one at a time, and report errors to the loop."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.full_state import capture
from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import load_checkpoint, verify_checkpoint
from weft.checkpoint.safetensors_files import RawArray
from weft.checkpoint.save import save_slices
from weft.comm.mesh import build_mesh
from weft.comm.store import StoreChannel
from weft.config.plan import Plan
from weft.errors import CheckpointError, CommError, ConfigError
from weft.memory.offload import HostCopies
from weft.monitor.events import read_events
from weft.parallel.parallelize import parallelize
from weft.train.hooks import Progress
from weft.train.loop import checkpointer as save_thread
from weft.train.loop import run_checkpoints
from weft.train.loop.checkpointer import steps_in
from weft.train.states.model_state import state_slices
from weft.train.step.train_step import TrainStep

ALL = ("checkpoint.every=3", "checkpoint.keep=9", "eval.every=0", "train.steps=9")


@pytest.fixture
def slow(monkeypatch):
    """Delay saves by some seconds; return (step, start, end) of each save."""
    spans: list[tuple[int, float, float]] = []

    def make(seconds: float) -> list[tuple[int, float, float]]:
        def save(root, step, *args, **options):
            began = time.monotonic()
            time.sleep(seconds)
            path = save_slices(root, step, *args, **options)
            spans.append((step, began, time.monotonic()))
            return path

        monkeypatch.setattr(run_checkpoints, "save_slices", save)
        return spans

    return make


def events(folder, kind: str) -> list[dict]:
    return [event for event in read_events(folder.events) if event["event"] == kind]


def test_background_save_has_the_weights_of_its_step(start, slow):
    folder, _, _ = start(*ALL, "run.name=waits", "checkpoint.background=false")
    spans = slow(0.2)
    other, _, shown = start(*ALL, "run.name=goes_on")
    assert steps_in(folder.checkpoints) == steps_in(other.checkpoints) == [3, 6, 9]
    for step in (3, 6, 9):
        for file in ("model.safetensors", "optimizer.safetensors"):
            ours, theirs = (load_file(one.checkpoint(step) / file) for one in (folder, other))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # Never two at the same time.
    assert all(before[2] <= after[1] for before, after in itertools.pairwise(spans))
    first, *_, last = events(other, "checkpoint")
    assert 0.2 <= first["durable_s"] > first["stall_s"]
    assert last["stall_s"] >= 0.2  # the end of the run waits
    assert "saves   3 checkpoints: training waited " in shown


def test_busy_skip_omits_saves_due_during_a_save(start, slow):
    slow(1.0)
    folder, result, shown = start(*ALL, "checkpoint.every=1", "checkpoint.busy=skip")
    assert result.step == 9
    steps = steps_in(folder.checkpoints)
    assert steps[0] == 1
    assert steps[-1] == 9  # the last one is not skipped
    assert len(steps) < 9
    assert "step 2 is not saved: the checkpoint before it is still being written (checkpoint.busy=skip)" in shown


def fail_saves(monkeypatch, tries: int) -> list[int]:
    """Let the first `tries` saves fail as on a full disk; return the steps of all attempts."""
    seen: list[int] = []

    def save(root, step, *args, **options):
        seen.append(step)
        if len(seen) <= tries:
            raise CheckpointError(f"run.dir={root}: the disk is full.")
        return save_slices(root, step, *args, **options)

    monkeypatch.setattr(run_checkpoints, "save_slices", save)
    monkeypatch.setattr(save_thread, "_PAUSE_S", (0.01, 0.01))
    return seen


def test_failed_save_is_retried(start, monkeypatch):
    seen = fail_saves(monkeypatch, 2)
    folder, result, _ = start(*ALL, "checkpoint.retries=2")
    assert (result.reason, steps_in(folder.checkpoints)) == ("finished", [3, 6, 9])
    assert seen == [3, 3, 3, 6, 9]


def test_permanently_failing_save_stops_the_run_with_its_message(start, monkeypatch, tmp_path):
    fail_saves(monkeypatch, 99)
    with pytest.raises(CheckpointError, match=r"run.dir=.*: the disk is full."):
        start(*ALL, "checkpoint.retries=1")
    assert not list(tmp_path.rglob("step_*"))


def test_held_run_continues_when_the_save_succeeds(start, monkeypatch):
    fail_saves(monkeypatch, 6)
    folder, result, shown = start(*ALL, "checkpoint.retries=0", "checkpoint.on_failure=hold")
    assert (result.reason, steps_in(folder.checkpoints)) == ("finished", [3, 6, 9])
    assert "the disk is full. Weft tries again." in shown


def test_rank_without_peers_does_not_wait_for_a_joint_save(monkeypatch):
    monkeypatch.setattr(save_thread, "_LAST_WAIT_S", 1.0)
    monkeypatch.setattr(save_thread, "_LAST_WAIT_ALONE_S", 0.01)
    peer_fails = CommError("rank 1 has failed on this axis")
    peer_fails.peer_ends = True
    ends = threading.Event()

    def write():
        assert ends.wait(20.0)
        return Path("there")

    for error, least, most in (
        (CommError("rank 1 has ended"), 0.0, 0.9),
        (peer_fails, 1.0, 20.0),
        (OSError(), 1.0, 20.0),
    ):
        save = save_thread.Save(3, write)
        save.start()
        save.leave(error)
        assert least <= save.stall_s < most
        assert not save.is_over
    ends.set()
    save.leave(OSError())
    assert save.end().path == Path("there")


def test_step_waits_with_a_warning_if_host_memory_is_too_small(start, monkeypatch):
    monkeypatch.setattr("weft.memory.offload._MOST_OF_FREE", 0.0)
    folder, _, shown = start(*ALL)
    assert steps_in(folder.checkpoints) == [3, 6, 9]
    assert shown.count("Use checkpoint.background=false. Meanwhile training waits for each save.") == 1


def test_keep_every_retains_checkpoints_permanently(start):
    folder, _, _ = start("train.steps=9", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=3",
                         "checkpoint.keep_best=false", "eval.every=0")  # fmt: skip
    assert steps_in(folder.checkpoints) == [3, 6, 8, 9]


def test_host_copies_persist_and_use_the_ranks_share_once():
    tensors = [torch.randn(100, 7), torch.arange(5), torch.randn(0), torch.randn(3).to(torch.bfloat16)]
    copies = HostCopies(torch.device("cpu"))
    first = copies.take(tensors)
    before = [one.clone() for one in tensors]
    for one in tensors:
        one.zero_()
    assert all(torch.equal(one, other) for one, other in zip(first, before, strict=True))
    again = copies.take(tensors)
    assert [one.data_ptr() for one in again if one.numel()] == [one.data_ptr() for one in first if one.numel()]
    assert copies._buffer.nbytes <= sum(one.nbytes for one in tensors) + 64 * len(tensors)


def save_during_training(folder: str, fault: str) -> dict:
    """Save step 3 in a thread while steps continue; return the result and the expected state."""
    mesh = build_mesh(Plan.parse("dp_shard=2 zero=1"))
    model = parallelize(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))), mesh, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = TrainStep(model, optimizer, lambda out, batch: (out.square().sum(), len(batch)), mesh)
    for _ in range(3):
        step(torch.ones(2, 32))
    expected = {name: one.clone() for name, one in capture(model, optimizer)["model"].items()}
    found = list(state_slices(model, optimizer, HostCopies(mesh.device)))
    talk = StoreChannel(mesh.rank, 2)
    together = RankGroup(mesh.rank, 2, talk.on_first, talk.gather)
    ended: list[object] = []

    def look(group: str, name: str, values: RawArray) -> None:
        time.sleep(0.01)
        if fault and mesh.rank == int(fault[-1]):
            raise {"interrupt": KeyboardInterrupt, "disk": OSError(28, "No space left on device")}[fault[:-1]]

    def act() -> None:
        try:
            ended.append(str(save_slices(Path(folder), 3, found, {}, together, look=look)))
        except BaseException as error:
            ended.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=act)
    thread.start()
    steps = 0
    for _ in range(20):
        steps += thread.is_alive()
        step(torch.ones(2, 32))
    thread.join(30)
    assert not thread.is_alive()
    return {"ended": ended[0], "steps": steps, "expected": expected}


def test_two_ranks_save_while_their_collectives_continue(tmp_path, ranks2):
    found = ranks2.run(save_during_training, str(tmp_path), "")
    path = tmp_path / "step_00000003"
    assert [one["ended"] for one in found] == [str(path)] * 2
    assert all(one["steps"] for one in found)
    assert verify_checkpoint(path) == []
    saved = load_checkpoint(path).tensors("model")
    assert all(torch.equal(saved[name], tensor) for name, tensor in found[0]["expected"].items())


@pytest.mark.parametrize("fault", ["interrupt0", "interrupt1", "disk0", "disk1"])
def test_failure_on_one_rank_ends_the_save_of_both_without_commit(fault, tmp_path, ranks2):
    found = [one["ended"] for one in ranks2.run(save_during_training, str(tmp_path), fault)]
    what = "KeyboardInterrupt" if fault[:-1] == "interrupt" else "No space left on device"
    for rank, ended in enumerate(found):
        told = f"the checkpoint of step 3 could not be written (rank {fault[-1]}: {what})"
        assert told in ended or (rank == int(fault[-1]) and what in ended)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    # The ranks remain usable.
    assert ranks2.run(save_during_training, str(tmp_path), "")[1]["ended"] == str(tmp_path / "step_00000003")


def test_run_saves_to_object_store_and_resumes_from_it(start):
    store = "checkpoint.dir=memory://bucket/runs"
    folder, _, _ = start("train.steps=3", store, "checkpoint.every=3")
    assert str(folder.checkpoint(3)).startswith("memory://bucket/runs/")
    assert not (folder.path / "checkpoints").exists()
    _, result, shown = start("train.steps=6", store, "checkpoint.every=3", "checkpoint.keep=1", "eval.every=0")
    assert "resumed from step 3" in shown
    assert (result.step, steps_in(folder.checkpoints)[-1]) == (6, 6)


def test_damage_found_in_background_stops_the_run_and_restart_loads_older_step(start):
    quiet = ("eval.every=0", "checkpoint.verify=background")
    folder, _, _ = start(*ALL)
    file = folder.checkpoint(9) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step 9, which the run went on from: model.safetensors does not match"):
        start(*ALL[:2], *quiet, "train.steps=12")
    assert steps_in(folder.checkpoints) == [3, 6]
    _, result, shown = start(*ALL[:2], *quiet, "train.steps=12")
    assert "resumed from step 6" in shown
    assert result.step == 12


@pytest.mark.parametrize(
    ("kind", "steps"), [("lowest", {9: 3.0, 6: 2.0, 3: 4.0}), ("highest", {3: 1.0, 6: 8.0, 9: 2.0})]
)
def test_best_step_by_any_metric(kind, steps):
    progress = Progress()
    for step, value in sorted(steps.items()):
        progress.note_best(step, "accuracy", value, highest=kind == "highest")
        progress.note_best(step, "accuracy", None)
    assert progress.best_step == 6
    progress.note_best(12, "loss", 99.0)  # another metric starts over
    assert (progress.best_step, progress.best_value) == (12, 99.0)


def test_unknown_metric_is_rejected_before_training(start):
    with pytest.raises(ConfigError, match=r"checkpoint.best_by=accuracy: .* Use loss or bits_per_byte."):
        start("checkpoint.best_by=accuracy")
