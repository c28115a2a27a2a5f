"""`weft train` with separate replicas: results as of one world, and launchers that survive failures."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.train.apart_runs import evaluations as losses
from tests.train.apart_runs import steps_of
from tests.train.conftest import SMALL
from tests.train.conftest import text as text  # a fixture
from weft import env
from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint
from weft.monitor.events import read_events
from weft.train.folder import RunFolder

pytestmark = pytest.mark.full
LIMIT_S = 180


class TrainCommand:
    """Starts `weft train` on a small text."""

    def __init__(self, root: Path, text: Path):
        self._root = root
        self._words = [*SMALL, "sample.prompt=", f"data.train={text}", f"run.dir={root}"]
        self.program = [sys.executable]
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, *settings: str) -> subprocess.Popen[str]:
        command = [*self.program, "-m", "weft", "train", *self._words, f"run.name={name}", *settings]
        variables = env.child_env(WEFT_HOME=str(self._root / "home"), OMP_NUM_THREADS="1")
        process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.processes.append(process)
        return process

    def finish(self, *processes: subprocess.Popen[str], code: int = 0) -> list[str]:
        shown = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(shown)
        return shown

    def folder(self, name: str, replica: int = 0) -> RunFolder:
        path = self._root / name
        return RunFolder(path / f"replica_{replica}" if replica else path)

    def wait_for_step(self, folder: RunFolder, step: int, process: subprocess.Popen[str]) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and process.poll() is None:
            if folder.events.exists() and max(steps_of(folder), default=0) >= step:
                return
            time.sleep(0.01)
        pytest.fail(f"never came to step {step}: {process.communicate()[0]}")


@pytest.fixture
def train(tmp_path, text):
    made = TrainCommand(tmp_path, text)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def tensors(folder: RunFolder, *groups: str) -> dict[str, torch.Tensor]:
    found = newest_checkpoint(folder.checkpoints)
    checkpoint = load_checkpoint(found.path)
    return {f"{group}/{name}": one for group in groups for name, one in checkpoint.tensors(group).items()}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-10, msg=name)


def ranks_of(process: subprocess.Popen[str], folder: RunFolder) -> list[psutil.Process]:
    """Return the rank processes of one replica."""
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        if one.name().startswith("weft-rank-") and str(folder.path) in one.cmdline():
            found.append(one)
    return found


@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2 dp_shard=2 zero=1 sync=diloco:3 precision=fp64",
        "dp_replicate=2 dp_shard=2 zero=3 sync=average:4 precision=fp64",
        "dp_replicate=2 sync=diloco:3 compress=int8 precision=fp64",
    ],
)
def test_separate_replicas_match_one_world(train, plan):
    train.finish(train.start("apart", f"plan={plan}", "launch.replicas_apart=true"))
    train.finish(train.start("joined", f"plan={plan}"))
    joined, apart = train.folder("joined"), [train.folder("apart", replica) for replica in (0, 1)]
    for folder in apart:
        # Only diloco has `outer` tensors.
        groups = ("model", "outer") if "diloco" in plan else ("model",)
        assert_close(tensors(folder, *groups), tensors(joined, *groups))
    assert_close(tensors(apart[0], "optimizer"), tensors(joined, "optimizer"))
    checkpoint = load_checkpoint(newest_checkpoint(joined.checkpoints).path)
    theirs = {name.removeprefix("1/optimizer/"): one for name, one in checkpoint.tensors("replicas").items()}
    assert_close(tensors(apart[1], "optimizer"), {f"optimizer/{name}": one for name, one in theirs.items()})
    told = [event for event in read_events(joined.events) if event["event"] == "eval"]
    for folder in apart:
        own = [event for event in read_events(folder.events) if event["event"] == "eval"]
        assert [one["loss"] for one in own] == pytest.approx([one["loss"] for one in told], abs=1e-9)


def test_switch_from_one_world_to_separate_replicas_and_back(train):
    """Exact if the checkpoint has all replicas' states; otherwise training continues from the anchor."""
    settings = ["schedule.kind=constant", "plan=dp_replicate=2 sync=diloco:4 precision=fp64", "checkpoint.keep=9"]
    train.finish(train.start("mixed", *settings, "train.steps=6"))
    train.finish(train.start("mixed", *settings, "train.steps=12", "launch.replicas_apart=true"))
    train.finish(train.start("other", *settings, "train.steps=6"))
    train.finish(train.start("other", *settings, "train.steps=12"))
    for replica in (0, 1):
        own = tensors(train.folder("mixed", replica), "model", "outer")
        assert_close(own, tensors(train.folder("other"), "model", "outer"))
    [shown] = train.finish(train.start("mixed", *settings, "train.steps=16"))
    assert "continues from the weights of the last synchronization of 2 replicas" in shown
    listed = subprocess.run(
        [sys.executable, "-m", "weft", "ckpt", "list", str(train.folder("mixed", 1).path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "sync=diloco:4" in listed
    assert list_checkpoints(train.folder("mixed", 1).checkpoints)


STEPS = 800
SLOW = [f"train.steps={STEPS}", "checkpoint.every=20", "eval.every=100", "launch.meeting_timeout=2s", "log.every=50"]
APART = ["plan=dp_replicate=2 sync=diloco:5", "launch.replicas_apart=true", *SLOW]


def test_killed_ranks_are_restarted_by_their_own_launcher(train):
    process = train.start("killed", *APART, "launch.restarts=2", "launch.restart_pause=1s")
    first, second = train.folder("killed"), train.folder("killed", 1)
    train.wait_for_step(second, 30, process)
    for rank in ranks_of(process, second):
        rank.kill()
    [shown] = train.finish(process)
    assert "replica 1: restart 1 of 2" in shown.replace("weft: ", "")
    assert "synchronizations continue without replica 1" in shown
    assert steps_of(first) == list(range(1, STEPS + 1)), "nothing that replica 0 did is done again"
    assert_close(tensors(first, "model", "outer"), tensors(second, "model", "outer"))
    assert losses(first)[STEPS] == losses(second)[STEPS]


def test_suspended_ranks_are_left_out_after_timeout_and_rejoin(train):
    process = train.start("still", *APART)
    first, second = train.folder("still"), train.folder("still", 1)
    train.wait_for_step(second, 30, process)
    ranks = ranks_of(process, second)
    for rank in ranks:
        rank.suspend()
    train.wait_for_step(first, max(steps_of(first)) + 20, process)
    for rank in ranks:
        rank.resume()
    [shown] = train.finish(process)
    assert "synchronizations continue without replica 1" in shown
    assert_close(tensors(first, "model", "outer"), tensors(second, "model", "outer"))
    assert losses(first)[STEPS] == losses(second)[STEPS]


def test_replicas_on_two_hosts_rendezvous_and_interrupt_ends_one(train):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    at = [*APART, f"launch.meet_at={address}"]
    first, second = (train.start("two", *at, f"launch.replica={replica}") for replica in (0, 1))
    train.wait_for_step(train.folder("two", 1), 30, second)
    second.send_signal(signal.SIGINT)
    [shown] = train.finish(second)
    assert "everything is saved" in shown
    train.finish(train.start("two", *at, "launch.replica=1"), first)
    assert_close(tensors(train.folder("two"), "model", "outer"), tensors(train.folder("two", 1), "model", "outer"))


def test_refused_run_reports_once_and_leaves_no_folder(train):
    process = train.start("refused", "plan=dp_replicate=2 sync=diloco:3", "launch.replicas_apart=true", "model.dim=33")
    [shown] = train.finish(process, code=2)
    assert shown.count("error:") == 1
    assert not train.folder("refused").path.exists()
