"""Runs whose metric servers are down or whose disk is full continue, and deliver everything later."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.monitor.servers import Recorder, until
from tests.train.conftest import SMALL
from weft.monitor.events import read_events

pytestmark = pytest.mark.full


def command_of(folder: Path, text: Path, *settings: str) -> list[str]:
    places = [f"data.train={text}", f"run.dir={folder}", f"data.cache_dir={text.parent / 'cache'}"]
    words = [*SMALL, *places, "run.name=one", "train.steps=150", "eval.every=0", *settings]
    return [sys.executable, "-m", "weft", "train", *words]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def test_run_continues_while_metric_servers_fail_and_delivers_all(tmp_path, text):
    plain = tmp_path / "plain"
    subprocess.run(command_of(plain, text, "checkpoint.every=0"), check=True, capture_output=True)
    servers = {kind: Recorder(answer={}) for kind in ("http", "otlp")}
    lines = "".join(f'[[sink]]\nkind = "{kind}"\nurl = "{one.url}"\ntimeout = "1s"\n' for kind, one in servers.items())
    config = tmp_path / "sinks.toml"
    config.write_text(lines)
    servers["http"].start()
    servers["http"].slow_s = 30.0  # the otlp server does not exist
    watched = tmp_path / "watched"
    command = command_of(watched, text, "checkpoint.every=0")
    command.insert(command.index("train") + 1, str(config))
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 120
    (folder,) = [path.parent for path in watched.rglob("events.jsonl")]
    (other,) = [path.parent for path in plain.rglob("events.jsonl")]
    assert losses(folder) == losses(other)
    assert f"weft runs send {folder}" in done.stdout + done.stderr
    servers["http"].slow_s = 0.0
    servers["otlp"].start()
    send = [sys.executable, "-m", "weft", "runs", "send", str(folder)]
    subprocess.run(send, check=True, capture_output=True, timeout=120)
    steps = {event["step"] for body in servers["http"].bodies() for event in body["events"] if event["event"] == "step"}
    assert steps == {*range(1, 151)}
    assert servers["otlp"].got
    for one in servers.values():
        one.stop()


def test_run_continues_while_its_disk_is_full(tmp_path, text):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("a disk of 64 MiB cannot be mounted here: this needs root")
    command = command_of(place, text, "train.steps=1500", "checkpoint.every=100")
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: sum(len(losses(path.parent)) for path in place.rglob("events.jsonl")) > 20, 120)
        (folder,) = [path.parent for path in place.rglob("events.jsonl")]
        ballast = place / "ballast"
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        filled = len(losses(folder))
        time.sleep(3)
        assert run.poll() is None
        during = len(losses(folder))
        ballast.unlink()
        shown, _ = run.communicate(timeout=300)
        written = losses(folder)
    finally:
        if run.poll() is None:
            run.kill()
        subprocess.run(["umount", "-l", str(place)], check=False)
    assert run.returncode == 0, shown
    assert during - filled < 20
    assert len(written) == 1500
    assert "the disk is full. Training continues" in shown
    assert "there is space again" in shown
