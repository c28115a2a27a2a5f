"""What saving and loading ask of the other ranks, said by who calls: a checkpoint knows no collectives."""

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
    """One rank among all, and what it may ask of the others.

    on_first: the JSON value that the first rank's function returns, on all ranks; what it raises, all raise. gather:
    the
    bytes of every rank in their order, on the first rank; others may get none.
    """

    rank: int = 0
    number: int = 1
    on_first: Callable[[Callable[[], Any]], Any] = _act
    gather: Callable[[bytes], list[bytes]] = _only


#: A process of its own.
ALONE = RankGroup()


# The folder that holds a run's checkpoints: names, order, the writer's lock, moving aside, clearing debris.

_STEP_FOLDER = re.compile(r"step_(\d{8,15})(?:\.again(\d*))?")
_TEMP_PREFIX = ".tmp-"
_TRASH_NAME = ".trash"


@dataclass(frozen=True, slots=True, order=True)
class StepFolder:
    """A folder named as a checkpoint. Sorts by step; the second save of a step comes after the first.

    again: how many saves of this step came before. path: a Path, or what an object store has instead.
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
    """Return the step: 'step_00000120' or 'step_00000120.again' -> 120; None for any other name."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def step_folder(path: Any) -> StepFolder:
    """A path that is named as a checkpoint."""
    match = _STEP_FOLDER.fullmatch(path.name)
    assert match is not None
    again = match.group(2)
    return StepFolder(int(match.group(1)), 0 if again is None else int(again or 1), path)


def step_folders(root: Path) -> list[StepFolder]:
    """All folders named as checkpoints, complete or not, oldest step first. Empty when `root` does not exist."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror}).") from error
    return sorted(step_folder(root / name) for name in names if _STEP_FOLDER.fullmatch(name))


def sync_folder(path: Path) -> None:
    """Make names created, renamed or removed in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_temp_folder(root: Path, step: int) -> Path:
    """An empty folder beside the checkpoints that no reader looks at."""
    path = root / f"{_TEMP_PREFIX}{folder_name(step)}-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def move_to_trash(path: Path) -> Path:
    """Take a folder out of sight in one rename, and return where it is now."""
    trash = path.parent / _TRASH_NAME
    if trash.is_symlink():  # somebody's: what is deleted stays in this folder
        trash.unlink()
    trash.mkdir(exist_ok=True)
    target = trash / f"{path.name}-{secrets.token_hex(4)}"
    path.rename(target)
    sync_folder(path.parent)
    return target


def discard(path: Path) -> None:
    """Delete a folder; one that readers might see goes out of their sight first, in one rename."""
    if path.name.startswith(_TEMP_PREFIX):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        move_to_trash(path)
        empty_trash(path.parent)


def lock_for_reading(path: Path) -> int | None:
    """A descriptor that keeps a checkpoint from being pruned until it is closed; None where there is no such lock."""
    try:
        handle = os.open(path / COMMIT_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        try_lock(handle, shared=True)
    return handle


def is_being_read(path: Path) -> bool:
    """Whether some process of this machine, or of those that share the file system's locks, reads a checkpoint."""
    try:
        handle = os.open(path / COMMIT_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    except OSError:
        return False  # no exclusive locks on what is open for reading, as over NFS
    finally:
        os.close(handle)


def empty_trash(root: Path) -> None:
    """Delete what was moved aside. What cannot be deleted now stays out of sight and is tried again next time."""
    trash = root / _TRASH_NAME
    if trash.is_dir():
        shutil.rmtree(trash, ignore_errors=True)


def remove_debris(root: Path) -> None:
    """Delete what killed writers left. Call it only with the writer's lock held."""
    for name in os.listdir(root):
        if name.startswith(_TEMP_PREFIX):
            shutil.rmtree(root / name, ignore_errors=True)
    empty_trash(root)


@contextlib.contextmanager
def writer_lock(root: Path) -> Iterator[None]:
    """Hold `root` for one writer. CheckpointError at once when another process is writing there.

    The kernel lets go of the lock when its holder dies. File systems that know no locks are used without one.
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
