"""A rank that is slowed by a fifth, stopped or killed is named within half a minute, with the cause."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.train.test_hang import is_rank, write_text
from tests.train.test_kill import family, kill_all, start, wait_for_step
from weft.monitor.events import read_events
from weft.train.folder import RunFolder

pytestmark = pytest.mark.full

WITHIN_S = 30.0
#: Both ranks sleep in forward, so that other load on the machine does not change their steps. Rank 1 is
#: slow while the file exists.
TASK = """
import os, time
from pathlib import Path
from weft.train.tasks.decoder import DecoderTask

class Slowed(DecoderTask):
    def __init__(self, mark: str):
        self.mark = Path(mark)

    def forward(self, model, batch):
        slow = self.mark.exists() and os.environ["RANK"] == "1"
        time.sleep(0.5 * (1.2 if slow else 1.0))
        return super().forward(model, batch)
"""


def events(tmp_path: Path, kind: str) -> list[dict]:
    return [event for event in read_events(tmp_path / "named" / "events.jsonl") if event["event"] == kind]


def wait_for(tmp_path: Path, kind: str, since: float, process) -> dict:
    """Return the first event of the kind. Its \"after\" is the time since `since`."""
    while not (found := events(tmp_path, kind)):
        assert time.time() - since < WITHIN_S, f"no {kind} within {WITHIN_S} s"
        assert process.poll() is None
        time.sleep(0.2)
    return {**found[0], "after": found[0]["time"] - since}


def begin(tmp_path: Path, *settings: str):
    write_text(tmp_path)
    process = start(tmp_path, "named", "train.steps=5000", "eval.every=0", "checkpoint.every=0", *settings)
    wait_for_step(RunFolder(tmp_path / "named"), 1, 8, process)
    return process


def rank_process(process, rank: int):
    [found] = [one for one in family(process) if is_rank(one, rank)]
    return found


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=3", "tp=2", "pp=2 microbatches=2"])
def test_rank_slower_by_a_fifth_is_named(tmp_path, plan):
    (tmp_path / "slowed.py").write_text(TASK)
    mark = tmp_path / "mark"
    process = begin(tmp_path, f"task={tmp_path / 'slowed.py'}:Slowed", f"task.options.mark={mark}", f"plan={plan}",
                    "model.num_kv_heads=2")  # fmt: skip
    try:
        time.sleep(10 if "pp" not in plan else 40)  # a stage has no peers and needs a history of its own
        assert events(tmp_path, "slow_rank") == []
        began = time.time()
        mark.touch()
        found = wait_for(tmp_path, "slow_rank", began, process)
        assert (found["rank"], found["state"], found["part"]) == (1, "fired", "" if "pp" in plan else "compute")
        assert 1.1 < found["lag"] < 1.3
        assert "rank 1 is slow, and the others wait for it" in found["text"]
        assert found["after"] < WITHIN_S
    finally:
        kill_all(process)
        process.communicate()


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_is_named_with_the_stacks_of_all_ranks(tmp_path, rank):
    process = begin(tmp_path)
    try:
        stopped = rank_process(process, rank)
        began = time.time()
        stopped.send_signal(signal.SIGSTOP)
        log = RunFolder(tmp_path / "named").logs / f"rank_{1 - rank}.log"
        while "its Python stacks" not in log.read_text():
            assert time.time() - began < WITHIN_S
            time.sleep(0.2)
        assert f"waiting for rank {rank} since" in log.read_text()
        assert "A step usually takes" in log.read_text()
        assert f"Process {stopped.pid} of rank {rank} is stopped" in log.read_text()
        if rank == 1:  # only rank 0 writes events
            found = wait_for(tmp_path, "hang", began, process)
            assert found["ranks"] == [1]
            places = {tuple(ranks): where for ranks, where in found["standing"]}
            assert places[0,].startswith("waits in all_reduce over ")
            assert places[1,] == "has sent no message"
            stopped.send_signal(signal.SIGCONT)
            while len(events(tmp_path, "hang")) < 2:
                assert time.time() - began < 2 * WITHIN_S
                time.sleep(0.2)
            assert events(tmp_path, "hang")[1]["state"] == "ended"
    finally:
        kill_all(process)
        process.communicate()


def test_killed_rank_is_named(tmp_path):
    process = begin(tmp_path)
    began = time.time()
    rank_process(process, 1).send_signal(signal.SIGKILL)
    shown, _ = process.communicate(timeout=WITHIN_S)
    assert time.time() - began < WITHIN_S
    assert "rank 1 was killed by signal 9 (SIGKILL)" in shown
