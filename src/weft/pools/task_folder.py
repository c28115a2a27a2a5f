"""The folder of a map: its items, a journal of outcomes, and the ordered results.

`map.json` identifies the function and the items. A line of `journal.jsonl` is a checksum and an outcome. A killed
command leaves at most one incomplete line, which the next command removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import ConfigError, PoolError
from weft.files import KILLED_S, replace_text, try_lock

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MISSING, _DONE, _FAILED = 0, 1, 2
#: Times that a lock's file is opened again because a command that ended has removed it.
_LOCK_TRIES = 10
#: Files of a folder without a task's outcome.
_UNCLAIMED = ("items.jsonl", "journal.jsonl", ".lock")


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Generator[None]:
    """Turn errors of a full disk or an unwritable folder into sentences.

    Raises:
        PoolError: if the disk is full.
        ConfigError: if the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise PoolError(
                f"{folder}: the disk is full ({error.strerror}). Free some space, then run the same command: "
                "finished tasks are kept."
            ) from error
        if error.errno in _UNWRITABLE:
            raise ConfigError(f"{folder}: it cannot be written ({error.strerror}). Give another folder.") from error
        raise


class TaskFolder:
    """An open, locked folder of a map. Use `open_folder`."""

    def __init__(self, path: Path, lock: int):
        self.path, self._lock = path, lock
        self.num_items = 0
        #: Number of tasks with a result, or that failed in this command.
        self.num_finished = 0
        #: Lines of the journal that were damaged. Their tasks run again.
        self.num_damaged = 0
        self._states = bytearray()
        self._offsets = array("q")
        self._journal: BinaryIO | None = None
        self._end = 0
        self._claim = ""  # the map.json that the first outcome writes: a mistyped command claims no folder

    def claim(self, function: str, items: Iterable[str]) -> None:
        """Write the items, or compare them with the folder's.

        Args:
            function: the function's name.
            items: one JSON text per item.

        Raises:
            ConfigError: if the folder belongs to another function, other items, or is not empty.
        """
        about = self.path / "map.json"
        for draft in self.path.glob(".items.*"):  # of a killed command
            draft.unlink()
        own = {*_UNCLAIMED, "slurm"}
        others = [path.name for path in self.path.iterdir() if path.name not in own and path.name[0] != "."]
        if not about.exists() and others:
            raise ConfigError(f"{self.path}: it has other files, such as {others[0]}. Give a new folder.")
        draft = self.path / f".items.{os.getpid()}"
        digest = hashlib.sha256()
        try:
            with draft.open("wb") as file:
                for item in items:
                    line = item.encode() + b"\n"
                    digest.update(line)
                    file.write(line)
                    self.num_items += 1
            said: dict[str, Any] = {"function": function, "num_items": self.num_items, "sha256": digest.hexdigest()}
            if about.exists():
                self._compare(said)
            else:
                os.replace(draft, self.path / "items.jsonl")
                (self.path / "journal.jsonl").unlink(missing_ok=True)
                self._claim = json.dumps({"version": 1, **said}) + "\n"
        finally:
            draft.unlink(missing_ok=True)

    def _compare(self, said: dict[str, Any]) -> None:
        try:
            found = json.loads((self.path / "map.json").read_bytes())
            known = {key: found[key] for key in ("function", "num_items", "sha256")}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path}/map.json: it is damaged. Give a new folder.") from error
        if known["function"] != said["function"]:
            raise ConfigError(
                f"{self.path}: it has results of {known['function']}, not of {said['function']}. Give another folder."
            )
        if known != said:
            raise ConfigError(
                f"{self.path}: it has results of {known['num_items']} other items. Give another folder, "
                "or the items it was made for."
            )

    def read_journal(self) -> None:
        """Find finished tasks, remove an incomplete line, and open the journal for writing."""
        self._states, self._offsets = bytearray(self.num_items), array("q", [-1]) * self.num_items
        path = self.path / "journal.jsonl"
        path.touch()
        with path.open("rb") as file:
            bad_at = -1  # start of damaged lines that no good line follows
            for line in file:
                place = _checked(line, self.num_items)
                if place is None:
                    self.num_damaged += 1
                    bad_at = self._end if bad_at < 0 else bad_at
                elif self._states[place[0]] != _DONE:
                    self._states[place[0]], self._offsets[place[0]] = place[1], self._end
                    bad_at = -1
                self._end += len(line)
        if bad_at >= 0:
            self._end = bad_at
            self.num_damaged -= 1  # the line that a killed command left
            os.truncate(path, bad_at)
        self._journal = path.open("ab")
        self.num_finished = self.num_done

    @property
    def num_done(self) -> int:
        """Number of tasks with a result."""
        return self._states.count(_DONE)

    @property
    def num_failed(self) -> int:
        """Number of tasks whose last outcome is an error."""
        return self._states.count(_FAILED)

    def missing(self) -> Iterator[tuple[int, str]]:
        """Yield index and JSON text of each item without a result, reading the file as needed."""
        with (self.path / "items.jsonl").open(encoding="utf-8", newline="\n") as file:
            for index, line in enumerate(file):
                if self._states[index] != _DONE:
                    yield index, line.rstrip("\n")

    def add(self, index: int, outcome: dict[str, Any], log: str) -> None:
        """Append a task's outcome to the journal, and write its output if it printed.

        Raises:
            PoolError: if the disk is full.
        """
        assert self._journal is not None
        assert self._states[index] != _DONE
        text = json.dumps({"item": index, **outcome}).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        with full_disk_named(self.path):
            if self._claim:
                replace_text(self.path / "map.json", self._claim)
                self._claim = ""
            if log:
                logs = self.path / "logs"
                logs.mkdir(exist_ok=True)
                (logs / f"{index}.log").write_text(log, encoding="utf-8")
            self._journal.write(line)
            self._journal.flush()
        self.num_finished += 1
        self._states[index] = _FAILED if "error" in outcome else _DONE
        self._offsets[index] = self._end
        self._end += len(line)

    def outcomes(self) -> Iterator[dict[str, Any]]:
        """Yield the outcome of each item, in the order of the items. Tasks without an outcome are left out."""
        yield from map(json.loads, self._lines())

    def _lines(self) -> Iterator[bytes]:
        with (self.path / "journal.jsonl").open("rb") as file:
            for offset in self._offsets:
                if offset >= 0:
                    file.seek(offset)
                    yield file.readline()[9:]

    def write_results(self) -> None:
        """Write `results.jsonl` with one line per item, atomically.

        Raises:
            PoolError: if the disk is full.
        """
        draft = self.path / ".results.jsonl"
        with full_disk_named(self.path), draft.open("wb") as file:
            file.writelines(self._lines())
            file.flush()
            os.fsync(file.fileno())
            os.replace(draft, self.path / "results.jsonl")

    def close(self) -> None:
        """Make the journal durable, and release the folder."""
        try:
            if self._journal is not None:
                with contextlib.suppress(OSError), self._journal:
                    os.fsync(self._journal.fileno())
            if not (self.path / "map.json").exists():  # the command was refused
                with contextlib.suppress(OSError):
                    for name in _UNCLAIMED:
                        (self.path / name).unlink(missing_ok=True)
                    self.path.rmdir()
        finally:
            os.close(self._lock)


def _checked(line: bytes, num_items: int) -> tuple[int, int] | None:
    """Return item and state of a line of the journal, or None if it is damaged."""
    text = line[9:-1]
    if line[8:9] != b" " or line[-1:] != b"\n" or line[:8] != b"%08x" % zlib.crc32(text):
        return None
    outcome = json.loads(text)
    index = outcome["item"]
    return (index, _FAILED if "error" in outcome else _DONE) if index < num_items else None


def _take_lock(path: Path) -> int | None:
    """Lock a file and return its descriptor, or None if another command has it."""
    for _ in range(_LOCK_TRIES):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        is_locked = try_lock(lock, wait_s=KILLED_S)
        if is_locked and _is_current(lock, path):
            return lock
        os.close(lock)
        if not is_locked:
            break
    return None


def _is_current(lock: int, path: Path) -> bool:
    """Return False if another command removed the lock's file before this one locked it."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def locked_folder(folder: Path) -> Generator[None]:
    """Create a folder that commands continue in, and hold its lock.

    Raises:
        ConfigError: if another command is working in it, or it cannot be written.
        PoolError: if the disk is full.
    """
    with full_disk_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(lock, wait_s=KILLED_S):
                raise ConfigError(
                    f"{folder}: another command is working in it. Wait until it ends, or give another --out."
                )
            yield
        finally:
            os.close(lock)


@contextlib.contextmanager
def open_folder(path: Path, function: str, items: Iterable[str]) -> Generator[TaskFolder]:
    """Open a folder of a map under a lock, and find the tasks that are missing.

    Args:
        path: the folder.
        function: the function's name.
        items: one JSON text per item.

    Raises:
        ConfigError: if the folder belongs to another map, or another process is using it.
        PoolError: if the disk is full.
    """
    with full_disk_named(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path / ".lock")
    if lock is None:
        raise ConfigError(f"{path}: another command is working in it. Wait until it ends, or give another folder.")
    folder = TaskFolder(path, lock)
    try:
        with full_disk_named(path):
            folder.claim(function, items)
            folder.read_journal()
        yield folder
    finally:
        folder.close()
