"""When a run with train.max_time stops: early enough for the remaining work, with a simulated clock."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.monitor.events import StepRecord
from weft.train.engine import Evaluation
from weft.train.loop.observers import TimeLimit


class Run:
    """Simulate a run's times up to the limit. All times are in seconds."""

    def __init__(self, deadline: float, checkpoint_bytes: int = 0):
        self.now = 0.0
        self.limit = TimeLimit("1h", deadline, checkpoint_bytes, clock=lambda: self.now)
        self.limit.on_start(0)

    def step(self, seconds: float, *, evaluation_s: float = 0.0, save_s: float = 0.0) -> bool:
        """Run one step and the work after it; return whether the limit requested a stop."""
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


def test_two_steps_and_the_end_fit_after_the_request():
    run = Run(deadline=100)
    assert steps_until_asked(run, 5.0) == 16  # at 80 s: 2 steps of 5 s and 10 s remain
    assert run.limit.reason == "train.max_time=1h is nearly used up"


def test_longest_evaluation_and_save_are_included():
    run = Run(deadline=200)
    run.step(5.0, evaluation_s=20.0)
    run.step(5.0, save_s=30.0)
    assert run.now == 60
    assert steps_until_asked(run, 5.0) == 14  # at 130 s: 10 + 20 + 30 + 10 s remain


def test_time_of_first_save_is_estimated_from_its_bytes():
    assert steps_until_asked(Run(deadline=200, checkpoint_bytes=3_000_000_000), 5.0) == 30  # at 150 s: 30 s more


def test_long_first_step_does_not_count_for_later_steps():
    run = Run(deadline=200)
    run.step(60.0)  # compiles
    assert steps_until_asked(run, 1.0) == 128  # at 188 s


def test_limit_that_has_already_passed_is_an_error():
    with pytest.raises(ConfigError, match=r"train.max_time=1h: the time ran out 3 s before the first step. Use a "):
        Run(deadline=-3)
