"""Reads a growing file of JSON lines piece by piece."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weft.monitor.events import open_regular

#: Bytes of one piece; what a reader waits for between two looks at the clock.
PIECE = 2 * 2**20
#: A line that is longer is none of ours.
_LONGEST = 64 * 2**20


class LogTail:
    """Returns the complete lines of a log that came since the last call.

    Args:
        path: of the log, which need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.size = 0
        self.trouble = ""
        self._file = 0
        self._rest = b""

    def changed(self) -> bool:
        """Return True if there is more to read, or another file under this name."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            self.size, self.trouble = 0, error.strerror or str(error)
            return self.offset > 0
        self.size = found.st_size
        return found.st_size != self.offset or found.st_ino != self._file

    def read(self, limit: int = PIECE) -> tuple[list[bytes], bool]:
        """Return the lines of the next piece, and True if all before them is void: the file was made again.

        Args:
            limit: bytes to read at most.
        """
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                void = self.offset > 0 and (found.st_size < self.offset or found.st_ino != self._file)
                if void:
                    self.offset, self._rest = 0, b""
                self._file, self.size = found.st_ino, found.st_size
                file.seek(self.offset)
                text = file.read(limit)
        except OSError as error:
            void = self.offset > 0
            self.offset, self._rest, self.trouble = 0, b"", error.strerror or str(error)
            return [], void
        self.trouble = ""
        self.offset += len(text)
        complete, cut, rest = (self._rest + text).rpartition(b"\n")
        self._rest = rest if len(rest) <= _LONGEST else b""
        return (complete.split(b"\n") if cut else []), void

    def skip_to_last(self, num_bytes: int) -> None:
        """Leave out all but the last `num_bytes` of what is there, and begin with the first complete line of them."""
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                start = max(0, found.st_size - num_bytes)
                file.seek(start)
                cut = file.read(PIECE).find(b"\n") + 1
        except OSError:
            return
        self.offset, self._file, self.size, self._rest = start + cut, found.st_ino, found.st_size, b""


def decode(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the lines' events; what is no JSON object is left out."""
    if not lines:
        return []
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # one call for all is faster
    except (ValueError, RecursionError):
        found = [_one(line) for line in lines]
    return [event for event in found if isinstance(event, dict)]


def _one(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
