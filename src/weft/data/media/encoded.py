"""A picture or a recording as it lies on disk: a whole file, a stretch of an archive, or bytes that a record holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from weft.errors import DataError

#: Open archives of a process; more are closed, the longest unused first.
_MOST_OPEN = 256


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
            with open(self.path, "rb", buffering=0) as file:
                head, length = file.read(size), os.fstat(file.fileno()).st_size
                return head, head if length <= size else os.pread(file.fileno(), size, length - size)
        except OSError as error:
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
        except OSError as error:
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
        except OSError as error:
            raise self._unread(error) from error

    def whole(self) -> bytes:
        """Return all bytes.

        Raises:
            DataError: where the file cannot be read, or ends before the stretch does.
        """
        if self.held is not None:
            return self.held
        try:
            if self.length < 0:
                return Path(self.path).read_bytes()
            found = self._read(0, self.length)
        except OSError as error:
            raise self._unread(error) from error
        if len(found) < self.length:
            raise DataError(f"{self.name}: {self.path} ends before it does. Copy that file again.")
        return found

    def _read(self, start: int, size: int) -> bytes:
        return os.pread(_opened(self.path).fd, min(size, self.length - start), self.offset + start)

    def _unread(self, error: OSError) -> DataError:
        return DataError(f"{self.name}: it cannot be read ({error.strerror or error}). Bring it back, or leave it out.")


class _Open:
    """A file that is read at any place by any thread, closed with the last reference."""

    def __init__(self, path: str):
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@lru_cache(maxsize=_MOST_OPEN)
def _opened(path: str) -> _Open:
    return _Open(path)
