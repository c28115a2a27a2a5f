"""Connections between the launcher and its ranks: settings and the run's lock to ranks, failure records from them.

A local socket needs no disk space, so a rank can report a full disk. Ranks receive the content of the settings, so no
other command can change them. They also receive the open file of the lock, so the folder is locked until the launcher
and every rank have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from weft import env
from weft.cli.launch.failure import Failure
from weft.errors import LaunchError

_HEAD = struct.Struct("!Q")  # length of the settings that follow
#: Seconds that a rank waits for the launcher to read its record, so that a suspended launcher does not block it.
_TELL_S = 5.0
#: Seconds that the launcher may need to read pending data on a busy machine.
_READ_S = 60.0


class Switchboard:
    """Launcher's side of the connections.

    `address` is the value of WEFT_LINE for the ranks. `failures` maps ranks to their records, and is complete after
    `close`.
    """

    def __init__(self, settings: bytes = b"", lock: int | None = None):
        self.failures: dict[int, Failure] = {}
        self._settings, self._lock = settings, lock
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._folder = ""
        if sys.platform == "linux":
            # An abstract socket leaves no file.
            self.address = f"@weft-{os.getpid()}-{secrets.token_hex(8)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="weft-")
            self.address = str(Path(self._folder) / "line")
        self._listener.bind(_bound(self.address))
        self._listener.listen(128)
        self._calls: list[tuple[socket.socket, threading.Thread]] = []
        self._closed = False
        self._answering = threading.Thread(target=self._answer, name="weft-switchboard", daemon=True)
        self._answering.start()

    def close(self) -> None:
        """Read the records that ranks have sent so far, and close all connections."""
        self._closed = True
        with contextlib.suppress(OSError):  # wakes accept() on systems on which close does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._answering.join(_READ_S)  # after it, all accepted connections are in `_calls`
        for call, thread in self._calls:
            # Then buffered data is read up to end-of-file, even if a child process still has the rank's end open.
            with contextlib.suppress(OSError):
                call.shutdown(socket.SHUT_RD)
            thread.join(_READ_S)
            call.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self) -> None:
        while not self._closed:
            try:
                call, _ = self._listener.accept()
            except OSError:
                return
            if not is_ours(call):
                call.close()
                continue
            thread = threading.Thread(target=self._serve, args=(call,), name="weft-line", daemon=True)
            thread.start()
            self._calls.append((call, thread))

    def _serve(self, call: socket.socket) -> None:
        # A rank may send its record and end before it has received everything.
        with contextlib.suppress(OSError):
            self._give(call)
        said = b""
        with contextlib.suppress(OSError):  # the rank closed its end after sending this
            while part := call.recv(65536):
                said += part
        # A rank that dies while sending leaves an incomplete record. Its exit code is used instead.
        with contextlib.suppress(ValueError, TypeError):
            failure = Failure(**json.loads(said))
            self.failures[failure.rank] = failure

    def _give(self, call: socket.socket) -> None:
        head = _HEAD.pack(len(self._settings))
        if self._lock is None:
            call.sendall(head)
        else:
            socket.send_fds(call, [head], [self._lock])
        call.sendall(self._settings)


@contextmanager
def switchboard(settings: bytes = b"", lock: int | None = None) -> Generator[Switchboard]:
    """Open a `Switchboard` for the duration of a `with` block.

    Raises:
        LaunchError: if no socket can be opened.
    """
    try:
        board = Switchboard(settings, lock)
    except OSError as error:
        raise LaunchError(
            f"the ranks could not be started: no socket of this machine can be opened ({error.strerror}). "
            f"`weft doctor` checks what they need."
        ) from error
    try:
        yield board
    finally:
        board.close()


class LauncherLine:
    """Rank's side of the connection. `settings` are the bytes that the launcher sent.

    The rank holds the launcher's lock until its process ends.
    """

    def __init__(self, address: str):
        self._call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._call.connect(_bound(address))
        head, self._held, _, _ = socket.recv_fds(self._call, _HEAD.size, 1)
        for descriptor in self._held:
            os.set_inheritable(descriptor, False)  # helper processes of a rank must not hold the lock
        self.settings = b""
        length = _HEAD.unpack(head)[0]
        while len(self.settings) < length:
            part = self._call.recv(length - len(self.settings))
            if not part:
                raise ConnectionResetError("the launcher closed the connection")
            self.settings += part

    def report_failure(self, failure: Failure) -> None:
        """Send this rank's failure record to the launcher, as the last message, if it is still running."""
        with contextlib.suppress(OSError):
            self._call.settimeout(_TELL_S)
            self._call.sendall(json.dumps(asdict(failure)).encode())
            self._call.shutdown(socket.SHUT_WR)


def launcher_line() -> LauncherLine | None:
    """Return the connection to the launcher of this process, or None without one.

    Raises:
        LaunchError: if the launcher does not respond.
    """
    address = env.get("WEFT_LINE")
    if not address:
        return None
    try:
        return LauncherLine(address)
    except (OSError, struct.error) as error:
        raise LaunchError(
            f"WEFT_LINE={address}: the launcher does not answer ({error}). Start training with `weft train`."
        ) from error


def _bound(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address


def is_ours(call: socket.socket) -> bool:
    """Return True if the peer is a process of this user.

    On systems without peer credentials, the folder's permissions protect the socket.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()
