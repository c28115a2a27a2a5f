"""File locks, and functions that open only regular files: no pipes, devices or links that lead out of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from weft.errors import CheckpointError
from weft.units import format_bytes

#: Files of a model's folder that are not weights: config, tokenizer, chat template.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
#: Maximum size of a companion file. Larger ones are rejected.
MAX_COMPANION_BYTES = 2**30
#: Seconds for which a process that was just killed may still hold a lock: a child that it was starting has a copy of
#: the descriptor until it runs its program.
KILLED_S = 0.5
#: Seconds between two attempts to lock a file.
_POLL_S = 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def try_lock(descriptor: int, *, shared: bool = False, wait_s: float = 0.0) -> bool:
    """Try to lock an open file, and return True if it succeeded.

    The lock is released when the last descriptor of the open file is closed. On a file system without locks, nothing
    is locked and the result is True.

    Args:
        descriptor: descriptor of the open file.
        shared: allow other shared locks of the file.
        wait_s: seconds to wait for a conflicting lock, such as `KILLED_S`.

    Raises:
        OSError: for any failure except a conflicting lock.
    """
    end = time.monotonic() + wait_s
    while not _lock_now(descriptor, shared):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def _lock_now(descriptor: int, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Generator[None]:
    """Hold a lock on the file `path`. `waiting` is called once if another process has the lock.

    The file is not removed after the lock is released, because two processes could then lock different files of the
    same name.
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


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Open a regular file for reading and return its descriptor. Opening never blocks.

    Args:
        path: path of the file.
        follow: allow the last component of the path to be a symbolic link.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return handle


def resolved_inside(folder: Path, file: Path) -> Path:
    """Return the path of a file of `folder` with all links resolved.

    Links may lead to other files of the folder. In the cache of Hugging Face (`snapshots/REVISION`), they may also lead
    to the `blobs` folder next to `snapshots`.

    Args:
        folder: the folder that the file belongs to.
        file: a path in it.

    Raises:
        CheckpointError: if the file is missing, or a link leads out of the folder.
    """
    try:
        root, real = folder.resolve(strict=True), file.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{file}: it cannot be read ({reason}). Repair it, or remove it.") from error
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(one) for one in roots):
        raise CheckpointError(
            f"{file}: it is a link that leaves its folder. Replace it with a copy of the file, or remove it."
        )
    return real


def read_regular(file: Path, folder: Path, max_bytes: int = MAX_COMPANION_BYTES) -> bytes:
    """Return the contents of a regular file of `folder`.

    Args:
        file, max_bytes: the file, and the size above which it is rejected.
        folder: links must not lead out of it, see `resolved_inside`.

    Raises:
        CheckpointError: if the file is missing, too large or not a regular file, or a link leads out of the folder.
    """
    with _opened(file, folder, max_bytes) as source:
        return source.read(max_bytes)


def copy_regular(file: Path, target: Path, folder: Path, max_bytes: int = MAX_COMPANION_BYTES) -> None:
    """Copy the contents of a regular file of `folder` to `target`.

    Args:
        file, target, max_bytes: the file, the path of the copy, and the size above which the file is rejected.
        folder: links must not lead out of it, see `resolved_inside`.

    Raises:
        CheckpointError: if the file is missing, too large or not a regular file, or a link leads out of the folder.
        OSError: if the copy cannot be written.
    """
    with _opened(file, folder, max_bytes) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)


def copy_companions(source: Path, out: Path, *, overwrite: bool = True) -> None:
    """Copy the files of a model's folder that are not weights, such as config and tokenizer. Index files are skipped.

    Args:
        source: a folder in the format of Hugging Face.
        out: an existing folder.
        overwrite: replace files that `out` already has.

    Raises:
        CheckpointError: if a file cannot be read, is too large or not a regular file, or is a link out of the folder.
        OSError: if a copy cannot be written.
    """
    for file in sorted({file for pattern in COMPANIONS for file in source.glob(pattern)}):
        target = out / file.name
        if file.name.endswith(".index.json") or file.is_dir() or (target.exists() and not overwrite):
            continue
        copy_regular(file, target, source)


def _opened(file: Path, folder: Path, max_bytes: int) -> BinaryIO:
    real = resolved_inside(folder, file)
    try:
        handle = open_regular(real, follow=False)
    except OSError as error:
        raise CheckpointError(f"{file}: it cannot be read ({error.strerror}). Remove it, or replace it.") from error
    source = os.fdopen(handle, "rb")
    size = os.fstat(handle).st_size
    if size > max_bytes:
        source.close()
        raise CheckpointError(
            f"{file}: it has {format_bytes(size)}, and files next to weights may have {format_bytes(max_bytes)}. "
            "Remove it from the folder."
        )
    return source
