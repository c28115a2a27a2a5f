from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.data.token_files import new_folder
from weft.files import locked

HOLD = "import sys, time; from pathlib import Path; from weft.files import locked\n"


def start_lock_holder(path: Path) -> subprocess.Popen[str]:
    """Start a process that holds the lock until it is killed."""
    code = HOLD + "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_killed_holder_releases_the_lock_and_waiter_is_notified(tmp_path: Path) -> None:
    holder = start_lock_holder(tmp_path / "a.lock")
    notified: list[float] = []

    def waiting() -> None:
        notified.append(time.monotonic())
        os.kill(holder.pid, signal.SIGKILL)

    try:
        with locked(tmp_path / "a.lock", waiting):
            assert len(notified) == 1
    finally:
        holder.kill()
        holder.communicate()


def test_two_processes_never_have_the_lock_simultaneously(tmp_path: Path) -> None:
    code = HOLD + (
        "log = Path(sys.argv[1]) / 'log'\n"
        "for _ in range(8):\n"
        "    with locked(Path(sys.argv[1]) / 'a.lock'):\n"
        "        for word in ('in', 'out'):\n"
        "            with log.open('a') as file: file.write(word + '\\n')\n"
        "            time.sleep(0.01)\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [worker.wait(30) for worker in workers] == [0, 0]
    assert (tmp_path / "log").read_text().split() == ["in", "out"] * 16


def test_new_folder_appears_complete_or_not(tmp_path: Path) -> None:
    final = tmp_path / "data-1"
    leftover = tmp_path / ".data-1.partial-99999"
    leftover.mkdir()
    (leftover / "x").write_text("half")

    def fail() -> None:
        with new_folder(final) as folder:
            assert not leftover.exists()
            (folder / "x").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with new_folder(final) as folder:
        (folder / "x").write_text("one")
        assert not final.exists()
    with new_folder(final) as folder:
        (folder / "y").write_text("two")
    assert [path.name for path in tmp_path.rglob("*")] == ["data-1", "y"]
