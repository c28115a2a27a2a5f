"""Where replicas leave word, and how: one small question and answer at a time, each over a connection of its own.

A connection that a cut link holds up takes nothing with it: the next question opens another. Each side proves that it
has the run's key: the place opens with a number used once, and each message is JSON after an HMAC-SHA256 of that
number, the side that speaks, and the text. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from typing import Any

from weft.comm.peer.meeting.rounds import MeetingRounds
from weft.errors import ConfigError, LaunchError

_MOST_BYTES = 1 << 20
_WRONG_KEY = b"wrong key\n"
#: How long (s) one answer may take before the question is asked again.
_ANSWER_S = 5.0
_LOOK_S = 0.2


class MeetingPlace:
    """Answers the replicas of one run, in threads of this process.

    Args:
        host: of the interface it listens on.
        port: 0 takes a free one.
        replicas: how many there are.
        timeout_s: how long a meeting waits.
        key: that whoever asks must have.

    Raises:
        LaunchError: where the address cannot be had.
    """

    def __init__(self, host: str, port: int, replicas: int, timeout_s: float, key: str):
        self._key = key.encode()
        self._rounds, self._lock = MeetingRounds(replicas, timeout_s), threading.Lock()
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
        """Return whether each replica has ended, or has not been heard for `timeout_s`."""
        with self._lock:
            return self._rounds.is_over(time.monotonic())

    def wait_until_over(self) -> None:
        """Answer until each replica has ended, or has not been heard for `timeout_s`."""
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
        # What is no question is not answered: others may knock at a port.
        with call, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            call.settimeout(_ANSWER_S)
            once = secrets.token_hex(16).encode()
            call.sendall(once + b"\n")
            text = _proven(_line(call), self._key, once, b"asks")
            if text is None:
                call.sendall(_WRONG_KEY)
                return
            with self._lock:
                answer = self._rounds.hear(json.loads(text), time.monotonic())
            call.sendall(_with_proof(json.dumps(answer).encode(), self._key, once, b"answers"))


class MeetingLine:
    """One replica's way to the place.

    Args:
        address: host:port.
        replica: which one this is.
        session: of this process: another one of the same replica is another session.
        key: that the place must have.
    """

    def __init__(self, address: str, replica: int, session: int, key: str):
        self.address, self._key = address, key.encode()
        self._own = {"replica": replica, "session": session}

    def ask(self, say: str, **more: Any) -> dict[str, Any]:
        """Return the answer. OSError where there is none in time.

        Args:
            say: as `MeetingRounds.hear` takes it.
            more: the rest of what is said.

        Raises:
            ConfigError: where the place has another key.
        """
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as call:
            once = _line(call)
            call.sendall(_with_proof(json.dumps({"say": say, **self._own, **more}).encode(), self._key, once, b"asks"))
            answer = _line(call)
            text = _proven(answer, self._key, once, b"answers")
            if text is None:
                raise ConfigError(
                    f"launch.meeting_key: the place where replicas meet, {self.address}, has another key. Start all "
                    "replicas with the same one."
                )
            found: dict[str, Any] = json.loads(text)
            return found


def address_towards(address: str) -> str:
    """Return the address of this machine by which the machine of another address sees it; nothing is sent.

    Args:
        address: host:port.

    Raises:
        LaunchError: where this machine knows no way there.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            found: str = probe.getsockname()[0]
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"launch.meet_at={address}: this machine knows no way there ({getattr(error, 'strerror', None) or error}). "
            "Use the name or address of the machine that starts replica 0, and a port from 1 to 65535."
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
    """What a line says; None where who wrote it does not have the key."""
    proof, _, text = line.partition(b" ")
    return text if hmac.compare_digest(proof, _proof(text, key, once, who)) else None


def _proof(text: bytes, key: bytes, once: bytes, who: bytes) -> bytes:
    return hmac.new(key, b" ".join((once, who, text)), "sha256").hexdigest().encode()
