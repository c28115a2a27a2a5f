"""Hang watch: a late rank is reported on every transport, and declared long work raises no alarm."""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.comm import hang_watch
from weft.comm.collectives import all_reduce, barrier
from weft.comm.connect import TRANSPORTS, join
from weft.comm.hang_watch import Watch
from weft.comm.mesh import Mesh, build_mesh
from weft.comm.store import StoreKey
from weft.config.plan import Plan

WARN_AFTER_S = 0.4


def in_user_code(seconds: float) -> None:
    time.sleep(seconds)


def watched(mesh: Mesh, late: int, work) -> tuple[list[str], str]:
    """Run `work` on the rank `late` before an all_reduce. Return this rank's reports and dumped stacks."""
    reports: list[str] = []
    with tempfile.TemporaryFile("w+") as stacks:
        barrier(mesh.data)
        with Watch(mesh, reports.append, warn_after_s=WARN_AFTER_S, limit_s=60, stacks=stacks):
            for _ in range(2):  # a report is withdrawn after the wait: the second round reports like the first
                if mesh.rank == late:
                    work()
                all_reduce(torch.ones(1), mesh.data)
                time.sleep(0.25)
        barrier(mesh.data)
        stacks.seek(0)
        return reports, stacks.read()


def late_rank(transport: str, late: int) -> tuple[list[str], str]:
    mesh = build_mesh(Plan(dp_replicate=2))
    join(mesh.data, "cpu", transport)
    return watched(mesh, late, lambda: in_user_code(2.0))


@pytest.mark.parametrize(
    "transport",
    [pytest.param(one, marks=() if not index else pytest.mark.full) for index, one in enumerate(TRANSPORTS)],
)
def test_late_rank_is_reported_with_line_and_stacks(ranks2, transport):
    (reports, stacks), (silent, late_stacks) = ranks2.run(late_rank, transport, 1)
    assert silent == []
    assert [text.partition(" since ")[0].partition(" after ")[0] for text in reports] == [
        "waiting for rank 1",
        "rank 1 continues",
    ] * 2
    assert "rank 0 is in all_reduce over dp_replicate." in reports[0]
    assert f"Rank 1 calls no collective, at {Path(__file__).name}:" in reports[0]
    assert "in in_user_code." in reports[0]
    assert "The wait ends at " in reports[0]
    assert stacks.count("rank 0 waits in all_reduce over dp_replicate since") == 2
    assert late_stacks.count("rank 1 calls no collective since") == 2
    assert "in in_user_code" in late_stacks


def test_late_rank_zero_reports_itself(ranks2):
    (reports, _), (silent, _) = ranks2.run(late_rank, "shared memory", 0)
    assert silent == []
    assert reports[0].startswith("waiting for rank 0 since")
    assert "rank 1 is in all_reduce" in reports[0]


def save_on_rank_0() -> tuple[list[str], str]:
    mesh = build_mesh(Plan(dp_replicate=2))

    def save() -> None:
        with mesh.pulse.doing("saves a checkpoint"):
            in_user_code(1.5)

    return watched(mesh, 0, save)


def test_declared_long_work_is_reported_without_alarm(ranks2):
    (reports, _), (silent, _) = ranks2.run(save_on_rank_0)
    assert silent == []
    assert len(reports) == 2
    for text in reports:
        assert text.startswith("rank 0 saves a checkpoint: rank 1 waits for it in all_reduce over dp_replicate since")


def work_without_waits() -> list[str]:
    """Work for long on all ranks without waiting for each other, as in a first step that compiles."""
    mesh = build_mesh(Plan(dp_replicate=2))
    reports: list[str] = []
    barrier(mesh.data)
    with Watch(mesh, reports.append, warn_after_s=0.3, limit_s=60) as first:
        in_user_code(1.0)
        barrier(mesh.data)
        # With a second mesh in the process, one thread watches both.
        with Watch(build_mesh(Plan(dp_shard=2)), reports.append, warn_after_s=0.3, limit_s=60):
            assert not first.is_alive()
            for _ in range(8):
                barrier(mesh.data)
                time.sleep(0.1)
            assert sum(isinstance(thread, Watch) for thread in threading.enumerate()) == 1
    barrier(mesh.data)
    return reports


def test_no_report_without_waiting_ranks(ranks2):
    assert ranks2.run(work_without_waits) == [[], []]


def sleep_with_gil() -> str:
    mesh = build_mesh(Plan(dp_replicate=2))
    with tempfile.TemporaryFile("w+") as stacks:
        barrier(mesh.data)
        with Watch(mesh, lambda _: None, warn_after_s=WARN_AFTER_S, limit_s=60, stacks=stacks, owns_process=True):
            if mesh.rank == 1:
                ctypes.PyDLL(None).usleep(1_500_000)  # holds the GIL: no other Python thread runs
            barrier(mesh.data)
        stacks.seek(0)
        return stacks.read()


def test_rank_that_holds_the_gil_dumps_its_stacks(ranks2):
    assert "in sleep_with_gil" in ranks2.run(sleep_with_gil)[1]


class Store(dict[str, str]):
    """In-memory store with the methods of the group's store that `Watch` calls."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def compare_set(self, key: str, expected: str, new: str) -> bytes:
        return self.setdefault(key, new).encode()

    def set(self, key: str, value: str) -> None:
        self[key] = value


def test_wait_is_reported_exactly_after_warn_after(monkeypatch):
    mesh, reports, clock, store = build_mesh(Plan()), list[str](), [0.0], Store()
    watch = Watch(mesh, reports.append, warn_after_s=5.0, limit_s=60)
    watch._key = StoreKey(b"secret")
    waiting: Any = SimpleNamespace(where=lambda: ("all_reduce over tp", (0, 1)), late=lambda: (1,))
    mesh.pulse.waiting = waiting
    monkeypatch.setattr(hang_watch, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock[0]}))
    monkeypatch.setattr(watch, "_open", lambda: store)
    watch._looked = 0.0
    seconds = []
    for tick in range(9):
        clock[0] = float(tick)
        watch._look()
        seconds += [tick] * (len(reports) - len(seconds))
    assert seconds == [5]
    assert reports[0].startswith("waiting for rank 1 since ")


@pytest.mark.filterwarnings("ignore:store key")
def test_forged_store_entries_neither_silence_nor_trigger_reports(monkeypatch):
    """Check that a forged "1" under every key of the watch does not change its reports."""
    mesh, reports, clock, store = build_mesh(Plan()), list[str](), [0.0], Store()
    for key in ("teller", "waiter", "alarm", "1", "place/1"):
        store.set(f"weft/watch/{key}", "1")
    watch = Watch(mesh, reports.append, warn_after_s=5.0, limit_s=60)
    watch._key = StoreKey(b"secret")
    waiting: Any = SimpleNamespace(where=lambda: ("all_reduce over tp", (0, 1)), late=lambda: (1,))
    mesh.pulse.waiting = waiting
    monkeypatch.setattr(hang_watch, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock[0]}))
    monkeypatch.setattr(watch, "_open", lambda: store)
    dumped: list[float] = []
    monkeypatch.setattr(watch, "_dump", lambda: dumped.append(clock[0]) or setattr(watch._still, "dumped", True))
    watch._looked = 0.0
    for tick in range(9):
        clock[0] = float(tick)
        watch._look()
    assert len(reports) == 1
    assert reports[0].startswith("waiting for rank 1 since ")
    assert "Rank 1 does not respond" in reports[0]
    assert dumped == [5.0]  # only when this rank itself requested stacks
