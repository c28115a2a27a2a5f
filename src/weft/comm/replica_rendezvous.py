"""Rendezvous of local SGD replicas: a state machine that decides which replicas take part in which round.

A round is one outer step. `RendezvousRounds` is changed only by the replicas' messages. It has no clock and no socket.

A replica's *anchor* (the last synchronized weights) has a number (of rounds so far) and a token that only equal anchors
share. In a round

    givers      have the newest anchor of all live replicas; their updates are averaged
    the others  have an older one; they contribute nothing, and copy anchor and momentum from a giver

A round begins once all live replicas have arrived, or when the first giver has waited for `timeout_s`. Its members
exchange weights and report the result. If all succeeded, the round is committed for all, else for none, and replicas
that arrive again begin another. Only this state decides if a round is committed, so two partitions of a network never
both commit one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from weft.errors import ConfigError, LaunchError

#: Number of outcomes to keep: a member may have been disconnected when one was decided.
_KEPT = 8


@dataclass(slots=True)
class _Replica:
    """State of one replica.

    `heard` and `arrived` are times (s), or None. With `given_up` the others do not wait for it. `has_begun` is True if,
    since this server started, the replica was ready for its first step or had trained already.
    """

    anchor: tuple[int, int] = (-1, 0)
    step: int = 0
    loss: float = 0.0
    heard: float | None = None
    arrived: float | None = None
    session: int = 0
    doors: list[str] = field(default_factory=list[str])
    layout: str = ""
    given_up: bool = False
    has_begun: bool = False
    ended: str | None = None


@dataclass(slots=True)
class _Round:
    """A round in progress. `said` is the success of the exchange by member, `first_said` the first report's time."""

    told: dict[str, Any]
    said: dict[int, bool] = field(default_factory=dict[int, bool])
    first_said: float = 0.0


class RendezvousRounds:
    """Decides which replicas of a run exchange weights in each round (outer step), and if the round is committed.

    timeout_s: how long replicas that have arrived wait for the others.
    """

    def __init__(self, replicas: int, timeout_s: float):
        self._replicas = {number: _Replica() for number in range(replicas)}
        self._timeout_s = timeout_s
        self._round: _Round | None = None
        self._outcomes: dict[int, str] = {}

    def handle(self, said: dict[str, Any], now: float) -> dict[str, Any]:
        """Apply one replica's message and return the answer.

        said: the message. Its `say` is "beat", "arrive", "leave", "done" or "end"; the rest is the replica's identity
        and status. now: seconds of a monotonic clock.
        """
        number = int(said["replica"])
        one = self._replicas[number]
        if said["session"] != one.session:  # a new process; rounds of the old one have ended
            one.session, one.arrived, one.ended = said["session"], None, None
            if self._round is not None and number in self._round.told["members"]:
                self._close("abort")
        one.anchor = (said["number"], said["token"])
        one.step, one.loss, one.heard, one.given_up = said["step"], said["loss"], now, False
        one.has_begun = one.has_begun or said.get("begins", True)
        self._finalize(now)
        match said["say"]:
            case "arrive":
                return self._handle_arrival(number, said, now)
            case "done":
                return self._done(number, said, now)
            case "end":
                one.ended, one.arrived = said["where"], None
            case "leave":
                self._leave(number)
            case _:  # "beat": the replica is already marked as alive
                pass
        others = {key: [each.step, each.loss] for key, each in self._replicas.items() if each.heard is not None}
        all_begin = all(each.has_begun or each.ended is not None for each in self._replicas.values())
        return {"do": "go on", "behind": self._is_behind(number, now), "begin": all_begin, "replicas": others}

    def _lives(self, one: _Replica, now: float) -> bool:
        return one.ended is None and one.heard is not None and now - one.heard <= self._timeout_s

    def _is_behind(self, number: int, now: float) -> bool:
        own = self._replicas[number].anchor
        return any(one.anchor > own and self._lives(one, now) for one in self._replicas.values())

    def is_over(self, now: float) -> bool:
        """Return True if each replica has ended or not reported for `timeout_s`.

        now: seconds of the clock of `handle`.
        """
        return not any(self._lives(one, now) for one in self._replicas.values())

    def _leave(self, number: int) -> None:
        """Stop waiting for a replica that was requested to stop. Abort its round, unless it reported a result."""
        self._replicas[number].arrived = None
        under_way = self._round
        if under_way is not None and number in under_way.told["members"] and number not in under_way.said:
            self._close("abort")

    def _handle_arrival(self, number: int, said: dict[str, Any], now: float) -> dict[str, Any]:
        one, under_way = self._replicas[number], self._round
        if under_way is not None and number in under_way.told["members"] and number not in under_way.said:
            return under_way.told
        one.doors, one.layout, one.ended = said["doors"], said["layout"], None
        other = next((key for key, each in self._replicas.items() if each.layout not in ("", one.layout)), None)
        if other is not None:
            return {"do": "refuse", "why": f"replica {other} holds {self._replicas[other].layout}, and replica "
                    f"{number} {one.layout}"}  # fmt: skip
        if one.arrived is None:
            one.arrived = now
        over = [(key, each) for key, each in self._replicas.items() if each.ended is not None]
        newest = max(over, key=lambda pair: pair[1].anchor, default=None)
        if newest is not None and newest[1].anchor > one.anchor and not self._is_behind(number, now):
            told, token = newest[1], newest[1].anchor[1]
            return {"do": "over", "replica": newest[0], "where": told.ended, "step": told.step, "token": token}
        if under_way is None:
            self._begin(now)
        if self._round is not None and number in self._round.told["members"]:
            return self._round.told
        return {"do": "wait"}

    def _begin(self, now: float) -> None:
        """Begin a round of the replicas that have arrived, if no live replica is missing or the wait has timed out."""
        here = {key: one for key, one in self._replicas.items() if one.arrived is not None and self._lives(one, now)}
        newest = max(one.anchor for one in self._replicas.values() if self._lives(one, now))
        givers = sorted(key for key, one in here.items() if one.anchor == newest)
        if not givers:
            return  # a live replica has the newest anchor, and will arrive
        away = [one for key, one in self._replicas.items() if key not in here and one.ended is None]
        patient = [one for one in away if not one.given_up and (one.heard is None or self._lives(one, now))]
        first = min(one.arrived for key in givers if (one := here[key]).arrived is not None)
        if patient and now - first < self._timeout_s:
            return
        for one in away:
            one.given_up = one.heard is None
        members = sorted(here)
        self._round = _Round(
            {
                "do": "meet",
                "id": secrets.randbits(62),
                "members": members,
                "givers": givers,
                "doors": [here[key].doors for key in members],
                "number": newest[0] + 1,
                "token": secrets.randbits(62),
                "step": max(here[key].step for key in givers),
            }
        )
        for one in here.values():
            one.arrived = None

    def _done(self, number: int, said: dict[str, Any], now: float) -> dict[str, Any]:
        under_way = self._round
        if under_way is None or said["id"] != under_way.told["id"]:
            return {"do": self._outcomes.get(said["id"], "abort")}
        under_way.first_said = under_way.first_said if under_way.said else now
        under_way.said[number] = bool(said["ok"])
        self._finalize(now)
        return {"do": self._outcomes.get(said["id"], "wait")}

    def _finalize(self, now: float) -> None:
        """Commit or abort the current round, if the outcome is determined."""
        under_way = self._round
        if under_way is None:
            return
        members, said = under_way.told["members"], under_way.said
        silent = [self._replicas[key] for key in members if key not in said]
        if not all(said.values()) or (said and silent and now - under_way.first_said > self._timeout_s):
            self._close("abort")
        elif not silent:
            self._close("commit")
        elif not said and not any(self._lives(one, now) for one in silent):
            self._close("abort")

    def _close(self, outcome: str) -> None:
        under_way, self._round = self._round, None
        if under_way is None:
            return
        told = under_way.told
        self._outcomes[told["id"]] = outcome
        while len(self._outcomes) > _KEPT:
            del self._outcomes[next(iter(self._outcomes))]
        if outcome == "commit":
            for key in told["members"]:
                self._replicas[key].anchor = (told["number"], told["token"])


# Server and client: one small request and answer at a time, each over a separate connection.

_MOST_BYTES = 1 << 20
_WRONG_KEY = b"wrong key\n"
#: Time (s) after which an unanswered request is repeated.
_ANSWER_S = 5.0
_LOOK_S = 0.2


class RendezvousServer:
    """Answers the replicas of one run, in threads of this process.

    key: shared key that clients must have. Raises LaunchError if it cannot listen on the address.
    """

    def __init__(self, host: str, port: int, replicas: int, timeout_s: float, key: str):
        self._key = key.encode()
        self._rounds, self._lock = RendezvousRounds(replicas, timeout_s), threading.Lock()
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise LaunchError(
                f"launch.meet_at={host}:{port}: this machine cannot listen there ({why}). Use an address of the "
                "machine of replica 0 and a free port."
            ) from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._answer, name="weft-meetings", daemon=True).start()

    def is_over(self) -> bool:
        """Return True if each replica has ended, or has not reported for `timeout_s`."""
        with self._lock:
            return self._rounds.is_over(time.monotonic())

    def wait_until_over(self) -> None:
        """Wait until each replica has ended, or has not reported for `timeout_s`."""
        while not self.is_over():
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):  # wakes accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                call, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(call,), name="weft-meeting", daemon=True).start()

    def _serve(self, call: socket.socket) -> None:
        # Invalid requests get no answer: other programs may connect to the port.
        with call, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            call.settimeout(_ANSWER_S)
            once = secrets.token_hex(16).encode()
            call.sendall(once + b"\n")
            text = _proven(_line(call), self._key, once, b"asks")
            if text is None:
                call.sendall(_WRONG_KEY)
                return
            with self._lock:
                answer = self._rounds.handle(json.loads(text), time.monotonic())
            call.sendall(_with_proof(json.dumps(answer).encode(), self._key, once, b"answers"))


class RendezvousClient:
    """A replica's client of the rendezvous server, which must have the shared key `key`."""

    def __init__(self, address: str, replica: int, session: int, key: str):
        self.address, self._key = address, key.encode()
        self._own = {"replica": replica, "session": session}

    def ask(self, say: str, **more: Any) -> dict[str, Any]:
        """Send a request and return the answer. The requests are described in `RendezvousRounds.handle`.

        Raises OSError if there is no answer in time. Raises ConfigError if the server has another key.
        """
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as call:
            once = _line(call)
            call.sendall(_with_proof(json.dumps({"say": say, **self._own, **more}).encode(), self._key, once, b"asks"))
            answer = _line(call)
            text = _proven(answer, self._key, once, b"answers")
            if text is None:
                raise ConfigError(
                    f"launch.meeting_key: the rendezvous at {self.address} has another key. Start all "
                    "replicas with the same one."
                )
            found: dict[str, Any] = json.loads(text)
            return found


def address_towards(address: str) -> str:
    """Return the address of this machine on the route to another address. Sends nothing.

    Raises LaunchError if this machine has no route to it.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            found: str = probe.getsockname()[0]
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"launch.meet_at={address}: this machine cannot resolve or reach it "
            f"({getattr(error, 'strerror', None) or error}). Use the name or address of the machine that starts "
            "replica 0, and a port from 1 to 65535."
        ) from error
    return found


def _line(call: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        part = call.recv(65536)
        if not part or len(text) > _MOST_BYTES:
            raise ConnectionResetError("half a message")
        text += part
    return text[:-1]


def _with_proof(text: bytes, key: bytes, once: bytes, who: bytes) -> bytes:
    return _proof(text, key, once, who) + b" " + text + b"\n"


def _proven(line: bytes, key: bytes, once: bytes, who: bytes) -> bytes | None:
    """Return the text of a line, or None if its sender does not have the key."""
    proof, _, text = line.partition(b" ")
    return text if hmac.compare_digest(proof, _proof(text, key, once, who)) else None


def _proof(text: bytes, key: bytes, once: bytes, who: bytes) -> bytes:
    return hmac.new(key, b" ".join((once, who, text)), "sha256").hexdigest().encode()
