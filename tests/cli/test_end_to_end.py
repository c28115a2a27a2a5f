"""Complete commands as a user types them: two at a time, a disk that fills up, a time limit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from weft import env
from weft.monitor.events import read_events
from weft.train.folder import RunFolder

pytestmark = pytest.mark.full

LIMIT_S = 240
SETTINGS = ["plan=dp_replicate=2", "launch.device=cpu", "tokenizer.kind=bytes", "model.dim=32", "model.num_layers=1",
            "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=64", "train.seq_len=32", "train.global_batch=4",
            "eval.every=0", "eval.batches=1", "checkpoint.every=0", "data.holdout=0.2", "sample.prompt="]  # fmt: skip

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def train(tmp_path: Path) -> Generator[Start]:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(400)))
    places = [f"data.train={tmp_path / 'text.jsonl'}", f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path}"]
    begun: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "weft", "train", *SETTINGS, *places, *overrides]
        begun.append(
            subprocess.Popen(
                command,
                env=env.child_env(OMP_NUM_THREADS="1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, text


def wait_for_steps(folder: RunFolder, process: subprocess.Popen[str], count: int = 3) -> None:
    end = time.monotonic() + LIMIT_S
    while sum(event["event"] == "step" for event in read_events(folder.events)) < count:
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def prepared(folder: RunFolder) -> dict[str, bytes]:
    """Return files that a refused command must not change. The live run itself writes events and checkpoints."""
    names = ("config.toml", "plan.txt", "model.json", "data.json", ".lock", "logs/rank_0.log", "logs/rank_1.log")
    return {name: (folder.path / name).read_bytes() for name in names}


def test_second_command_is_refused_and_the_first_is_unaffected(train, tmp_path):
    folder = RunFolder(tmp_path / "two")
    other = ["run.name=two", "train.steps=9", "optimizer.lr=5e-2", "plan=dp_shard=2 zero=2"]
    commands = [train("run.name=two", "train.steps=100000"), train("run.name=two", "train.steps=100000")]
    while all(one.poll() is None for one in commands):  # started in the same second: one of them gets the lock
        time.sleep(0.05)
    refused, live = sorted(commands, key=lambda one: one.poll() is None)
    assert ended(refused)[0] == 2
    wait_for_steps(folder, live)
    before = prepared(folder)
    code, text = ended(train(*other))
    assert code == 2
    assert text == (
        f"error: run.name=two: process {live.pid} is training in '{folder.path}' right now. "
        f"Wait for it, or use another run.name.\n"
    )
    assert prepared(folder) == before
    assert not list(folder.logs.glob("*.error.json"))
    live.send_signal(signal.SIGUSR1)
    code, text = ended(live)
    assert code == 0, text
    assert "stopped by SIGUSR1; everything is saved. Run the same command to resume." in text
    start = next(event for event in read_events(folder.events) if event["event"] == "start")
    assert start["plan"] == "dp_replicate=2"
    assert "of 100000: " in text


def test_run_saves_and_stops_before_its_time_limit(train, tmp_path):
    begin = time.monotonic()
    code, text = ended(train("run.name=timed", "train.steps=1000000", "train.max_time=1m"))
    assert (code, time.monotonic() - begin < 60) == (0, True), text
    assert " of 1000000: train.max_time=1m is nearly used up" in text
    assert RunFolder(tmp_path / "timed").checkpoint(read_events(tmp_path / "timed" / "events.jsonl")[-1]["step"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, leave: int) -> None:
    (disk / "filling").write_bytes(b"\0" * max(0, shutil.disk_usage(disk).free - leave))


def test_full_disk_is_reported_and_loses_no_event(train, small_disk):
    fill(small_disk, leave=150_000)
    code, text = ended(train(f"run.dir={small_disk}", "train.steps=9"))
    assert code == 2, text
    assert f"error: run.dir={small_disk / 'quickstart'}: the checkpoint needs " in text
    assert "  step" not in text
    (small_disk / "filling").unlink()
    process = train(f"run.dir={small_disk}", "train.steps=1000000")
    wait_for_steps(RunFolder(small_disk / "quickstart"), process)
    fill(small_disk, leave=0)
    assert process.stdout is not None
    timer = threading.Timer(LIMIT_S, process.kill)  # ends the output, and with it the next line
    timer.start()
    assert any("the disk is full. Training continues" in line for line in process.stdout)
    timer.cancel()
    (small_disk / "filling").unlink()
    process.send_signal(signal.SIGUSR1)
    code, text = ended(process)
    events = read_events(small_disk / "quickstart" / "events.jsonl")
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert (code, steps) == (0, [*range(1, len(steps) + 1)]), text  # no step is lost
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["failure", "resume"]  # of the refused command, and of the one that ran
