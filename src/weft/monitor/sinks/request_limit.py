"""A time limit for a complete network call, including name lookups, connections, and all bytes of a response."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


class OutOfTime(Exception):
    """Raised if a call did not return in time."""


class OpenSockets:
    """The open sockets of a call. Another thread can shut them down to end the call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_over = False

    def add(self, opened: socket.socket) -> None:
        """Add a socket. After `end` it is shut down immediately."""
        with self._lock:
            self._sockets.append(opened)
            if self._is_over:
                _end(opened)

    def end(self) -> None:
        """Close all sockets for reading and writing. Pending calls on them fail."""
        with self._lock:
            self._is_over = True
            for one in self._sockets:
                _end(one)


def within(seconds: float, act: Callable[[], _T], end: Callable[[], None] = lambda: None) -> _T:
    """Run `act` with a time limit, and return its value or raise its error.

    Args:
        seconds, act: the limit, and the call, which runs in a thread.
        end: called after the limit, so that the thread ends soon.

    Raises:
        OutOfTime: if it takes longer.
    """
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="weft-request", daemon=True).start()
    try:
        done.exception(seconds)
    except TimeoutError:
        end()
        raise OutOfTime from None
    return done.result()


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(one, socket.SHUT_RDWR)  # the plain socket's method: TLS's waits for the other side
