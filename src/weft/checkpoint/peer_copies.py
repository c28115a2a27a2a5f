"""Server of in-memory checkpoint files: one process per host, for the ranks of all hosts.

The files survive a failure of ranks. They are memory of the server process, so the system frees them when it ends. Each
connection carries one request. Server and client each send a nonce. The client then sends a line of JSON with an HMAC
of both nonces and the line. The server answers with an HMAC of both nonces. The token, which is the key of both, is
never sent. Written data follows in chunks, each after its length, with length 0 at the end. A file exists only after
that end is received. Nothing is encrypted, and chunks are not signed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.manifest import COMMIT_NAME
from weft.checkpoint.object_store import StorePath

PIECE = struct.Struct("!Q")
_TOKEN_BYTES = 32
_ONCE_BYTES = 16
_PROOF_BYTES = 32
_LONGEST_LINE = 2**20
#: A connection without data for this many seconds counts as lost. A machine that fails does not close its connections.
SILENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class CopyHome:
    """Address of a server, and the run's secret token (hex digits) that authenticates requests."""

    host: str
    port: int
    token: str


class CopyServer:
    """Server that stores files and handles requests in threads of this process, until `close`.

    Raises OSError if no port of `host` is available.
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
        """Stop answering and free all files."""
        with contextlib.suppress(OSError):  # wakes accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._files.clear()

    def newest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint on this host, or None.

        Only this server is checked, not the servers of other hosts.
        """
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
        # A client that disconnects early has written nothing.
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
    """Send a request on a new connection, and verify that the server has the token.

    Raises OSError if the server disconnects, or does not prove that it has the token.
    """
    own = secrets.token_bytes(_ONCE_BYTES)
    both = bytes(received(call, _ONCE_BYTES)) + own
    call.sendall(own + _proof(token, b"asks" + both + line) + PIECE.pack(len(line)) + line)
    if not hmac.compare_digest(bytes(received(call, _PROOF_BYTES)), _proof(token, b"answers" + both)):
        raise PermissionError("the server of copies in memory has another token")


def _proof(token: str, text: bytes) -> bytes:
    return hmac.new(token.encode(), text, "sha256").digest()


def received(call: socket.socket, size: int) -> bytearray:
    """Return `size` bytes from a connection. Raises ConnectionResetError if the peer closes the connection early."""
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
    """Read a length prefix from a connection, and return the number of bytes that follow."""
    return PIECE.unpack(received(call, PIECE.size))[0]


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}/")


# The servers of all hosts as one file system, with the methods of fsspec that `StoreTarget` uses.

_CONNECT_S = 10.0
_WRITTEN_AT_ONCE = 8 * 2**20


def copies_at(homes: Sequence[CopyHome], own: int) -> StorePath:
    """Return the root of the checkpoints in memory.

    homes: the server of each host, in the same order on all ranks. own: index of this host's server.
    """
    return StorePath("copies://run", CopyFiles(homes, own))


class CopyFiles:
    """Files on several servers, with the API of fsspec's file systems. Arguments as of `copies_at`.

    Names are keys such as "run/step_00000012/COMMIT". Folders are the prefixes of names. Writing raises OSError if a
    server that stores the file is lost. Reading raises FileNotFoundError if no server has the file, or another OSError
    if a lost server may have it. Other methods ignore lost servers.
    """

    def __init__(self, homes: Sequence[CopyHome], own: int):
        self._near = [*homes[own:], *homes[:own]]
        # Files that are written here are stored on this host and on the next one.
        self._kept_by = self._near[:2]

    def open(self, key: str, mode: str = "rb", block_size: int = 0) -> _NewCopy:
        """Open a new file for writing. It exists on its servers after it is closed."""
        del mode, block_size
        return _NewCopy(self._kept_by, key)

    def pipe_file(self, key: str, value: bytes) -> None:
        file = self.open(key, "wb")
        try:
            file.write(value)
            file.close()
        finally:
            file.discard()

    def cat_file(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        lost: OSError | None = None
        for home in self._near:
            try:
                with _asked(home, "get", key, start, 2**62 if end is None else end) as call:
                    return bytes(received(call, received_size(call)))
            except ConnectionResetError:  # it has no such file
                continue
            except OSError as error:
                lost = error
        if lost is not None:
            raise lost
        raise FileNotFoundError(key)

    def cat_ranges(self, keys: Sequence[str], starts: Sequence[int], ends: Sequence[int], on_error: str) -> list[bytes]:
        del on_error
        return [self.cat_file(*one) for one in zip(keys, starts, ends, strict=True)]

    def cat(self, keys: Sequence[str]) -> dict[str, bytes]:
        return {key: self.cat_file(key) for key in keys}

    def rm(self, keys: str | Sequence[str], recursive: bool = True) -> None:
        """Delete files and the contents of folders, on every reachable server."""
        del recursive
        for key in [keys] if isinstance(keys, str) else keys:
            for home in self._near:
                with contextlib.suppress(OSError), _asked(home, "remove", key) as call:
                    received_size(call)

    rm_file = rm

    def info(self, key: str) -> dict[str, Any]:
        """Return name, size and type ("file", "directory"). Raises FileNotFoundError if neither exists."""
        sizes = self._sizes(key)
        if not sizes:
            raise FileNotFoundError(key)
        is_file = key in sizes
        return {"name": key, "size": sizes.get(key, 0), "type": "file" if is_file else "directory"}

    def ls(self, key: str, detail: bool = True) -> list[Any]:
        found: dict[str, dict[str, Any]] = {}
        for name, size in self._sizes(key).items():
            first, *more = name[len(key) + 1 :].split("/")
            path = f"{key}/{first}"
            found[path] = {"name": path, "size": 0 if more else size, "type": "directory" if more else "file"}
        return [*found.values()] if detail else [*found]

    def exists(self, key: str) -> bool:
        """Return True if a file or folder of that name exists."""
        return bool(self._sizes(key))

    def isfile(self, key: str) -> bool:
        """Return True if a file of that name exists."""
        return key in self._sizes(key)

    def isdir(self, key: str) -> bool:
        """Return True if there are files below that name."""
        return any(name != key for name in self._sizes(key))

    def _sizes(self, key: str) -> dict[str, int]:
        """Return the sizes of the files at and below a key, from all reachable servers."""
        sizes: dict[str, int] = {}
        for home in self._near:
            with contextlib.suppress(OSError), _asked(home, "list", key) as call:
                sizes |= json.loads(bytes(received(call, received_size(call))))
        return sizes


class _NewCopy:
    def __init__(self, homes: Sequence[CopyHome], key: str):
        self.closed = False
        self._calls: list[socket.socket] = []
        try:
            for home in homes:
                self._calls.append(_asked(home, "put", key))
        except OSError:
            self.discard()
            raise

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for start in range(0, len(view), _WRITTEN_AT_ONCE):
            piece = view[start : start + _WRITTEN_AT_ONCE]
            for call in self._calls:
                call.sendall(PIECE.pack(len(piece)))
                call.sendall(piece)

    def close(self) -> None:
        """Finish the file, and return when all servers have it."""
        try:
            for call in self._calls:
                call.sendall(PIECE.pack(0))
            for call in self._calls:
                received_size(call)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the connections. A file that was not finished does not exist."""
        for call in self._calls:
            call.close()


def _asked(home: CopyHome, act: str, name: str, start: int = 0, end: int = 0) -> socket.socket:
    """Connect to a server, send a request, and return the connection."""
    call = socket.create_connection((home.host, home.port), _CONNECT_S)
    try:
        call.settimeout(SILENCE_S)
        call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        text = json.dumps({"act": act, "name": name, "start": start, "end": end}).encode()
        ask(call, home.token, text)
    except OSError:
        call.close()
        raise
    return call
