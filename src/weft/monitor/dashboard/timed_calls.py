"""Calls into a file system that may hang, with a time limit. A call that hangs does not block other calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Jobs = queue.SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class Late(Exception):
    """Raised if a call is not over in time. It continues, and a later call with the same key returns its result."""


class TimedCalls:
    """Runs calls in a thread. A thread that is stuck in a call is abandoned and replaced by another.

    `call` must be called from one thread.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._late: dict[str, Future[Any]] = {}
        self._jobs: _Jobs | None = None

    def call(self, key: str, act: Callable[[], _T]) -> _T:
        """Run `act` with the time limit, and return its value or raise its error.

        If an earlier call with this key was late and is over now, its result is returned instead.

        Args:
            key: name of the resource. While a call with this key is late, no other call with it is started.
            act: the function to call.

        Raises:
            Late: if it takes longer than the limit, and immediately while an earlier call with this key is late.
        """
        future = self._late.get(key)
        if future is None:
            future = self._begin(act)
            try:
                future.exception(self._limit_s)
            except TimeoutError:
                self._late[key] = future
                self._leave_thread()
                raise Late(key) from None
        elif not future.done():
            raise Late(key)
        self._late.pop(key, None)
        return future.result()

    def close(self) -> None:
        """End the thread once its call is over."""
        self._leave_thread()

    def _begin(self, act: Callable[[], _T]) -> Future[_T]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="weft-read", daemon=True).start()
        future: Future[_T] = Future()
        self._jobs.put((future, act))
        return future

    def _leave_thread(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, act = job
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)
