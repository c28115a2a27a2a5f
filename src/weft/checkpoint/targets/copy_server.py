"""Files in the memory of one process, for the ranks of its host and of others: checkpoints that outlive ranks.

They are memory of that process and nothing else, so the system takes them back however it ends. One connection asks one
thing. Server and client each send a number that is used once. The client then sends a line of JSON with an HMAC of both
numbers and the line; the server answers with an HMAC of both numbers. The token, which is the key of both, is never
sent. What is written follows in pieces, each after its length, 0 at the end: a file is there once that end has come.
Nothing is encrypted, and pieces are not signed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.manifest import COMMIT_NAME

PIECE = struct.Struct("!Q")
_TOKEN_BYTES = 32
_ONCE_BYTES = 16
_PROOF_BYTES = 32
_LONGEST_LINE = 2**20
#: How long (s) a connection may be silent: a machine that is gone closes nothing.
SILENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class CopyHome:
    """Where a server is, and what proves the right to ask it. token: hex digits, a secret of the run's ranks."""

    host: str
    port: int
    token: str


class CopyServer:
    """Holds files and answers, in threads of this process, until `close`. OSError where `host` gives no port.

    host: the address on which it listens, "" for all.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self._files: dict[str, bytearray] = {}
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), backlog=128)
        self.home = CopyHome(host or "127.0.0.1", self._listener.getsockname()[1], self._token)
        self._acts: dict[str, Callable[[socket.socket, str, int, int], None]] = {
            "put": self._put, "get": self._get, "list": self._list, "remove": self._remove,
        }  # fmt: skip
        threading.Thread(target=self._answer, name="weft-copies", daemon=True).start()

    def close(self) -> None:
        """Answer no more, and let go of all files."""
        with contextlib.suppress(OSError):  # wakes accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._files.clear()

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint that is complete here as far as this host can know."""
        paths = [name.split("/") for name in [*self._files] if name.endswith(f"/{COMMIT_NAME}")]
        found = (step_in_name(path[-2]) for path in paths if len(path) > 1)
        return max((step for step in found if step is not None), default=None)

    def _answer(self) -> None:
        while True:
            try:
                call, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(call,), name="weft-copy", daemon=True).start()

    def _serve(self, call: socket.socket) -> None:
        # Who goes away in the middle has written nothing.
        with call, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            call.settimeout(SILENCE_S)
            own = secrets.token_bytes(_ONCE_BYTES)
            call.sendall(own)
            both = own + bytes(received(call, _ONCE_BYTES))
            proof = bytes(received(call, _PROOF_BYTES))
            line = bytes(received(call, min(received_size(call), _LONGEST_LINE)))
            if not hmac.compare_digest(proof, _proof(self._token, b"asks" + both + line)):
                return
            call.sendall(_proof(self._token, b"answers" + both))
            asked = json.loads(line)
            self._acts[asked["act"]](call, str(asked["name"]), int(asked["start"]), int(asked["end"]))

    def _put(self, call: socket.socket, name: str, start: int, end: int) -> None:
        data = bytearray()
        while size := received_size(call):
            data += received(call, size)
        self._files[name] = data
        call.sendall(PIECE.pack(len(data)))

    def _get(self, call: socket.socket, name: str, start: int, end: int) -> None:
        data = memoryview(self._files[name])[start:end]
        call.sendall(PIECE.pack(len(data)))
        call.sendall(data)

    def _list(self, call: socket.socket, name: str, start: int, end: int) -> None:
        sizes = {one: len(data) for one, data in [*self._files.items()] if _is_below(one, name)}
        text = json.dumps(sizes).encode()
        call.sendall(PIECE.pack(len(text)) + text)

    def _remove(self, call: socket.socket, name: str, start: int, end: int) -> None:
        for one in [one for one in [*self._files] if _is_below(one, name)]:
            self._files.pop(one, None)
        call.sendall(PIECE.pack(0))


def ask(call: socket.socket, token: str, line: bytes) -> None:
    """Send a line on a new connection, and make sure that the server has the token.

    Args:
        call: the connection.
        token: of the server.
        line: what is asked for.

    Raises:
        OSError: if the server goes away, or does not prove that it has the token.
    """
    own = secrets.token_bytes(_ONCE_BYTES)
    both = bytes(received(call, _ONCE_BYTES)) + own
    call.sendall(own + _proof(token, b"asks" + both + line) + PIECE.pack(len(line)) + line)
    if not hmac.compare_digest(bytes(received(call, _PROOF_BYTES)), _proof(token, b"answers" + both)):
        raise PermissionError("the server of copies in memory has another token")


def _proof(token: str, text: bytes) -> bytes:
    return hmac.new(token.encode(), text, "sha256").digest()


def received(call: socket.socket, size: int) -> bytearray:
    """So many bytes. ConnectionError where the other end closes before."""
    data = bytearray(size)
    view, read = memoryview(data), 0
    while read < size:
        number = call.recv_into(view[read:], min(size - read, 2**24))
        if not number:
            raise ConnectionResetError("the other end closed the connection")
        read += number
    view.release()
    return data


def received_size(call: socket.socket) -> int:
    """The length that comes before bytes."""
    return PIECE.unpack(received(call, PIECE.size))[0]


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}/")
