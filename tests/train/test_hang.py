"""A stopped rank of a real run: the terminal names it while the others wait, and the run continues or ends."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.train.test_kill import STEPS, family, kill_all, start, wait_for_step
from weft.train.folder import RunFolder

pytestmark = pytest.mark.full

SECONDS = 3


def write_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{index} warp weft loom thread cloth shuttle heddle " * 4}) for index in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))


def stop_a_rank(tmp_path: Path, rank: int, *settings: str) -> tuple:
    """Start a run and stop one rank after some steps; return (launcher, process of the rank)."""
    process = start(tmp_path, "hangs", f"launch.warn_after={SECONDS}s", *settings)
    wait_for_step(RunFolder(tmp_path / "hangs"), 1, 3, process)
    [stopped] = [one for one in family(process) if is_rank(one, rank)]
    stopped.send_signal(signal.SIGSTOP)
    return process, stopped


def is_rank(process: psutil.Process, rank: int) -> bool:
    return process.name() == f"weft-rank-{rank}"


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_is_named_and_run_continues_with_it(tmp_path, rank):
    write_text(tmp_path)
    process, stopped = stop_a_rank(tmp_path, rank)
    try:
        # Rank 0 comes last because it reports the others.
        time.sleep(SECONDS + (8 if rank == 0 else 5))
        stopped.send_signal(signal.SIGCONT)
        shown, _ = process.communicate(timeout=120)
    finally:
        kill_all(process)
    assert process.returncode == 0, shown
    assert f"waiting for rank {rank} since" in shown
    assert f"Process {stopped.pid} of rank {rank} is stopped; `kill -CONT {stopped.pid}` resumes it." in shown
    assert f"rank {rank} continues after" in shown
    assert f"step {STEPS}/{STEPS}" in shown
    log = (RunFolder(tmp_path / "hangs").logs / f"rank_{1 - rank}.log").read_text()
    assert f"rank {1 - rank} waits in" in log
    assert "its Python stacks" in log


def test_rank_stopped_beyond_the_timeout_ends_the_run(tmp_path):
    write_text(tmp_path)
    process, _ = stop_a_rank(tmp_path, 1, "launch.timeout=10s")
    try:
        shown, _ = process.communicate(timeout=60)
    finally:
        kill_all(process)
    assert process.returncode == 1
    assert "waiting for rank 1 since" in shown
    assert "(launch.timeout=10s)" in shown
    assert "no message from rank 1 in 10 s, the timeout of the group." in shown
