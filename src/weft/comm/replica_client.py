"""A link over sockets between ranks of separate replicas, and a replica's client for local SGD rendezvous.

A link is created for one round (an outer step) and closed after it. A process group needs all of its ranks until its
end, but a socket link costs one connection per pair, fails if no data moved for a given time, and leaves other groups
intact when it fails. Sums use the same tree as all links, so results are bitwise identical.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weft.comm.mesh import Axis, Mesh
from weft.comm.replica_rendezvous import RendezvousClient
from weft.comm.transports.link import Link, Operation, StagedLink, failed, unobserved
from weft.comm.transports.scattered_tensor import Parts
from weft.errors import CommError, ConfigError

#: An all_reduce of at most this size, or between two ranks, sends the full tensor to every rank.
_LITTLE_BYTES = 1 << 16
_HEAD = struct.Struct("!QQ")  # id of the round, index of the calling member
_AT_ONCE = 1 << 20
_FUNCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
#: Time (s) within which a caller must identify itself.
_HEAD_S = 5.0


class PeerListener:
    """Listens for ranks of other replicas until it is closed."""

    def __init__(self, host: str):
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def join(self, meeting: int, place: int, doors: Sequence[str], timeout_s: float) -> dict[int, socket.socket]:
        """Return a connection to each other member, by its index.

        meeting: id of the round. place: this member's index. doors: addresses of all members, by index. Raises OSError
        if a member does not connect in time.
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
                    call.close()  # from a round that was aborted
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
    """Return the caller's index in this round, or None if it calls for another round or does not identify itself."""
    call.settimeout(_HEAD_S)
    with contextlib.suppress(OSError, struct.error):
        said, place = _HEAD.unpack(call.recv(_HEAD.size, socket.MSG_WAITALL))
        return place if said == meeting else None
    return None


class SocketLink(Link):
    """Link between the ranks that exchange weights in one round (an outer step), with a connection per pair.

    timeout_s: seconds without data transfer after which an operation fails. leaves_host: returns True if bytes to the
    rank at that index leave this host.
    """

    transport = "sockets of a synchronization"
    self_driven = True

    def __init__(
        self, calls: Mapping[int, socket.socket], place: int, timeout_s: float, leaves_host: Callable[[int], bool]
    ):
        self.reason = "replicas are separate"
        self._calls, self._place, self._size = dict(calls), place, len(calls) + 1
        self._timeout_s, self._leaves_host = timeout_s, leaves_host
        self._queue: deque[Operation] = deque()

    def close(self) -> None:
        for call in self._calls.values():
            call.close()

    def start(self, operation: Operation) -> None:
        self._queue.append(operation)

    def block(self, operation: Operation) -> bool:
        """Run queued operations up to this one. Returns True. Raises CommError if a rank exits or no data moves."""
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
                self._swap(operation, _split(source, operation.send), _split(out, operation.receive))
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
        """Send to each rank and receive from it, all in parallel. This rank's part is copied locally.

        Raises TimeoutError if no data moves for `timeout_s`.
        """
        mine, own = receives[self._place], sends[self._place]
        if mine.numel() and mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        going = {call: _bytes(sends[place]) for place, call in self._calls.items()}
        coming = {call: _bytes(receives[place]) for place, call in self._calls.items()}
        for place in self._calls:
            operation.count(sends[place].nbytes, self._leaves_host(place))
        with selectors.DefaultSelector() as selector:
            for call in self._calls.values():
                if wanted := _is_expected(going[call], coming[call]):
                    selector.register(call, wanted)
            while selector.get_map():
                ready = selector.select(self._timeout_s)
                if not ready:
                    raise TimeoutError(f"nothing came or went for {self._timeout_s:g} s")
                for key, events in ready:
                    call = key.fileobj
                    assert isinstance(call, socket.socket)
                    going[call], coming[call] = _move(call, events, going[call], coming[call])
                    wanted = _is_expected(going[call], coming[call])
                    if not wanted:
                        selector.unregister(call)
                    elif wanted != key.events:
                        selector.modify(call, wanted)


def _move(call: socket.socket, events: int, going: memoryview, coming: memoryview) -> tuple[memoryview, memoryview]:
    """Send and receive up to 1 MiB each, as far as `events` allows it, without blocking. Return the rest of both views.

    Raises ConnectionResetError if the peer has closed the connection.
    """
    if events & selectors.EVENT_WRITE:
        going = going[call.send(going[:_AT_ONCE]) :]
    if events & selectors.EVENT_READ:
        count = call.recv_into(coming, min(len(coming), _AT_ONCE))
        if not count:
            raise ConnectionResetError("a replica has left the synchronization")
        coming = coming[count:]
    return going, coming


def _split(flat: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [flat[first:last] for first, last in itertools.pairwise(ends)]


def _combined(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Combine the parts in the reduction tree of all links: n parts split at the largest power of two below n."""
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


def _is_expected(going: memoryview, coming: memoryview) -> int:
    return (selectors.EVENT_WRITE if len(going) else 0) | (selectors.EVENT_READ if len(coming) else 0)


# A rank of a replica under local SGD: status reports, joining rounds, and their outcomes.

#: Poll interval (s), and the time (s) that the other ranks of a replica wait per call while the first one polls.
_ASK_S, _SLICE_S = 0.05, 2.0
#: Maximum seconds between two status reports of a training replica.
_BEAT_S = 2.0


@dataclass(frozen=True, slots=True)
class Call:
    """A round (an outer step of local SGD) that this replica takes part in.

    Attributes:
        members: replica indices.
        givers: the members whose updates are averaged; the others copy the result.
        doors: addresses of each member's ranks.
        place: this replica's index among the members.
        number, token: identify the resulting anchor (the synchronized weights).
        step: the givers' step.
    """

    id: int
    members: tuple[int, ...]
    givers: tuple[int, ...]
    doors: tuple[tuple[str, ...], ...]
    place: int
    number: int
    token: int
    step: int


class ReplicaGroup:
    """Connects the ranks of one replica with ranks of the other replicas, which synchronize in rounds (outer steps).

    All ranks of the replica call each method together. `figures` is the status that this replica reports: number and
    token of its anchor (the last synchronized weights), step, loss, and whether it is ready for its first step.
    `others` holds the last reported step and loss of each replica. `wants_out` is called on the first rank. If it
    returns True because this replica was requested to stop, the replica leaves instead of waiting for the next round.

    Args:
        host: the address of this machine for ranks of other replicas.
        timeout_s: maximum time without progress.
        key: shared key that the rendezvous server must have.
        on_first: runs a function on the replica's first rank and returns its result on all of them.
        gather: returns the bytes of each rank of the replica, on all of them.
        says: called with lines for the user.
    """

    def __init__(
        self,
        mesh: Mesh,
        replica: int,
        address: str,
        host: str,
        timeout_s: float,
        key: str,
        on_first: Callable[[Callable[[], Any]], Any],
        gather: Callable[[bytes], list[bytes]],
        says: Callable[[str], None] = lambda line: None,
    ):
        self.replica, self.timeout_s, self.says = replica, timeout_s, says
        self.figures: dict[str, Any] = {"number": 0, "token": 0, "step": 0, "loss": 0.0, "begins": False}
        self.others: dict[str, list[float]] = {}
        self.wants_out: Callable[[], bool] = lambda: False
        self._mesh, self._on_first, self._gather = mesh, on_first, gather
        self._line = RendezvousClient(address, replica, secrets.randbits(62), key)
        self._door = PeerListener(host)
        self._doors = [one.decode() for one in gather(self._door.address.encode())]
        self._behind, self._over = False, threading.Event()
        if mesh.rank == 0:
            threading.Thread(target=self._beat, name="weft-beat", daemon=True).start()

    def close(self) -> None:
        """Stop the status reports and stop listening."""
        self._over.set()
        self._door.close()

    def begin(self) -> None:
        """Wait until every replica is ready for its first step or has trained before, for `timeout_s` at most.

        If this replica is requested to stop, this returns immediately.

        A replica that starts a little later than the others then loads the same state, and takes part in each outer
        step.
        """
        self.figures["begins"] = True
        end = time.monotonic() + self.timeout_s
        while not self._on_first(lambda: self._all_begin_in_a_while(end)):
            pass

    def is_behind(self) -> bool:
        """Return True if another replica has a newer anchor, by the server's last answer."""
        return bool(self._on_first(self._report_where))

    def wait_for_round(self, layout: str) -> Call | dict[str, Any]:
        """Wait for a round (an outer step). There is no time limit while the rendezvous server answers.

        If there is no round, this returns a dict. Its "do" is "alone" if the server was unreachable for `timeout_s`,
        "over" if a replica with a newer anchor has ended its run, or "leave" if this replica was requested to stop.

        layout: description of this replica's tensors. It must be equal on all replicas.

        Raises:
            CommError: if another replica has a different layout.
            ConfigError: if the rendezvous server has another key.
        """
        lost_at: list[float] = []
        more = {"doors": self._doors, "layout": layout}
        while True:
            told = self._on_first(lambda: self._ask_for_a_while("arrive", more, lost_at))
            if told["do"] == "refuse":
                raise CommError(f"the replicas cannot synchronize: {told['why']}. Start all with the same config.")
            if told["do"] == "meet":
                place = told["members"].index(self.replica)
                doors: Any = tuple(tuple(each) for each in told["doors"])
                rest = (told[key] for key in ("number", "token", "step"))
                return Call(told["id"], tuple(told["members"]), tuple(told["givers"]), doors, place, *rest)
            if told["do"] != "wait":
                return told

    def finalize(self, call: Call, is_well: bool) -> bool:
        """Send whether all ranks of this replica completed their exchange, and wait for the outcome of the round.

        Return True if the round is committed. is_well: True if this rank completed its exchange.
        """
        ok = all(one == b"1" for one in self._gather(b"1" if is_well else b"0"))
        more: dict[str, Any] = {"id": call.id, "ok": ok}
        lost_at: list[float] = []
        while True:
            told = self._on_first(lambda: self._ask_for_a_while("done", more, lost_at))
            if told["do"] != "wait":
                return told["do"] == "commit"

    def end(self, where: str) -> None:
        """Send the end of this replica's run and the location of its model, then close."""
        if self._mesh.rank == 0:
            with contextlib.suppress(OSError):
                self._line.ask("end", **self.figures, where=where)
        self.close()

    @contextmanager
    def axis(self, call: Call) -> Generator[Axis]:
        """Join the ranks of all members that store the same shard as this one into an axis, within the block.

        Raises OSError if a rank does not connect.
        """
        rank, mesh = self._mesh.rank, self._mesh
        doors = [each[rank] for each in call.doors]
        ranks = tuple(member * mesh.world_size + rank for member in call.members)
        if len(doors) == 1:
            yield Axis("dp_replicate", 1, 0, ranks)
            return
        hosts = [door.rpartition(":")[0] for door in doors]
        own = hosts[call.place]
        calls = self._door.join(call.id, call.place, doors, self.timeout_s)
        link = SocketLink(calls, call.place, self.timeout_s, lambda place: hosts[place] != own)
        group: Any = object()  # stands for a process group: links are found by it
        kind = mesh.device.type
        links: dict[tuple[object, ...], object] = {
            (group, kind): link if kind == "cpu" else StagedLink(link, "sockets carry the host's memory")
        }
        record = mesh.world.record
        try:
            yield Axis("dp_replicate", len(doors), call.place, ranks, group, record, links, mesh.pulse)
        finally:
            link.close()

    def _all_begin_in_a_while(self, end: float) -> bool:
        """Wait some seconds on the first rank. Returns True if there is nothing left to wait for."""
        look_until = min(end, time.monotonic() + _SLICE_S)
        while time.monotonic() < look_until and not self.wants_out():
            with contextlib.suppress(OSError):
                if self._line.ask("beat", **self.figures)["begin"]:
                    return True
            time.sleep(_ASK_S)
        return self.wants_out() or time.monotonic() >= end

    def _ask_for_a_while(self, say: str, more: dict[str, Any], lost_at: list[float]) -> dict[str, Any]:
        """Ask the rendezvous server repeatedly for up to 2 s, until it answers other than "wait". Return its answer.

        Runs on the first rank. After failures for `timeout_s`, the answer is "alone". lost_at: list that this function
        updates to the time of the first failure since the last answer, or clears.
        """
        end = time.monotonic() + _SLICE_S
        while True:
            if say == "arrive" and self.wants_out():
                with contextlib.suppress(OSError):
                    self._line.ask("leave", **self.figures)
                return {"do": "leave", "why": "this replica got a request to stop"}
            try:
                told = self._line.ask(say, **self.figures, **more)
                lost_at.clear()
            except OSError as error:
                lost_at[:] = lost_at or [time.monotonic()]
                if time.monotonic() - lost_at[0] > self.timeout_s:
                    return {"do": "alone", "why": str(error)}
                told = {"do": "wait"}
            if told["do"] != "wait" or time.monotonic() > end:
                return told
            time.sleep(_ASK_S)

    def _beat(self) -> None:
        while not self._over.wait(min(_BEAT_S, self.timeout_s / 4)):
            with contextlib.suppress(ConfigError):  # reported when this replica requests a round
                self._report_where()

    def _report_where(self) -> bool:
        """Report this replica's status. Returns True if the server reports a newer anchor of another replica."""
        with contextlib.suppress(OSError):
            told = self._line.ask("beat", **self.figures)
            self._behind, self.others = bool(told["behind"]), told["replicas"]
        return self._behind
