"""A picture or a recording as it lies on disk: a whole file, a stretch of an archive, or bytes that a record holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from weft.errors import DataError
from weft.files import open_regular
from weft.units import format_bytes

#: Open archives of a process; more are closed, the longest unused first.
_MOST_OPEN = 256
#: Encoded pictures and recordings larger than this are refused where all bytes are needed.
_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Encoded:
    """Bytes that a decoder takes. name: as people find it again. held: the bytes themselves, where no file has them.

    path, offset, length: of the stretch of a file; with length -1 it is the whole file.
    """

    name: str
    path: str = ""
    offset: int = 0
    length: int = -1
    held: bytes | None = None

    @classmethod
    def of_file(cls, path: Path) -> Encoded:
        """Return what a file holds."""
        return cls(str(path), str(path))

    def ends(self, size: int) -> tuple[bytes, bytes]:
        """Return the first and the last bytes, `size` of each where there are so many.

        Raises:
            DataError: where the file cannot be read.
        """
        if self.held is not None:
            return self.held[:size], self.held[-size:]
        try:
            if self.length >= 0:
                return self._read(0, size), self._read(max(0, self.length - size), size)
            with os.fdopen(open_regular(self.path), "rb", buffering=0) as file:
                head, length = file.read(size), os.fstat(file.fileno()).st_size
                return head, head if length <= size else os.pread(file.fileno(), size, length - size)
        except (OSError, ValueError, OverflowError) as error:
            raise self._unread(error) from error

    def size(self) -> int:
        """Return the number of bytes.

        Raises:
            DataError: where the file cannot be read.
        """
        if self.held is not None:
            return len(self.held)
        try:
            return self.length if self.length >= 0 else os.stat(self.path).st_size
        except (OSError, ValueError) as error:
            raise self._unread(error) from error

    def part(self, start: int, size: int) -> bytes:
        """Return some of the bytes, fewer where it ends before.

        Args:
            start: of the first.
            size: how many.

        Raises:
            DataError: where the file cannot be read.
        """
        if self.held is not None:
            return self.held[start : start + size]
        try:
            most = size if self.length < 0 else max(0, min(size, self.length - start))
            return os.pread(_opened(self.path).fd, most, self.offset + start)
        except (OSError, ValueError, OverflowError) as error:
            raise self._unread(error) from error

    def whole(self) -> bytes:
        """Return all bytes.

        Raises:
            DataError: if the file cannot be read, is larger than 1 GiB, or ends before the stretch does.
        """
        if self.held is not None:
            return self.held
        size = self.size()
        if size > _MAX_BYTES:
            raise DataError(
                f"{self.name}: it has {format_bytes(size)}, and {format_bytes(_MAX_BYTES)} can be read. Delete it."
            )
        try:
            if self.length < 0:
                with os.fdopen(open_regular(self.path), "rb") as file:
                    return file.read(_MAX_BYTES)
            found = self._read(0, self.length)
        except (OSError, ValueError, OverflowError) as error:
            raise self._unread(error) from error
        if len(found) < self.length:
            raise DataError(f"{self.name}: {self.path} ends before it does. Copy that file again.")
        return found

    def _read(self, start: int, size: int) -> bytes:
        return os.pread(_opened(self.path).fd, min(size, self.length - start), self.offset + start)

    def _unread(self, error: Exception) -> DataError:
        reason = getattr(error, "strerror", None) or error
        return DataError(f"{self.name}: it cannot be read ({reason}). Bring it back, or leave it out.")


class _Open:
    """A file that is read at any place by any thread, closed with the last reference."""

    def __init__(self, path: str):
        self.fd = -1
        self.fd = open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@lru_cache(maxsize=_MOST_OPEN)
def _opened(path: str) -> _Open:
    return _Open(path)
