"""Reads a growing file of JSON lines piece by piece."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: One piece; what a reader waits for between two looks at the clock.
_PIECE = 2 * 2**20
#: A line that is longer is none of ours.
_LONGEST = 64 * 2**20


class LogTail:
    """Gives the events of a log that came since the last call.

    Args:
        path: of the log, which need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.size = 0
        self._file = 0
        self._rest = b""

    def changed(self) -> bool:
        """Whether there is more to read, or another file in its place."""
        try:
            found = os.stat(self.path)
        except OSError:
            self.size = 0
            return self.offset > 0
        self.size = found.st_size
        return found.st_size != self.offset or found.st_ino != self._file

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the events of the next piece, and whether all before them is void: the file was made again."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                void = self.offset > 0 and (found.st_size < self.offset or found.st_ino != self._file)
                if void:
                    self.offset, self._rest = 0, b""
                self._file, self.size = found.st_ino, found.st_size
                file.seek(self.offset)
                text = file.read(_PIECE)
        except OSError:
            void = self.offset > 0
            self.offset, self._rest = 0, b""
            return [], void
        self.offset += len(text)
        whole, cut, rest = (self._rest + text).rpartition(b"\n")
        self._rest = rest if len(rest) <= _LONGEST else b""
        return (decode(whole.split(b"\n")) if cut else []), void


def decode(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the lines' events; what is no JSON object is left out."""
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
