"""The copy servers of a run as one file system, with as much of fsspec's methods as `StoreTarget` asks for.

What a host writes goes to its own server and to that of the next host, so that the files of all outlive any one of
them. What is read comes from the nearest server that has it.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Any

from weft.checkpoint.targets.copy_server import PIECE, SILENCE_S, CopyHome, ask, received, received_size
from weft.checkpoint.targets.store_path import StorePath

_CONNECT_S = 10.0
_WRITTEN_AT_ONCE = 8 * 2**20


def copies_at(homes: Sequence[CopyHome], own: int) -> StorePath:
    """Return the place of the checkpoints in memory.

    Args:
        homes: the server of each host, in an order that is the same on all ranks.
        own: which of them is on this rank's host.
    """
    return StorePath("copies://run", CopyFiles(homes, own))


class CopyFiles:
    """Files on several servers. Names are keys such as "run/step_00000012/COMMIT"; folders are what names imply.

    homes, own: as `copies_at`. Methods are those of fsspec's file systems, and raise OSError where a server is lost.
    """

    def __init__(self, homes: Sequence[CopyHome], own: int):
        self._near = [*homes[own:], *homes[:own]]
        # The host after this one keeps what this one writes.
        self._kept_by = self._near[:2]

    def open(self, key: str, mode: str = "rb", block_size: int = 0) -> _NewCopy:
        """Begin a new file; it is there on all its servers once it is closed."""
        del mode, block_size
        return _NewCopy(self._kept_by, key)

    def pipe_file(self, key: str, value: bytes) -> None:
        """Write a whole file."""
        file = self.open(key, "wb")
        try:
            file.write(value)
            file.close()
        finally:
            file.discard()

    def cat_file(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a stretch of a file."""
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
        """Read several stretches."""
        del on_error
        return [self.cat_file(*one) for one in zip(keys, starts, ends, strict=True)]

    def cat(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Read whole files."""
        return {key: self.cat_file(key) for key in keys}

    def rm(self, keys: str | Sequence[str], recursive: bool = True) -> None:
        """Delete files and what is below folders, on every server that is there."""
        del recursive
        for key in [keys] if isinstance(keys, str) else keys:
            for home in self._near:
                with contextlib.suppress(OSError), _asked(home, "remove", key) as call:
                    received_size(call)

    rm_file = rm

    def info(self, key: str) -> dict[str, Any]:
        """Return name, size and type ("file", "directory"). FileNotFoundError where there is neither."""
        sizes = self._sizes(key)
        if not sizes:
            raise FileNotFoundError(key)
        is_file = key in sizes
        return {"name": key, "size": sizes.get(key, 0), "type": "file" if is_file else "directory"}

    def ls(self, key: str, detail: bool = True) -> list[Any]:
        """List what lies directly in a folder."""
        found: dict[str, dict[str, Any]] = {}
        for name, size in self._sizes(key).items():
            first, *more = name[len(key) + 1 :].split("/")
            path = f"{key}/{first}"
            found[path] = {"name": path, "size": 0 if more else size, "type": "directory" if more else "file"}
        return [*found.values()] if detail else [*found]

    def exists(self, key: str) -> bool:
        """Return whether there is a file or folder of that name."""
        return bool(self._sizes(key))

    def isfile(self, key: str) -> bool:
        """Return whether there is a file of that name."""
        return key in self._sizes(key)

    def isdir(self, key: str) -> bool:
        """Return whether something lies below that name."""
        return any(name != key for name in self._sizes(key))

    def _sizes(self, key: str) -> dict[str, int]:
        """Of all files there and below, on any server that answers."""
        sizes: dict[str, int] = {}
        for home in self._near:
            with contextlib.suppress(OSError), _asked(home, "list", key) as call:
                sizes |= json.loads(bytes(received(call, received_size(call))))
        return sizes


class _NewCopy:
    """A file on its way to several servers."""

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
        """Add bytes."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for start in range(0, len(view), _WRITTEN_AT_ONCE):
            piece = view[start : start + _WRITTEN_AT_ONCE]
            for call in self._calls:
                call.sendall(PIECE.pack(len(piece)))
                call.sendall(piece)

    def close(self) -> None:
        """Return once all servers have it whole."""
        try:
            for call in self._calls:
                call.sendall(PIECE.pack(0))
            for call in self._calls:
                received_size(call)
        finally:
            self.discard()

    def discard(self) -> None:
        """Hang up; what was not closed is nowhere."""
        for call in self._calls:
            call.close()


def _asked(home: CopyHome, act: str, name: str, start: int = 0, end: int = 0) -> socket.socket:
    """A connection to a server that has been told what is wanted."""
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
