"""train.max_time: a run saves and stops while there is time for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from weft.errors import ConfigError
from weft.monitor import StepRecord
from weft.train.engine import Evaluation
from weft.train.loop import Hook, SaveEnd

#: Steps whose longest stands for those to come: an odd one long ago does not count for ever.
_RECENT = 50
#: Bytes per second that a checkpoint is taken to be written with, until one was.
_ASSUMED_SPEED = 100e6
#: Seconds from the last save to the end of the process: pictures, the report, leaving the group.
_CLOSING_S = 10.0


class TimeLimit(Hook):
    """Asks for a stop before the limit. One rank watches; the loop sees to it that all stop after the same step.

    Args:
        text: the limit as it was typed.
        deadline: on the clock, in s.
        checkpoint_bytes: what a save will write.
        steps_to_stop: the most that follow the request.
        clock: in s.
    """

    def __init__(
        self,
        text: str,
        deadline: float,
        checkpoint_bytes: int,
        *,
        steps_to_stop: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._text, self._deadline, self._clock = text, deadline, clock
        self._steps_to_stop = steps_to_stop
        self._save_s = checkpoint_bytes / _ASSUMED_SPEED
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._evaluation_s = 0.0
        self._last = 0.0
        self._evaluated_s = 0.0
        self.reason = ""

    def on_start(self, start_step: int) -> None:
        self._last = self._clock()
        late = self._last - self._deadline
        if late >= 0:
            raise ConfigError(
                f"train.max_time={self._text}: the time ran out {late:.0f} s before the first step. "
                f"Use a longer time, or leave it out."
            )

    def on_step(self, record: StepRecord) -> str | None:
        now = self._clock()
        self._steps.append(record.seconds["total"])
        # What lies between two steps, beside an evaluation: waiting for data, and a save where one was due.
        self._save_s = max(self._save_s, now - self._last - record.seconds["total"] - self._evaluated_s)
        self._last, self._evaluated_s = now, 0.0
        # The first step of a start sets things up; it tells nothing of those to come.
        longest = max(list(self._steps)[1:] or self._steps)
        # The other ranks hear of it in the next step; an evaluation may come before that one.
        if now + self._steps_to_stop * longest + self._evaluation_s + self._save_s + _CLOSING_S < self._deadline:
            return None
        self.reason = f"train.max_time={self._text} is nearly used up"
        return self.reason

    def on_checkpoint(self, saved: SaveEnd) -> None:
        self._save_s = max(self._save_s, saved.durable_s)  # the last one is waited for

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        self._evaluated_s = self._clock() - self._last
        self._evaluation_s = max(self._evaluation_s, self._evaluated_s)
