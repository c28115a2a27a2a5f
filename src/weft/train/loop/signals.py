"""The signals that ask a run to save and stop."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.train.engine import Engine

#: Schedulers send SIGUSR1 or SIGUSR2 shortly before a job's time limit. A closed terminal sends SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def heeded_signals() -> list[signal.Signals]:
    """Return the stop signals to handle. Under `nohup`, SIGHUP stays ignored."""
    return [one for one in STOP_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


@contextmanager
def stop_on_signal(engine: Engine) -> Iterator[None]:
    """Turn stop signals inside a block into a request to save and stop after the current step, on all ranks.

    The engine is held by a weak reference: model and groups must be freed before the ranks disconnect.
    """
    asked = weakref.ref(engine)

    def ask(signum: int, frame: object) -> None:
        found = asked()
        if found is not None:
            found.wants_stop = True

    before = {number: signal.signal(number, ask) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
