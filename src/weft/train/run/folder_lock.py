"""The right to write into a run's folder: one command has it at a time, from before its first write until its end.

It is a lock of the kernel on `<folder>/.lock`. It belongs to the open file, not to a process: the launcher passes the
file on to its ranks, so the folder is free again as soon as the last of them is gone, however they ended.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.errors import ConfigError, LaunchError
from weft.file_lock import try_lock

_NAME = ".lock"
#: How often a folder that others take away at the same moment is made anew.
_TRIES = 100


@contextmanager
def run_lock(folder: Path) -> Generator[int]:
    """Hold the folder, made where it is missing, and give the descriptor of the lock; others may be given it too.

    When an error ends the block before anything was written, a folder that was made here is taken away again.

    Raises:
        LaunchError: when another command holds the folder.
        ConfigError: where it cannot be written to.
    """
    try:
        descriptor, made = _acquire(folder)
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder.parent}: cannot write {str(folder)!r} ({error.strerror}). Use another run.dir."
        ) from error
    try:
        yield descriptor
    except BaseException:
        _take_away(folder, made)
        raise
    finally:
        # No LOCK_UN: that would open the folder for others while ranks that share the lock still write.
        os.close(descriptor)


def _acquire(folder: Path) -> tuple[int, list[Path]]:
    """The descriptor of the lock, and the folders that were made for it."""
    for tries_left in reversed(range(_TRIES)):
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except (FileExistsError, FileNotFoundError):
            # Its last holder took the folder away just now: before our open, or while mkdir looked at what is there.
            if tries_left == 0 or folder.is_file():
                raise
            continue
        try:
            _lock(descriptor, folder)
            if _is_there(descriptor, folder / _NAME):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
                return descriptor, made
        except BaseException:
            os.close(descriptor)
            raise
        # Taken away between our open and our lock.
        os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "other processes keep taking the lock", str(folder))


def _lock(descriptor: int, folder: Path) -> None:
    if not try_lock(descriptor):
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "another process"
        raise LaunchError(
            f"run.name={folder.name}: {holder} is training in {str(folder)!r} right now. "
            f"Wait for it, or use another run.name."
        )


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _take_away(folder: Path, made: list[Path]) -> None:
    """Remove the folder and its new parents where they hold nothing but the lock."""
    with suppress(OSError):  # someone has put something there in the meantime
        if folder in made and os.listdir(folder) == [_NAME]:
            (folder / _NAME).unlink()
            for path in made:
                path.rmdir()
