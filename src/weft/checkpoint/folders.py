"""Folders of a run's checkpoints, and the rank group that a save or load runs on.

This package issues no collectives. Callers pass functions for the communication between ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.manifest import COMMIT_NAME
from weft.errors import CheckpointError
from weft.files import try_lock


def _act(act: Callable[[], Any]) -> Any:
    return act()


def _only(record: bytes) -> list[bytes]:
    return [record]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A rank, the number of ranks, and functions for communication between them.

    Attributes:
        rank: index of this rank.
        number: number of ranks.
        on_first: runs a function on the first rank and returns its JSON value on all ranks. An exception is raised on
            all ranks.
        gather: returns the bytes of all ranks in order on the first rank. It may return [] on the others.
    """

    rank: int = 0
    number: int = 1
    on_first: Callable[[Callable[[], Any]], Any] = _act
    gather: Callable[[bytes], list[bytes]] = _only


#: Group of a single process.
ALONE = RankGroup()


# The folder of a run's checkpoints: names, order, writer lock, moves, cleanup.

_STEP_FOLDER = re.compile(r"step_(\d{8,15})(?:\.again(\d*))?")
_TEMP_PREFIX = ".tmp-"
_TRASH_NAME = ".trash"


@dataclass(frozen=True, slots=True, order=True)
class StepFolder:
    """A folder with the name of a checkpoint. Sorts by step; a second save of a step sorts after the first.

    Attributes:
        step: number of optimizer steps before the save.
        again: number of earlier saves of this step.
        path: a Path, or its equivalent for an object store.
    """

    step: int
    again: int
    path: Any

    @property
    def committed(self) -> bool:
        return (self.path / COMMIT_NAME).is_file()


def folder_name(step: int) -> str:
    """Return the name of a step's folder: 120 -> 'step_00000120'."""
    return f"step_{step:08d}"


def step_in_name(name: str) -> int | None:
    """Return the step of a folder name, or None: 'step_00000120' or 'step_00000120.again' -> 120."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def step_folder(path: Any) -> StepFolder:
    """Return the StepFolder of a path that has the name of a checkpoint."""
    match = _STEP_FOLDER.fullmatch(path.name)
    assert match is not None
    again = match.group(2)
    return StepFolder(int(match.group(1)), 0 if again is None else int(again or 1), path)


def step_folders(root: Path) -> list[StepFolder]:
    """List all folders with names of checkpoints, oldest step first. Empty if `root` does not exist.

    Raises CheckpointError if `root` cannot be read.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror}).") from error
    return sorted(step_folder(root / name) for name in names if _STEP_FOLDER.fullmatch(name))


def sync_folder(path: Path) -> None:
    """Flush a folder's entries (created, renamed and removed names) to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_temp_folder(root: Path, step: int) -> Path:
    """Create an empty folder next to the checkpoints. Readers ignore it."""
    path = root / f"{_TEMP_PREFIX}{folder_name(step)}-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def move_to_trash(path: Path) -> Path:
    trash = path.parent / _TRASH_NAME
    if trash.is_symlink():  # deletions must not leave this folder
        trash.unlink()
    trash.mkdir(exist_ok=True)
    target = trash / f"{path.name}-{secrets.token_hex(4)}"
    path.rename(target)
    sync_folder(path.parent)
    return target


def discard(path: Path) -> None:
    """Delete a folder. A folder that readers may find is first moved to the trash with one rename."""
    if path.name.startswith(_TEMP_PREFIX):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        move_to_trash(path)
        empty_trash(path.parent)


def lock_for_reading(path: Path) -> int | None:
    """Return a descriptor that protects a checkpoint from pruning until it is closed; None if it has no COMMIT."""
    try:
        handle = os.open(path / COMMIT_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        try_lock(handle, shared=True)
    return handle


def is_being_read(path: Path) -> bool:
    """Return True if a process is reading a checkpoint, on any machine that shares the file system's locks.

    Return False if the file system cannot lock files, so that this is unknown.
    """
    try:
        handle = os.open(path / COMMIT_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    except OSError:
        return False  # no exclusive locks on files that are open for reading, as over NFS
    finally:
        os.close(handle)


def empty_trash(root: Path) -> None:
    """Delete the folders in the trash. Folders that cannot be deleted stay until the next call."""
    trash = root / _TRASH_NAME
    if trash.is_dir():
        shutil.rmtree(trash, ignore_errors=True)


def remove_debris(root: Path) -> None:
    """Delete the leftovers of killed writers. Call it only while holding the writer lock."""
    for name in os.listdir(root):
        if name.startswith(_TEMP_PREFIX):
            shutil.rmtree(root / name, ignore_errors=True)
    empty_trash(root)


@contextlib.contextmanager
def writer_lock(root: Path) -> Iterator[None]:
    """Lock `root` for one writer. The kernel releases the lock when its process dies.

    On a file system without locks, nothing is locked.

    Raises:
        CheckpointError: immediately, if another process has the lock.
    """
    handle = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        if not try_lock(handle):
            raise CheckpointError(
                f"run.dir={root}: another process is saving a checkpoint here. Give this run another run.name."
            )
        yield
    finally:
        os.close(handle)
