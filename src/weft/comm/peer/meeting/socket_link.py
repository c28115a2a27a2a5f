"""A link over sockets of its own, for ranks of several worlds: made for one meeting, and closed after it.

A process group lives as long as all of its ranks. This one costs a connection for each pair, fails where nothing moved
for a given time, and takes nothing with it. Sums are made here, in the tree of all links: the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.comm.links import Operation, Parts, failed, unobserved

#: all_reduce of at most so many bytes, or between two, sends everything to everyone.
_LITTLE_BYTES = 1 << 16
_HEAD = struct.Struct("!QQ")  # which meeting, which place calls
_AT_ONCE = 1 << 20
_FUNCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
#: How long (s) a caller may take to say who it is.
_HEAD_S = 5.0


class MeetingDoor:
    """Where this rank is called by ranks of other replicas, as long as it lives.

    Args:
        host: under which the others reach this machine.
    """

    def __init__(self, host: str):
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Close the door: nobody calls any more."""
        self._listener.close()

    def join(self, meeting: int, place: int, doors: Sequence[str], timeout_s: float) -> dict[int, socket.socket]:
        """Return a connection to each other place. OSError where one does not come in time.

        Args:
            meeting: its number.
            place: of this rank in it.
            doors: of all places.
            timeout_s: for all of it.
        """
        end, found = time.monotonic() + timeout_s, dict[int, socket.socket]()
        try:
            for other in range(place + 1, len(doors)):
                host, _, port = doors[other].rpartition(":")
                found[other] = socket.create_connection((host, int(port)), timeout=max(end - time.monotonic(), 0.01))
                found[other].sendall(_HEAD.pack(meeting, place))
            while len(found) < len(doors) - 1:
                self._listener.settimeout(max(end - time.monotonic(), 0.01))
                call, _ = self._listener.accept()
                caller = _who_calls(call, meeting)
                if caller is None or not caller < place:
                    call.close()  # of a meeting that came to nothing
                else:
                    found[caller] = call
        except OSError:
            for call in found.values():
                call.close()
            raise
        for call in found.values():
            call.setblocking(False)
            call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found


def _who_calls(call: socket.socket, meeting: int) -> int | None:
    """The place that calls for this meeting; None where it is another one, or does not say."""
    call.settimeout(_HEAD_S)
    with contextlib.suppress(OSError, struct.error):
        said, place = _HEAD.unpack(call.recv(_HEAD.size, socket.MSG_WAITALL))
        return place if said == meeting else None
    return None


class SocketLink:
    """The ranks of one meeting, each with a connection to every other.

    Args:
        calls: connections by place.
        place: of this rank.
        timeout_s: seconds in which nothing moves before an operation fails.
        leaves_host: whether bytes to that place leave this host.
    """

    transport = "sockets of a meeting"
    self_driven = True
    busy = False

    def __init__(
        self, calls: Mapping[int, socket.socket], place: int, timeout_s: float, leaves_host: Callable[[int], bool]
    ):
        self.reason = "replicas are worlds of their own"
        self._calls, self._place, self._size = dict(calls), place, len(calls) + 1
        self._timeout_s, self._leaves_host = timeout_s, leaves_host
        self._queue: deque[Operation] = deque()

    def close(self) -> None:
        """Close the connections."""
        for call in self._calls.values():
            call.close()

    def start(self, operation: Operation) -> None:
        """Line the operation up: `block` does it, in the order of starts."""
        self._queue.append(operation)

    def advance(self) -> bool:
        """Return False: nothing goes on by itself."""
        return False

    def block(self, operation: Operation) -> bool:
        """Carry out what was started up to this operation; always True.

        Raises:
            CommError: where a rank is gone, or nothing moved for too long.
        """
        while not operation.finished:
            one = self._queue[0]
            try:
                with torch.no_grad(), unobserved():
                    self._carry_out(one)
            except OSError as error:
                raise failed(one, error) from error
            one.finished = True
            self._queue.popleft()
        return True

    def late(self) -> tuple[int, ...]:
        """Return nothing: who is late is seen when the time is over."""
        return ()

    def look(self, operation: Operation, waited_s: float) -> None:
        """Do nothing: `block` keeps the time."""

    def _carry_out(self, operation: Operation) -> None:
        source = operation.source
        if isinstance(source, Parts):
            source = source.copy_to(operation.out) if operation.kind == "all_reduce" else source.joined()
        out = operation.out
        match operation.kind:
            case "all_reduce":
                self._all_reduce(operation, out)
            case "reduce_scatter":
                received = torch.empty((self._size, out.numel()), dtype=out.dtype)
                self._swap(operation, list(source.view(self._size, -1)), list(received))
                out.copy_(_combined(list(received), operation.op))
            case "all_gather":
                self._swap(operation, [source] * self._size, list(out.view(self._size, -1)))
            case "broadcast":
                nothing = out[:0]
                sends = [out if self._place == operation.root else nothing] * self._size
                receives = [nothing] * self._size
                if self._place != operation.root:
                    receives[operation.root] = out
                self._swap(operation, sends, receives)
            case "all_to_all":
                self._swap(operation, _cut(source, operation.send), _cut(out, operation.receive))
            case _:
                token = torch.zeros(1, dtype=torch.uint8)
                self._swap(operation, [token] * self._size, [token.clone() for _ in range(self._size)])

    def _all_reduce(self, operation: Operation, out: torch.Tensor) -> None:
        size = self._size
        if size == 2 or out.nbytes <= _LITTLE_BYTES:
            received = torch.empty((size, out.numel()), dtype=out.dtype)
            self._swap(operation, [out] * size, list(received))
            out.copy_(_combined(list(received), operation.op))
            return
        bounds = [place * out.numel() // size for place in range(size + 1)]
        parts = [out[first:last] for first, last in itertools.pairwise(bounds)]
        own = parts[self._place]
        received = torch.empty((size, own.numel()), dtype=out.dtype)
        self._swap(operation, parts, list(received))
        own.copy_(_combined(list(received), operation.op))
        self._swap(operation, [own] * size, parts)

    def _swap(self, operation: Operation, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Send to each place and receive from it, all at the same time; what is this rank's own is copied."""
        mine, own = receives[self._place], sends[self._place]
        if mine.numel() and mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        going = {call: _bytes(sends[place]) for place, call in self._calls.items()}
        coming = {call: _bytes(receives[place]) for place, call in self._calls.items()}
        for place in self._calls:
            operation.count(sends[place].nbytes, self._leaves_host(place))
        with selectors.DefaultSelector() as selector:
            for call in self._calls.values():
                if wanted := _wanted(going[call], coming[call]):
                    selector.register(call, wanted)
            while selector.get_map():
                ready = selector.select(self._timeout_s)
                if not ready:
                    raise TimeoutError(f"nothing came or went for {self._timeout_s:g} s")
                for key, events in ready:
                    call = key.fileobj
                    assert isinstance(call, socket.socket)
                    going[call], coming[call] = _move(call, events, going[call], coming[call])
                    wanted = _wanted(going[call], coming[call])
                    if not wanted:
                        selector.unregister(call)
                    elif wanted != key.events:
                        selector.modify(call, wanted)


def _move(call: socket.socket, events: int, going: memoryview, coming: memoryview) -> tuple[memoryview, memoryview]:
    """Send and receive what goes without waiting; what is left of both."""
    if events & selectors.EVENT_WRITE:
        going = going[call.send(going[:_AT_ONCE]) :]
    if events & selectors.EVENT_READ:
        count = call.recv_into(coming, min(len(coming), _AT_ONCE))
        if not count:
            raise ConnectionResetError("a replica has left the meeting")
        coming = coming[count:]
    return going, coming


def _cut(flat: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [flat[first:last] for first, last in itertools.pairwise(ends)]


def _combined(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The parts combined in the tree of all links, which splits n at the largest power of two below it."""
    if len(parts) == 1:
        is_short = op == "sum" and parts[0].dtype in (torch.bfloat16, torch.float16)
        return parts[0].float() if is_short else parts[0]  # rounded once, at the end
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return _FUNCTIONS[op](_combined(parts[:middle], op), _combined(parts[middle:], op))


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    values: Any = tensor.detach().contiguous().view(torch.uint8).numpy()  # of an array, which has no such type
    return memoryview(values)


def _wanted(going: memoryview, coming: memoryview) -> int:
    return (selectors.EVENT_WRITE if len(going) else 0) | (selectors.EVENT_READ if len(coming) else 0)
