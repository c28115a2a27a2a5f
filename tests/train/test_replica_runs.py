"""Runs of independent replicas: one that dies, stops or is late rejoins the others."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
import torch

from tests.train.replica_runs import ReplicaRun, evaluations, saved_tensors, steps_of
from weft.checkpoint.load import load_checkpoint, newest_checkpoint
from weft.monitor.events import read_events
from weft.train import rank_run
from weft.train.loop import observers as recorder
from weft.train.loop import replicas

ALL = ("model", "outer", "optimizer")


@pytest.fixture
def run(tmp_path, text):
    made: list[ReplicaRun] = []

    def make(name: str, *settings: str, **more) -> ReplicaRun:
        made.append(ReplicaRun(tmp_path, text, name, *settings, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_late_replica_is_skipped_and_rejoins_at_current_step(run, monkeypatch):
    for module in (rank_run, replicas):  # both run in threads of this process
        monkeypatch.setattr(module, "stop_on_signal", contextlib.nullcontext)
    monkeypatch.setattr(recorder, "plot_loss", lambda *words, **more: None)
    # Two seconds are short on a busy machine, so replicas that must not be late get more time.
    both = run("late", timeout_s=5)
    both.waits(30)
    both.pause(0, 8)
    both.pause(1, 5)
    both.start(0, 1, kind=threading.Thread)
    both.wait_at(1, 5)
    both.waits(2)
    both.wait_at(0, 8)
    assert steps_of(both.folders[1]) == [1, 2, 3, 4, 5], (
        "it lives and says so, and is not waited for longer than two seconds"
    )
    both.waits(30)
    both.release(1, 5)
    both.wait_arrived(1)
    both.release(0, 8)
    both.end()
    first, second = both.folders
    assert steps_of(first) == list(range(1, 13))
    assert steps_of(second) == [1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert_same(saved_tensors(first), saved_tensors(second))
    assert evaluations(first)[12] == evaluations(second)[12]
    warnings = [event["text"] for event in read_events(first.events) if event["event"] == "warning"]
    assert warnings == [
        "step 6: synchronizations continue without replica 1",
        "step 12: all replicas take part in meetings again",
    ]


@pytest.mark.full
def test_killed_replica_rejoins_and_all_end_with_equal_weights(run):
    # On a busy machine a replica may not respond for a second, and the last rendezvous would skip it.
    both = run("killed", timeout_s=5)
    both.pause(0, 8)
    both.pause(1, 5)
    both.start(0, 1)
    both.wait_at(1, 5)
    both.signal(1, signal.SIGKILL)
    both.wait_at(0, 8)  # the rendezvous after step 6 had only this replica
    both.release(1, 5)
    both.start(1, at_once=False)
    both.wait_arrived(1)
    both.release(0, 8)
    assert both.end() == [0, 0]
    first, second = both.folders
    assert steps_of(first) == list(range(1, 13))
    assert steps_of(second) == [1, 2, 3, 4, 5, 10, 11, 12], "from step 3 it waited for the rendezvous after step 9"
    assert_same(saved_tensors(first), saved_tensors(second))
    assert evaluations(first)[12] == evaluations(second)[12]
    assert evaluations(first).keys() == {4, 8, 12}


@pytest.mark.full
def test_run_stopped_while_one_replica_waited_resumes_with_equal_bits(run):
    plain = run("plain", timeout_s=20)
    plain.start(0, 1)
    assert plain.end() == [0, 0]
    stopped = run("stopped", timeout_s=20)
    stopped.pause(1, 4)
    stopped.start(0, 1)
    stopped.wait_at(1, 4)
    stopped.wait_arrived(0)
    stopped.signal(0, signal.SIGTERM)
    stopped.signal(1, signal.SIGTERM)
    assert stopped.end() == [0, 0]
    newest = [newest_checkpoint(folder.checkpoints) for folder in stopped.folders]
    assert [one.step for one in newest] == [6, 5], "between rendezvous, each at its own step"
    assert load_checkpoint(newest[0].path).state["replica"]["owes_meeting"]
    stopped.release(1, 4)
    stopped.start(0, 1, at_once=False)
    assert stopped.end() == [0, 0]
    for ours, theirs in zip(stopped.folders, plain.folders, strict=True):
        assert steps_of(ours) == list(range(1, 13))
        assert_same(saved_tensors(ours, ALL), saved_tensors(theirs, ALL))


@pytest.mark.full
def test_stalled_replica_is_skipped_and_rejoins_at_current_step(run):
    both = run("still")
    both.pause(0, 8)
    both.pause(1, 5)
    both.start(0, 1)
    both.wait_at(1, 5)
    both.signal(1, signal.SIGSTOP)
    both.wait_at(0, 8)
    both.release(1, 5)
    both.signal(1, signal.SIGCONT)
    both.wait_arrived(1)
    both.release(0, 8)
    assert both.end() == [0, 0]
    first, second = both.folders
    assert steps_of(second) == [1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert_same(saved_tensors(first), saved_tensors(second))
    assert evaluations(first)[12] == evaluations(second)[12]


@pytest.mark.full
def test_replica_that_joins_after_the_end_takes_over_the_model(run):
    both = run("over")
    both.pause(1, 5)
    both.start(0, 1)
    both.wait_at(1, 5)
    both.signal(1, signal.SIGSTOP)
    both.processes[0].join(60)
    both.release(1, 5)
    both.signal(1, signal.SIGCONT)
    assert both.end() == [0, 0]
    first, second = both.folders
    assert_same(saved_tensors(first), saved_tensors(second))
    assert newest_checkpoint(second.checkpoints).step == 12
    both.start(0, 1, at_once=False)
    assert both.end() == [0, 0]
    assert steps_of(first) == list(range(1, 13)), "all steps are done and none is repeated"


@pytest.mark.full
def test_another_number_of_replicas_resumes_from_the_anchor(run, tmp_path):
    two = run("more", "train.steps=6", "schedule.kind=constant", "train.global_batch=12", timeout_s=20)
    two.start(0, 1)
    assert two.end() == [0, 0]
    before = saved_tensors(two.folders[0])
    two.close()
    three = run(
        "more", "train.steps=7", "schedule.kind=constant", "train.global_batch=12", replicas=3, timeout_s=20
    )  # fmt: skip
    three.pause(2, 6)
    three.start(0, 1, 2, at_once=False)
    three.wait_at(2, 6)
    assert not list((three.folders[2].path / "checkpoints").glob("step_*")), "it loaded another replica's checkpoint"
    three.release(2, 6)
    assert three.end() == [0, 0, 0]
    ends = [saved_tensors(folder) for folder in three.folders]
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])
    assert steps_of(three.folders[2]) == [7]
    assert any(not torch.equal(one, ends[0][name]) for name, one in before.items())
    three.close()
    one = run("more", "train.steps=8", "schedule.kind=constant", "train.global_batch=12", replicas=2, timeout_s=20)
    one.start(0, 1, at_once=False)
    assert one.end() == [0, 0]
    assert_same(saved_tensors(one.folders[0]), saved_tensors(one.folders[1]))
