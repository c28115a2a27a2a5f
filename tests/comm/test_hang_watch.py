"""A rank that lets the others wait is told of, on every transport; long work is not an alarm."""

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


def in_users_code(seconds: float) -> None:
    time.sleep(seconds)


def watched(mesh: Mesh, late: int, work) -> tuple[list[str], str]:
    """What this rank tells while the rank `late` does `work` before an all_reduce; and its stacks."""
    told: list[str] = []
    with tempfile.TemporaryFile("w+") as stacks:
        barrier(mesh.data)
        with Watch(mesh, told.append, warn_after_s=WARN_AFTER_S, limit_s=60, stacks=stacks):
            for _ in range(2):  # what was said is taken back: the second time is like the first
                if mesh.rank == late:
                    work()
                all_reduce(torch.ones(1), mesh.data)
                time.sleep(0.25)
        barrier(mesh.data)
        stacks.seek(0)
        return told, stacks.read()


def late_rank(transport: str, late: int) -> tuple[list[str], str]:
    mesh = build_mesh(Plan(dp_replicate=2))
    join(mesh.data, "cpu", transport)
    return watched(mesh, late, lambda: in_users_code(2.0))


@pytest.mark.parametrize(
    "transport",
    [pytest.param(one, marks=() if not place else pytest.mark.full) for place, one in enumerate(TRANSPORTS)],
)
def test_who_lets_the_others_wait_is_told_with_its_line_and_stacks(ranks2, transport):
    (told, stacks), (silent, theirs) = ranks2.run(late_rank, transport, 1)
    assert silent == []
    assert [text.partition(" since ")[0].partition(" after ")[0] for text in told] == [
        "waiting for rank 1",
        "rank 1 continues",
    ] * 2
    assert "rank 0 is in all_reduce over dp_replicate." in told[0]
    assert f"Rank 1 calls no collective, at {Path(__file__).name}:" in told[0]
    assert "in in_users_code." in told[0]
    assert "The wait ends at " in told[0]
    assert stacks.count("rank 0 waits in all_reduce over dp_replicate since") == 2
    assert theirs.count("rank 1 calls no collective since") == 2
    assert "in in_users_code" in theirs


def test_the_first_rank_tells_of_itself_where_it_has_the_terminal(ranks2):
    (told, _), (silent, _) = ranks2.run(late_rank, "shared memory", 0)
    assert silent == []
    assert told[0].startswith("waiting for rank 0 since")
    assert "rank 1 is in all_reduce" in told[0]


def saves() -> tuple[list[str], str]:
    mesh = build_mesh(Plan(dp_replicate=2))

    def save() -> None:
        with mesh.pulse.doing("saves a checkpoint"):
            in_users_code(1.5)

    return watched(mesh, 0, save)


def test_long_work_is_one_calm_line(ranks2):
    (told, _), (silent, _) = ranks2.run(saves)
    assert silent == []
    assert len(told) == 2
    for text in told:
        assert text.startswith("rank 0 saves a checkpoint: rank 1 waits for it in all_reduce over dp_replicate since")


def works_alone() -> list[str]:
    """Nobody waits: all ranks work for long, as in a first step that compiles."""
    mesh = build_mesh(Plan(dp_replicate=2))
    told: list[str] = []
    barrier(mesh.data)
    with Watch(mesh, told.append, warn_after_s=0.3, limit_s=60) as first:
        in_users_code(1.0)
        barrier(mesh.data)
        # A second mesh of the process: one thread goes on, and watches both.
        with Watch(build_mesh(Plan(dp_shard=2)), told.append, warn_after_s=0.3, limit_s=60):
            assert not first.is_alive()
            for _ in range(8):
                barrier(mesh.data)
                time.sleep(0.1)
            assert sum(isinstance(thread, Watch) for thread in threading.enumerate()) == 1
    barrier(mesh.data)
    return told


def test_nothing_is_told_where_nobody_waits(ranks2):
    assert ranks2.run(works_alone) == [[], []]


def interpreter_is_stuck() -> str:
    mesh = build_mesh(Plan(dp_replicate=2))
    with tempfile.TemporaryFile("w+") as stacks:
        barrier(mesh.data)
        with Watch(mesh, lambda _: None, warn_after_s=WARN_AFTER_S, limit_s=60, stacks=stacks, owns_process=True):
            if mesh.rank == 1:
                ctypes.PyDLL(None).usleep(1_500_000)  # and no other thread of Python runs
            barrier(mesh.data)
        stacks.seek(0)
        return stacks.read()


def test_a_rank_whose_interpreter_is_stuck_leaves_its_stacks_too(ranks2):
    assert "in interpreter_is_stuck" in ranks2.run(interpreter_is_stuck)[1]


class Store(dict[str, str]):
    """What a rank asks of the group's store."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def compare_set(self, key: str, expected: str, new: str) -> bytes:
        return self.setdefault(key, new).encode()

    def set(self, key: str, value: str) -> None:
        self[key] = value


def test_a_wait_is_reported_after_warn_after_and_not_later(monkeypatch):
    mesh, told, clock, store = build_mesh(Plan()), list[str](), [0.0], Store()
    watch = Watch(mesh, told.append, warn_after_s=5.0, limit_s=60)
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
        seconds += [tick] * (len(told) - len(seconds))
    assert seconds == [5]
    assert told[0].startswith("waiting for rank 1 since ")


@pytest.mark.filterwarnings("ignore:store key")
def test_what_others_wrote_to_the_store_neither_silences_nor_alarms_the_watch(monkeypatch):
    """Every key of the watch was forged: by "1", by another rank's number, by a record that blames another rank."""
    mesh, told, clock, store = build_mesh(Plan()), list[str](), [0.0], Store()
    for key in ("teller", "waiter", "alarm", "1", "place/1"):
        store.set(f"weft/watch/{key}", "1")
    watch = Watch(mesh, told.append, warn_after_s=5.0, limit_s=60)
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
    assert len(told) == 1
    assert told[0].startswith("waiting for rank 1 since ")
    assert "Rank 1 does not respond" in told[0]
    assert dumped == [5.0]  # once this rank wanted stacks itself
