"""One rank of a replica that meets others now and then: what it says, whom it joins, and what became of it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft.comm.links import StagedLink
from weft.comm.peer.meeting.meeting_place import MeetingLine
from weft.comm.peer.meeting.socket_link import MeetingDoor, SocketLink
from weft.errors import CommError, ConfigError
from weft.mesh import Axis, Mesh

#: Seconds between questions, and for how long the ranks of a replica leave asking to the first one at a time.
_ASK_S, _SLICE_S = 0.05, 2.0
#: Seconds between two words of a replica that trains, at most.
_BEAT_S = 2.0


@dataclass(frozen=True, slots=True)
class Call:
    """A meeting to take part in. members: replicas. givers: those of them whose weights count. place: of this one.

    doors: of each member's ranks. number, token: of the anchor that comes of it. step: where givers stand.
    """

    id: int
    members: tuple[int, ...]
    givers: tuple[int, ...]
    doors: tuple[tuple[str, ...], ...]
    place: int
    number: int
    token: int
    step: int


class Party:
    """Joins a replica's ranks to those of other replicas. All ranks of the replica call its methods together.

    figures: where this replica stands, which the others are told: number and token of its anchor, step, loss.
    others: step and loss of each replica, as last heard. says: takes lines for people. wants_out: whether this replica
    is asked to stop, so that it waits for no meeting; the first rank is asked.

    Args:
        mesh: of this replica.
        replica: which one it is.
        address: of the meeting place.
        host: under which ranks of other replicas reach this machine.
        timeout_s: how long nothing may move.
        key: that the meeting place must have.
        on_first: returns what the first rank of the replica finds, on all of them.
        gather: returns the bytes of each rank of the replica, on all of them.
        says: takes lines for people.
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
        self._line = MeetingLine(address, replica, secrets.randbits(62), key)
        self._door = MeetingDoor(host)
        self._doors = [one.decode() for one in gather(self._door.address.encode())]
        self._behind, self._over = False, threading.Event()
        if mesh.rank == 0:
            threading.Thread(target=self._beat, name="weft-beat", daemon=True).start()

    def close(self) -> None:
        """Stop saying where this replica stands."""
        self._over.set()
        self._door.close()

    def begin(self) -> None:
        """Wait until each replica stands before its first step or was further once, for `timeout_s` at most.

        One that starts a little later than the others then finds what they found, and is late at no meeting.
        """
        self.figures["begins"] = True
        end = time.monotonic() + self.timeout_s
        while not self._on_first(lambda: self._all_begin_in_a_while(end)):
            pass

    def is_behind(self) -> bool:
        """Return whether another replica has a newer anchor."""
        return bool(self._on_first(self._say_where))

    def meet(self, layout: str) -> Call | dict[str, Any]:
        """Wait for a meeting: as long as it takes where another replica's anchor is newer.

        Returns what the place says where there is none: "alone" where it could not be reached, "over", "leave" where
        this replica is asked to stop.

        Args:
            layout: what this replica holds, in words: the others must hold the same.

        Raises:
            CommError: where another replica holds something else.
            ConfigError: where the meeting place has another key.
        """
        lost_at: list[float] = []
        more = {"doors": self._doors, "layout": layout}
        while True:
            told = self._on_first(lambda: self._ask_for_a_while("arrive", more, lost_at))
            if told["do"] == "refuse":
                raise CommError(f"the replicas cannot meet: {told['why']}. Start all with the same config.")
            if told["do"] == "meet":
                place = told["members"].index(self.replica)
                doors: Any = tuple(tuple(each) for each in told["doors"])
                rest = (told[key] for key in ("number", "token", "step"))
                return Call(told["id"], tuple(told["members"]), tuple(told["givers"]), doors, place, *rest)
            if told["do"] != "wait":
                return told

    def settle(self, call: Call, is_well: bool) -> bool:
        """Return whether a meeting counts.

        Args:
            call: what it was.
            is_well: whether this rank has all of it.
        """
        ok = all(one == b"1" for one in self._gather(b"1" if is_well else b"0"))
        more: dict[str, Any] = {"id": call.id, "ok": ok}
        lost_at: list[float] = []
        while True:
            told = self._on_first(lambda: self._ask_for_a_while("done", more, lost_at))
            if told["do"] != "wait":
                return told["do"] == "commit"

    def end(self, where: str) -> None:
        """Tell that this replica has come to its end, and where its model is."""
        if self._mesh.rank == 0:
            with contextlib.suppress(OSError):
                self._line.ask("end", **self.figures, where=where)
        self.close()

    @contextmanager
    def axis(self, call: Call) -> Generator[Axis]:
        """Join the ranks of the members that hold the same part as this one. OSError where one does not come.

        Args:
            call: the meeting.
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
        """On the first rank: whether there is nothing to wait for any more, after some seconds at most."""
        look_until = min(end, time.monotonic() + _SLICE_S)
        while time.monotonic() < look_until and not self.wants_out():
            with contextlib.suppress(OSError):
                if self._line.ask("beat", **self.figures)["begin"]:
                    return True
            time.sleep(_ASK_S)
        return self.wants_out() or time.monotonic() >= end

    def _ask_for_a_while(self, say: str, more: dict[str, Any], lost_at: list[float]) -> dict[str, Any]:
        """On the first rank: ask until there is an answer other than "wait", for some seconds."""
        end = time.monotonic() + _SLICE_S
        while True:
            if say == "arrive" and self.wants_out():
                with contextlib.suppress(OSError):
                    self._line.ask("leave", **self.figures)
                return {"do": "leave", "why": "this replica is asked to stop"}
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
            with contextlib.suppress(ConfigError):  # told where this replica asks for a meeting
                self._say_where()

    def _say_where(self) -> bool:
        """Tell where this replica stands; whether another one's anchor is newer, as far as is known."""
        with contextlib.suppress(OSError):
            told = self._line.ask("beat", **self.figures)
            self._behind, self.others = bool(told["behind"]), told["replicas"]
        return self._behind
