"""The right to write into a run's folder: one command has it at a time, from before its first write until its end.

It is a lock of the kernel on `<folder>/.lock`. It belongs to the open file, not to a process: the launcher passes the
file on to its ranks, so the folder is free again as soon as the last of them is gone, however they ended.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.errors import ConfigError, LaunchError
from weft.files import try_lock

_NAME = ".lock"
#: How often a folder that others take away at the same moment is made anew.
_TRIES = 100
#: Rights of a new run folder by `run.mode`, before the umask.
_RIGHTS = {"private": 0o700, "group": 0o750, "umask": 0o777}
_REPLICA = re.compile(r"replica_[1-9]\d*")


def restrict_new_files(folder: Path) -> int:
    """Give the files that this process creates from now on no more rights than a folder has, and return the old umask.

    folder: an existing run folder.
    """
    rights = stat.S_IMODE(folder.stat().st_mode)
    before = os.umask(0o077)
    os.umask(before | (~rights & 0o077))
    return before


@contextmanager
def new_files_like(folder: Path) -> Generator[None]:
    """Give the files that this process creates in the block no more rights than a folder has."""
    before = restrict_new_files(folder)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def run_lock(folder: Path, mode: str = "private") -> Generator[int]:
    """Hold a run folder and return the descriptor of its lock, which child processes may inherit.

    If an error ends the block before anything was written, a folder that was created here is removed again.

    Args:
        folder: of the run; created if it is missing.
        mode: `run.mode`, the rights of a new folder.

    Raises:
        LaunchError: if another command holds the folder.
        ConfigError: where it cannot be written to.
    """
    try:
        descriptor, made = _acquire(folder, _RIGHTS[mode])
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


def _acquire(folder: Path, rights: int) -> tuple[int, list[Path]]:
    """Return the descriptor of the lock, and the folders that were created for it."""
    for tries_left in reversed(range(_TRIES)):
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            if _REPLICA.fullmatch(folder.name):
                folder.parent.mkdir(rights, parents=True, exist_ok=True)
            folder.mkdir(rights, parents=True, exist_ok=True)
            descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, rights & 0o666)
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
