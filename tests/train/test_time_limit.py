"""When a run with train.max_time stops: early enough for what is left to do, on a clock of the test."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.monitor.events import StepRecord
from weft.train.engine import Evaluation
from weft.train.loop.observers import TimeLimit


class Run:
    """Plays a run's times to the limit; all in s."""

    def __init__(self, deadline: float, checkpoint_bytes: int = 0):
        self.now = 0.0
        self.limit = TimeLimit("1h", deadline, checkpoint_bytes, clock=lambda: self.now)
        self.limit.on_start(0)

    def step(self, seconds: float, *, evaluation_s: float = 0.0, save_s: float = 0.0) -> bool:
        """One step and what follows it; whether the limit asked for a stop."""
        self.now += seconds
        record = StepRecord(step=1, loss=1.0, lr=0.1, grad_norm=1.0, count=1, count_per_s=1.0,
                            seconds={"total": seconds}, memory_bytes=0)  # fmt: skip
        asked = self.limit.on_step(record)
        if evaluation_s:
            self.now += evaluation_s
            self.limit.on_evaluation(1, Evaluation(loss=1.0, count=1))
        self.now += save_s
        return bool(asked)


def steps_until_asked(run: Run, seconds: float) -> int:
    for number in range(1, 10_000):
        if run.step(seconds):
            return number
    raise AssertionError("never asked")


def test_two_steps_and_the_end_fit_when_it_asks():
    run = Run(deadline=100)
    assert steps_until_asked(run, 5.0) == 16  # at 80 s: 2 steps of 5 s and 10 s are left
    assert run.limit.reason == "train.max_time=1h is nearly used up"


def test_the_longest_evaluation_and_save_are_counted():
    run = Run(deadline=200)
    run.step(5.0, evaluation_s=20.0)
    run.step(5.0, save_s=30.0)
    assert run.now == 60
    assert steps_until_asked(run, 5.0) == 14  # at 130 s: 10 + 20 + 30 + 10 s are left


def test_before_the_first_save_its_time_is_taken_from_its_bytes():
    assert steps_until_asked(Run(deadline=200, checkpoint_bytes=3_000_000_000), 5.0) == 30  # at 150 s: 30 s more


def test_a_long_first_step_does_not_count_for_those_to_come():
    run = Run(deadline=200)
    run.step(60.0)  # compiles
    assert steps_until_asked(run, 1.0) == 128  # at 188 s


def test_a_time_that_is_over_already_is_a_mistake():
    with pytest.raises(ConfigError, match=r"train.max_time=1h: the time ran out 3 s before the first step. Use a "):
        Run(deadline=-3)
