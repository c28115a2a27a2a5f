"""Reports from the ranks' statuses: which rank is missing, in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from weft.comm.hang_watch import RankStatus, find_culprits, process_state, report, unfinished_on_device

NOW = time.mktime((2026, 3, 1, 14, 3, 11, 0, 0, -1))
REST = "The wait ends at 14:32:11 (launch.timeout=30m); Python stacks are in logs."


def waits(rank: int, *ranks: int, late: tuple[int, ...] = (), what: str = "all_reduce over dp_shard") -> RankStatus:
    return RankStatus(rank, NOW - 60, what, ranks, late)


def report_of(waiter: RankStatus, *others: RankStatus, zero: int = 0) -> tuple[str, tuple[int, ...], bool]:
    records = {one.rank: RankStatus.from_text(one.to_text()) for one in (waiter, *others)}
    state = "Process 7 of rank {} is stopped.".format
    found = report(waiter, records.get, state, now=NOW, rest=REST, zero=zero)
    return found.text, found.culprits, found.is_calm


def test_rank_without_a_status_is_reported_as_missing():
    assert report_of(waits(0, 0, 1, 2), waits(2, 0, 1, 2)) == (
        "waiting for rank 1 since 14:02:11 (1:00): rank 0 is in all_reduce over dp_shard. "
        f"Process 7 of rank 1 is stopped. {REST}",
        (1,),
        False,
    )


def test_rank_in_user_code_is_reported_with_its_line():
    text, culprits, _ = report_of(waits(0, 0, 1), RankStatus(1, NOW - 61, frame="train.py:40 in evaluate"))
    assert "Rank 1 calls no collective, at train.py:40 in evaluate." in text
    assert culprits == (1,)


def test_last_rank_of_a_chain_of_waits_is_the_culprit():
    """Rank 0 waits for 1 over dp, and 1 for 3 over tp. Rank 2 waits too, but is not the cause."""
    chain = [waits(1, 1, 3, what="all_gather over tp"), waits(2, 0, 2, what="barrier over dp_shard")]
    assert list(find_culprits(waits(0, 0, 1), {one.rank: one for one in chain}.get)) == [3]
    assert report_of(waits(0, 0, 1), *chain)[0].startswith("waiting for rank 3 since")
    # If the transport names the late rank, the other ranks' statuses are not read.
    assert list(find_culprits(waits(0, *range(4000), late=(17,)), {}.get)) == [17]


def test_declared_long_work_is_reported_without_alarm():
    saving = RankStatus(0, NOW - 60, phase="saves a checkpoint", may_take_long=True)
    text = "rank 0 saves a checkpoint: rank 1 waits for it in barrier over world since 14:02:11 (1:00)."
    assert report_of(waits(1, 0, 1, what="barrier over world"), saving) == (text, (0,), True)


def test_mutual_waits_are_reported_without_culprits():
    text, culprits, _ = report_of(waits(0, 0, 1), waits(1, 0, 1, what="all_gather over dp_shard"))
    assert text.startswith(
        "the ranks wait for each other since 14:02:11 (1:00): "
        "rank 0 in all_reduce over dp_shard, rank 1 in all_gather over dp_shard."
    )
    assert culprits == ()


def test_single_rank_forward_is_suspected_only_under_zero_3():
    hint = (
        "Under zero=3 every rank must take part in each forward, in evaluation too: has rank 0 called the model alone?"
    )
    gathers = waits(0, 0, 1, what="all_gather over dp_shard")
    assert hint in report_of(gathers, zero=3)[0]
    assert hint not in report_of(gathers, zero=2)[0]
    assert hint not in report_of(RankStatus(0, NOW, "all_gather over dp_shard", (0, 1), in_step=True), zero=3)[0]


def test_only_eight_of_many_missing_ranks_are_listed():
    text, culprits, _ = report_of(waits(0, *range(100)))
    assert text.startswith("waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more since")
    assert len(culprits) == 99
    assert text.count("is stopped") == 8


def _wait_for_state(pid: int, expected: str) -> None:
    end = time.monotonic() + 5
    while process_state(3, pid) != expected:
        assert time.monotonic() < end, process_state(3, pid)
        time.sleep(0.01)


def test_process_state_of_running_stopped_and_ended_process():
    assert process_state(3, None) == "Rank 3 does not respond; it is on another machine."
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        # A process that starts may wait for the disk at times.
        _wait_for_state(sleeper.pid, f"Process {sleeper.pid} of rank 3 is running, and has not reached it yet.")
        os.kill(sleeper.pid, signal.SIGSTOP)
        stopped = f"Process {sleeper.pid} of rank 3 is stopped; `kill -CONT {sleeper.pid}` resumes it."
        _wait_for_state(sleeper.pid, stopped)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert process_state(3, sleeper.pid) == f"Process {sleeper.pid} of rank 3 has ended."


@pytest.mark.parametrize("traces", [b"", b"{}", b'{"entries": []}', b"not json"])
def test_device_without_unfinished_collectives(traces):
    assert unfinished_on_device(traces, {}) == ("", ())


def test_oldest_unfinished_device_collective_is_found():
    entries = [
        {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"], "state": "completed"},
        {"profiling_name": "nccl:_all_gather_base", "process_group": ["12", "weft axis"], "state": "started"},
        {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"], "state": "scheduled"},
    ]
    axes = {"12": ("dp_shard", (0, 2))}
    found = unfinished_on_device(json.dumps({"entries": entries}).encode(), axes)
    assert found == ("all_gather_base over dp_shard", (0, 2))
