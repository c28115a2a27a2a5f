"""One writer at a time, over processes and ranks; the operating system frees the lock when its holder dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.files import try_lock

_POLL_S = 0.05


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`. waiting: called once when another process has it.

    The file stays after the lock is released: removing it would let two processes lock two files of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        told = False
        while not try_lock(handle):
            if waiting is not None and not told:
                told = True
                waiting()
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Make a temporary folder that becomes `final` when the block ends well, and is removed when it does not.

    Call it under the lock of `final`: what an earlier, killed writer left is removed first.
    """
    prefix = f".{final.name}.partial-"
    for left in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = final.parent / f"{prefix}{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Write all files and folders below `folder` through to the disk."""
    for here, _, names in os.walk(folder):
        for name in names:
            sync(Path(here, name))
        sync(Path(here))


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
