"""Every exit code that docs/reference/errors.md lists, with the endings of a command that cause it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli import app as command
from weft.cli.launch.failure import Failure
from weft.cli.launch.launch import RankFailed, Stopped
from weft.errors import CheckpointError, CommError, ConfigError, LaunchError, OutOfMemory, TrainingHalted, WeftError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


def failed(exit_code: int, kind: str = "") -> RankFailed:
    return RankFailed(Failure(0, exit_code, kind=kind, message="x", expected=bool(kind)), Path("rank_0.log"))


def stopped(name: str, *, saved: bool = False) -> Stopped:
    return Stopped(signal.Signals[name], "stopped", saved=saved)


ENDS: list[tuple[int, BaseException | None]] = [
    (0, None),
    *((0, stopped(name, saved=True)) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")),
    (1, failed(1)),
    (1, failed(-9)),
    (1, CommError("ranks could not meet")),
    (2, ConfigError("train.steps=0: no.")),
    (2, LaunchError("run.name=a: process 1 is training")),
    (2, CheckpointError("run.dir=a: the checkpoint needs 1 GiB")),
    (2, failed(2, "CheckpointError")),
    (3, TrainingHalted("loss is NaN.")),
    (3, failed(3, "TrainingHalted")),
    (4, OutOfMemory("no memory")),
    (4, failed(4, "OutOfMemory")),
    (129, stopped("SIGHUP")),
    (130, stopped("SIGINT")),
    (130, KeyboardInterrupt()),
    (138, stopped("SIGUSR1")),
    (140, stopped("SIGUSR2")),
    (143, stopped("SIGTERM")),
]


@pytest.mark.parametrize("code, end", ENDS, ids=lambda value: value if isinstance(value, int) else repr(value)[:40])
def test_end_of_training_sets_the_exit_code(monkeypatch, code, end):
    def train_stub(spec: object) -> None:
        if end is not None:
            raise end

    monkeypatch.setattr("weft.cli.train.execute", train_stub)
    assert command.run(["train"]) == code


def test_closed_output_pipe_causes_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "weft", "models"], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_errors_page_lists_exactly_these_codes():
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    assert listed == {code for code, _ in ENDS} | {141}


def test_each_weft_error_has_a_listed_exit_code():
    def family(kind: type[WeftError]) -> set[type[WeftError]]:
        return {kind}.union(*(family(child) for child in kind.__subclasses__()))

    listed = {code for code, _ in ENDS}
    assert {kind.exit_code for kind in family(WeftError)} <= listed
