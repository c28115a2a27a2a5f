"""Kill a real run at a random step and restart it: the weights equal those of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from weft import env
from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import list_checkpoints, load_checkpoint, verify_checkpoint
from weft.monitor.events import read_events
from weft.train.folder import RunFolder

STEPS = 24
SETTINGS = [
    "plan=dp_replicate=2 accumulation=2",
    "launch.device=cpu",
    "tokenizer.kind=bytes",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "train.seq_len=32",
    "train.global_batch=8",
    f"train.steps={STEPS}",
    "eval.every=20",
    "eval.batches=1",
    "checkpoint.every=4",
    "data.holdout=0.2",
    "sample.prompt=",
]


def command(tmp_path: Path, name: str, *settings: str) -> list[str]:
    places = [f"data.train={tmp_path / 'text.jsonl'}", f"run.dir={tmp_path}", f"run.name={name}"]
    return [sys.executable, "-m", "weft", "train", *SETTINGS, *places, *settings]


def start(tmp_path: Path, name: str, *settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(tmp_path, name, *settings),
        env=env.child_env(WEFT_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(tmp_path: Path, name: str, *settings: str) -> RunFolder:
    process = start(tmp_path, name, *settings)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    return RunFolder(tmp_path / name)


def wait_for_step(folder: RunFolder, start: int, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until the start of that number (from 1) has reached the step."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        starts = 0
        for event in read_events(folder.events):
            starts += event["event"] == "start"
            if starts == start and event["event"] == "step" and event["step"] >= step:
                return
        time.sleep(0.002)
    pytest.fail(f"the run never reached step {step}: {process.communicate()[0]}")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill every process at the same time, like a power cut."""
    for member in family(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)


def kill_one_rank(process: subprocess.Popen[str]) -> None:
    """Kill one rank only, like the out-of-memory killer."""
    ranks = [member for member in family(process) if member.name().startswith("weft-rank-")]
    random.Random(os.getpid()).choice(ranks).send_signal(signal.SIGKILL)


def kill_the_launcher(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> RunFolder:
    tmp_path = tmp_path_factory.mktemp("killed")
    words = ["warp", "weft", "loom", "thread", "cloth", "shuttle", "heddle"]
    lines = [" ".join(words[(i * k) % 7] for k in range(1, 40)) for i in range(1, 41)]
    text = "".join(json.dumps({"text": f"{index} {line}"}) + "\n" for index, line in enumerate(lines))
    (tmp_path / "text.jsonl").write_text(text)
    return finish(tmp_path, "undisturbed")


def final_bytes(folder: RunFolder) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.checkpoint(STEPS).glob("*.safetensors"))]


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.full)])
def test_killed_run_ends_with_equal_bits(undisturbed, times):
    """Kill all processes, one rank or the launcher at random steps, and restart the run each time."""
    tmp_path, name = undisturbed.path.parent, f"killed_{times}"
    folder = RunFolder(tmp_path / name)
    steps = sorted(random.sample(range(2, STEPS - 4), times))
    kills = random.sample([kill_all, kill_one_rank, kill_the_launcher], times)
    message = f"killed at steps {steps} by {[kill.__name__ for kill in kills]}"
    for place, (step, kill) in enumerate(zip(steps, kills, strict=True), start=1):
        process = start(tmp_path, name)
        wait_for_step(folder, place, step, process)
        members = family(process)
        kill(process)
        process.communicate(timeout=60)
        assert process.returncode != 0, message
        # No rank survives to write into the folder of the next start.
        _, alive = psutil.wait_procs(members, timeout=20)
        assert not alive, message
    assert finish(tmp_path, name).path == folder.path
    assert final_bytes(folder) == final_bytes(undisturbed), message
    events = read_events(folder.events)
    assert sum(event["event"] == "step" for event in events) >= STEPS  # some steps were repeated
    assert sum(event["event"] == "start" for event in events) == len(kills) + 1, message


@pytest.mark.full
def test_run_that_stops_at_steps_ends_with_equal_bits(undisturbed):
    """`train.stop_at` stops at a step between two saves and evaluations, and the schedule keeps its length."""
    tmp_path = undisturbed.path.parent
    folder = finish(tmp_path, "stopped", "train.stop_at=13")
    events = read_events(folder.events)
    assert [event["step"] for event in events if event["event"] == "eval"] == [13]
    assert [event["reason"] for event in events if event["event"] == "end"] == ["train.stop_at=13"]
    assert finish(tmp_path, "stopped").path == folder.path
    assert final_bytes(folder) == final_bytes(undisturbed)
    assert [e["step"] for e in read_events(folder.events) if e["event"] == "eval"] == [13, 20, STEPS]


@pytest.mark.full
def test_death_during_a_save_never_leaves_a_valid_partial_checkpoint(undisturbed):
    """Save in the background at every step and kill all processes within a second of it."""
    tmp_path, name = undisturbed.path.parent, "killed_while_saving"
    folder, chance = RunFolder(tmp_path / name), random.Random()
    for place in range(1, 6):
        process = start(tmp_path, name, "checkpoint.every=1", "checkpoint.keep=4")
        wait_for_step(folder, place, 5 * place, process)
        delay = chance.random()
        time.sleep(delay)
        members = family(process)
        kill_all(process)
        process.communicate(timeout=60)
        _, alive = psutil.wait_procs(members, timeout=20)
        assert not alive
        committed = list_checkpoints(folder.checkpoints)
        assert committed
        for path in committed:
            assert verify_checkpoint(path) == [], (place, delay, path.name)
    finish(tmp_path, name)
    assert final_bytes(folder) == final_bytes(undisturbed)


@pytest.mark.full
def test_killed_run_with_object_store_ends_with_equal_bits(undisturbed, s3):
    """Two ranks upload to an S3 server, are killed with their children, and resume from the objects."""
    tmp_path, name, root = undisturbed.path.parent, "in-store", s3 / "runs" / "in-store"
    place, folder = f"checkpoint.dir={s3 / 'runs'}", RunFolder(tmp_path / name)
    process = start(tmp_path, name, place)
    wait_for_step(folder, 1, 14, process)
    kill_all(process)
    process.communicate(timeout=60)
    saved = [step_in_name(path.name) for path in list_checkpoints(root)]
    assert saved
    assert max(saved) in (8, 12)  # one may be in progress when the run dies
    finish(tmp_path, name, place)
    assert not (tmp_path / name / "checkpoints").exists()
    starts = [event for event in read_events(folder.events) if event["event"] == "start"]
    assert len(starts) == 2
    path = list_checkpoints(root)[-1]
    assert (step_in_name(path.name), verify_checkpoint(path)) == (STEPS, [])
    found, expected = load_checkpoint(path), load_checkpoint(undisturbed.checkpoint(STEPS))
    for group in ("model", "optimizer"):
        assert found.tensors(group).keys() == expected.tensors(group).keys()
        for tensor, other in expected.tensors(group).items():
            assert torch.equal(found.tensors(group)[tensor], other), tensor
