"""Limits of the dashboard's connections: their number, the time for a request or response, and token guesses."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import resource
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Maximum time (s) that a client may take to send a request or to accept data of a response, or be idle.
DEADLINE_S = 10.0
#: Maximum number of connections, and descriptors reserved for files, the listener and connections being closed.
_MOST, _RESERVED = 1000, 160
#: Interval (s) of deadline checks, and minimum interval (s) between warnings about a lack of file descriptors.
_LOOK_S, _TELL_S = 0.5, 60.0
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections() -> int:
    """Return the maximum number of connections: 1,000, or fewer by the limit of file descriptors, but at least 16."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(16, min(_MOST, soft - _RESERVED))


class _Open:
    """A connection. `since`: when the server began to wait for its client, or inf while it handles a request."""

    __slots__ = ("call", "since")

    def __init__(self, call: socket.socket, since: float):
        self.call, self.since = weakref.ref(call), since


class Connections:
    """The open connections by file descriptor, oldest first.

    Args:
        most: maximum number. A further connection replaces the one whose client has kept the server waiting longest.
        deadline_s: how long the server waits for a client before it closes the connection.
        clock: returns the current time (s); replaced in tests.
    """

    def __init__(self, most: int, deadline_s: float = DEADLINE_S, clock: Callable[[], float] = time.monotonic):
        self.most, self._deadline_s, self._clock = most, deadline_s, clock
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: socket.socket) -> None:
        """Add a new connection, and shut down another one if there are too many."""
        self._open.pop(call.fileno(), None)
        self._open[call.fileno()] = _Open(call, self._clock())
        if len(self._open) > self.most:
            self.end_late()
        if len(self._open) > self.most:
            number, _ = min(self._open.items(), key=lambda item: item[1].since)
            self._end(number)

    def waits(self, number: int) -> None:
        """Record that the server waits for the client of the connection with descriptor `number`."""
        if number in self._open:
            self._open[number].since = self._clock()

    def works(self, number: int) -> None:
        """Record that the server works on a request of the connection with descriptor `number`."""
        if number in self._open:
            self._open[number].since = math.inf

    def end_late(self) -> None:
        """Shut down connections whose clients are too late, and forget closed ones."""
        end = self._clock() - self._deadline_s
        for number, one in list(self._open.items()):
            call = one.call()
            if call is None or call.fileno() != number:
                del self._open[number]
            elif one.since < end:
                self._end(number)

    def _end(self, number: int) -> None:
        # Only shut it down: the event loop closes it, so that the descriptor is not reused too early.
        call = self._open.pop(number).call()
        if call is not None:
            try:
                call.shutdown(socket.SHUT_RDWR)
            except OSError:
                return


class CountedListener(socket.socket):
    """A listening socket that adds connections to `Connections` when they are accepted, before any TLS handshake."""

    connections: Connections

    @classmethod
    def of(cls, listening: socket.socket, connections: Connections) -> CountedListener:
        """Return a CountedListener that replaces a listening socket."""
        found = cls(fileno=listening.detach())
        found.connections = connections
        return found

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection, as `socket.accept` does, and count it."""
        call, address = super().accept()
        self.connections.add(call)
        return call, address


def protocol_of(connections: Connections) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol class, which reports to `connections` when it waits for a client or works."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            found = transport.get_extra_info("socket")
            self._number: int = found.fileno() if found is not None else -1
            super().connection_made(transport)

        def handle_events(self) -> None:
            super().handle_events()
            if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE) and not self.flow.write_paused:
                connections.works(self._number)

        def on_response_complete(self) -> None:
            connections.waits(self._number)
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            connections.waits(self._number)

        def resume_writing(self) -> None:
            super().resume_writing()
            connections.works(self._number)

    return Protocol


class PageServer(uvicorn.Server):
    """uvicorn's server with deadlines. It reports a lack of descriptors at most once a minute."""

    def __init__(self, config: uvicorn.Config, connections: Connections):
        super().__init__(config)
        self._connections = connections
        self._last_warning_s = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen and to check deadlines."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        await super().startup(sockets)
        self._look(loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._connections.end_late()
        loop.call_later(_LOOK_S, self._look, loop)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, ConnectionError | TimeoutError):
            return  # an error of a client, which is not logged
        if not (isinstance(error, OSError) and error.errno in _LACKING):
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._last_warning_s > _TELL_S:
            self._last_warning_s = time.monotonic()
            print(
                f"weft watch: new connections wait ({error.strerror}; {len(self._connections)} are open). "
                "Raise the limit with ulimit -n.",
                file=sys.stderr,
                flush=True,
            )


# Limits on guesses of the dashboard's token: per address, and over all addresses.

#: Number of wrong tokens before an address must wait, its first wait (s), and the longest wait (s).
_FREE, _FIRST_WAIT_S, _LONGEST_WAIT_S = 5, 1.0, 60.0
#: Maximum number of wrong tokens of all addresses within this many seconds.
_OF_ALL, _WINDOW_S = 100, 60.0
#: Time (s) that wrong guesses of an address are remembered, and the maximum number of addresses.
_REMEMBERED_S, _MOST_ADDRESSES = 900.0, 1000


@dataclass(slots=True)
class _Wrong:
    count: int = 0
    last: float = -math.inf


class GuessLimit:
    """Counts wrong tokens. While an address must wait, its tokens are not compared."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._wrong: dict[str, _Wrong] = {}
        self._of_all: deque[float] = deque(maxlen=_OF_ALL)

    def wait_s(self, address: str) -> float:
        """Return the seconds that this address must wait before its next guess, 0 if none.

        It may have to wait for its own wrong tokens, or because there were too many from all addresses.
        """
        now, known = self._clock(), self._wrong.get(_network(address))
        wait = self._of_all[0] + _WINDOW_S - now if len(self._of_all) == _OF_ALL else 0.0
        if known is not None and known.count >= _FREE and now - known.last < _REMEMBERED_S:
            pause = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(known.count - _FREE, 10))
            wait = max(wait, known.last + pause - now)
        return max(0.0, wait)

    def note(self, address: str, *, right: bool) -> None:
        """Record an attempt to log in from an address. A correct token (`right`) resets the address's wrong ones."""
        key, now = _network(address), self._clock()
        known = self._wrong.pop(key, None)
        if right:
            return
        if known is None or now - known.last >= _REMEMBERED_S:
            known = _Wrong()
        known.count, known.last = known.count + 1, now
        while len(self._wrong) >= _MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]  # the address whose last wrong token is oldest
        self._wrong[key] = known
        self._of_all.append(now)


def _network(address: str) -> str:
    """Return the key under which guesses of a client are counted: its IPv4 address, or its IPv6 /64 network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)
