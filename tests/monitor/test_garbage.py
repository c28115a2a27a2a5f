"""GarbageTurns: when the collector runs, and that its state is restored afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from weft.monitor.guards import GarbageTurns


@pytest.fixture
def collections():
    """Yield a list that gets the generation of each collection."""
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


def test_gc_runs_only_at_its_steps(collections):
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


#: In a separate process: GarbageTurns freezes nothing if objects are frozen already, as in this one.
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


def test_objects_of_the_first_step_are_frozen_until_the_end():
    done = subprocess.run([sys.executable, "-c", FREEZES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_gc_state_is_restored_after_an_error():
    garbage = GarbageTurns(3)

    def fail():
        with garbage:
            garbage.after_step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_gc_setting_is_unchanged_when_not_enabled(collections):
    with GarbageTurns(0) as garbage:
        garbage.after_step()
        assert gc.isenabled()
        make_garbage()
        assert collections
    gc.disable()
    try:
        with GarbageTurns(2) as garbage:
            garbage.after_step()
        assert not gc.isenabled()  # a caller that disabled gc keeps it disabled
    finally:
        gc.enable()
