"""A save behind training: a thread that writes, tries again what failed, and is asked how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weft.checkpoint.targets import Location
from weft.errors import CheckpointError, CommError, UnfitError
from weft.train.loop import SaveEnd

#: Seconds before a failed save is tried again, at first and at most.
_PAUSE_S = (1.0, 30.0)
#: How long (s) a rank that fails waits for the save under way; where others are gone, it may just be about to end.
_LAST_WAIT_S, _LAST_WAIT_ALONE_S = 30.0, 0.5


class Save:
    """One save of one rank. Errors are those of all ranks alike, so that all try again together.

    Args:
        step: optimizer steps done.
        act: writes and commits it with all ranks, and returns its path.
        retries: how often a CheckpointError is tried again.
        holds: whether it is tried on after that, while training waits.
        is_copy: it goes to memory, and training goes on without it where it fails.
    """

    def __init__(
        self, step: int, act: Callable[[], Location], retries: int = 0, holds: bool = False, is_copy: bool = False
    ):
        self.step, self.is_copy = step, is_copy
        self._act, self._retries, self._holds = act, retries, holds
        self._began = time.perf_counter()
        self._over = threading.Event()
        self._given_up = threading.Event()
        self._path: Location | None = None
        self._durable_s = 0.0
        #: How long training waited for it (s).
        self.stall_s = 0.0
        #: What each failed try said.
        self.failures: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Write it in this thread; what goes wrong is kept for `end`."""
        try:
            self._path = self._tried()
        except Exception as error:
            self.error = error
        finally:
            self._durable_s = time.perf_counter() - self._began
            self._over.set()

    def start(self) -> None:
        """Write it in a thread of its own, which dies with the process: what has no COMMIT then never counted."""
        threading.Thread(target=self.run, name="weft-save", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    @property
    def is_held(self) -> bool:
        """Whether training waits until it works."""
        return self._holds and not self.is_over and len(self.failures) > self._retries

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it is over; what training waits is its stall."""
        began = time.perf_counter()
        self._over.wait(seconds)
        self.stall_s += time.perf_counter() - began

    def leave(self, error: BaseException) -> None:
        """Wait for it once more after an error that ends this rank: it may be the last one, but needs all ranks to end.

        It gets little time where another rank is gone or silent.
        """
        self._given_up.set()
        is_alone = isinstance(error, CommError) and not error.peer_ends
        self.wait(_LAST_WAIT_ALONE_S if is_alone else _LAST_WAIT_S)

    def end(self) -> SaveEnd:
        """Return how it ended, or raise what it failed on."""
        if self.error is not None and self.is_copy:
            return SaveEnd(self.step, note=f"step {self.step} is not copied to memory: {self.error}")
        if isinstance(self.error, UnfitError):
            return SaveEnd(self.step, why=str(self.error))
        if self.error is not None:
            raise self.error
        return SaveEnd(self.step, self._path, "", "", self.stall_s, self._durable_s, self.is_copy)

    def _tried(self) -> Location:
        pause = _PAUSE_S[0]
        while True:
            try:
                return self._act()
            except UnfitError:
                raise
            except CheckpointError as error:
                self.failures.append(str(error))
                if len(self.failures) > self._retries and not self._holds:
                    raise
                if self._given_up.wait(pause):
                    raise
                pause = min(2 * pause, _PAUSE_S[1])
