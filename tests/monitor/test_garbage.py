"""Turns of Python's garbage collector: when it runs, and that it is as before afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from weft.monitor.guards import GarbageTurns


@pytest.fixture
def collections():
    """The generation of each collection."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def make_garbage():
    for _ in range(3000):
        cycle = []
        cycle.append(cycle)


def test_it_runs_at_its_steps_alone(collections):
    seen = []
    with GarbageTurns(3) as garbage:
        for step in range(5, 14):
            make_garbage()
            collections.clear()
            garbage.after_step(step)
            seen.append((step, len(collections)))
            collections.clear()
            make_garbage()
            assert not collections
            assert not gc.isenabled()
    assert [step for step, number in seen if number] == [5, 6, 9, 12]  # the first one, and multiples of 3
    assert gc.isenabled()


#: In a process of its own: where something is frozen already, as in this one, it freezes nothing.
FREEZES = """
import gc

from weft.monitor.guards import GarbageTurns

assert not gc.get_freeze_count()
with GarbageTurns(3) as garbage:
    garbage.after_step()
    assert gc.get_freeze_count() > 1000
assert not gc.get_freeze_count()
assert gc.isenabled()
"""


def test_what_was_there_after_the_first_step_is_left_out_until_the_end():
    done = subprocess.run([sys.executable, "-c", FREEZES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_it_is_as_before_after_an_error():
    garbage = GarbageTurns(3)

    def fail():
        with garbage:
            garbage.after_step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_nothing_changes_where_nobody_asks(collections):
    with GarbageTurns(0) as garbage:
        garbage.after_step()
        assert gc.isenabled()
        make_garbage()
        assert collections
    gc.disable()
    try:
        with GarbageTurns(2) as garbage:
            garbage.after_step()
        assert not gc.isenabled()  # who turned it off keeps it off
    finally:
        gc.enable()
