"""Checkpoint targets, for saving, loading and pruning: their interface, the target of a folder, and their selection.

A checkpoint is a folder in the target, and exists as soon as it has a COMMIT file. Failures raise OSError with the
reason in strerror.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, cast

from weft.checkpoint import folders
from weft.checkpoint.folders import StepFolder
from weft.checkpoint.manifest import COMMIT_NAME
from weft.checkpoint.object_store import Location, StorePath, StoreTarget
from weft.errors import CheckpointError
from weft.files import resolved_inside


class Sink(Protocol):
    """A new file that is open for writing."""

    def write(self, data: bytes | memoryview) -> object: ...

    def finish(self) -> None: ...

    def close(self) -> None:
        """Close the file. An unfinished file does not become part of a checkpoint."""
        ...


class RangeReader(Protocol):
    """An open file. `num_bytes` is its size, and `chunk_bytes` the preferred request size for sequential reads."""

    num_bytes: int
    chunk_bytes: int

    def into(self, out: memoryview, offset: int) -> int:
        """Fill `out` with bytes from `offset` on. Return the number of bytes read, 0 at the end of the file."""
        ...

    def close(self) -> None: ...


class Target(Protocol):
    """Storage for the checkpoints of a run.

    Attributes:
        setting: name of the target in errors.
        remedy: advice for a failed save.
    """

    setting: str
    remedy: str

    def step_folders(self) -> list[StepFolder]:
        """List all folders with names of checkpoints, complete or not, oldest step first."""
        ...

    def lock(self, held: contextlib.ExitStack) -> None:
        """Lock out other writers until `held` closes, if the target has locks.

        Raises:
            CheckpointError: immediately, if another process has the lock.
        """
        ...

    def prepare(self, held: contextlib.ExitStack) -> None:
        """Create the target, lock it until `held` closes, and delete hidden leftovers of killed writers."""
        ...

    def clear_debris(self) -> None:
        """Delete hidden leftovers of killed writers, unless another process is saving."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free space in bytes, or None if it is unknown. Raises OSError if nothing can be written."""
        ...

    def begin(self, step: int) -> Location:
        """Make an empty folder for the files of a save. Readers do not consider it a checkpoint."""
        ...

    def finalize(self, step: int, place: Location) -> Location:
        """Move the folder of a save, complete except for COMMIT, to its visible name, and return its path."""
        ...

    def commit(self, place: Location, text: bytes) -> None:
        """Write COMMIT atomically. After it, the checkpoint exists."""
        ...

    def replace(self, again: Location, final: Location) -> Location:
        """Replace the earlier saves of a step by a committed later one, and return its path."""
        ...

    def sync(self, place: Location) -> None:
        """Flush the entries of a folder to the disk."""
        ...

    def discard(self, place: Location) -> None:
        """Delete the folder of a save that failed."""
        ...

    def remove(self, places: Collection[Location]) -> None:
        """Delete checkpoints. Each is removed atomically for readers. The next call deletes any remaining files."""
        ...

    def set_aside(self, place: Location) -> Location:
        """Exclude a checkpoint from resuming and pruning but keep its files. Return its new path."""
        ...

    def set_unfinished_aside(self, place: Location) -> Location | None:
        """Exclude a folder without COMMIT, and return its new path, or None if it is left for the next pruning."""
        ...

    def reading(self, place: Location) -> Callable[[], None] | None:
        """Protect a checkpoint from pruning until the returned function is called; None if the target cannot."""
        ...

    def is_being_read(self, place: Location) -> bool:
        """Return True if a process holds the read lock of the checkpoint."""
        ...

    def create(self, file: Location) -> Sink: ...

    def size(self, file: Location) -> int:
        """Return the size of a file in bytes.

        Raises FileNotFoundError if it is missing, and CheckpointError if it is not a regular file.
        """
        ...

    def open(self, file: Location) -> RangeReader:
        """Open a file for reading, without following a link."""
        ...

    def file_sizes(self, place: Location) -> dict[str, int]:
        """Return the size of each file of a folder, by name."""
        ...

    def take(self, files: Collection[Location]) -> Mapping[Location, bytes]:
        """Read small files completely, delete them, and return their contents."""
        ...


# Checkpoints in a folder. They are hidden until complete, then renamed. Deletion also starts with a rename.

_SYNC_FILE_RANGE_WRITE = 2
#: Number of written bytes after which the kernel is asked to start writeback.
_STRETCH_BYTES = 16 * 2**20


class FolderTarget:
    """`Target` for checkpoints in a folder of a file system that all ranks share."""

    def __init__(self, root: Path):
        self._root = root
        self.setting = f"run.dir={root}"
        self.remedy = "Free some space or choose another run.dir, and run the command again"

    def step_folders(self) -> list[StepFolder]:
        return folders.step_folders(self._root)

    def lock(self, held: contextlib.ExitStack) -> None:
        held.enter_context(folders.writer_lock(self._root))

    def prepare(self, held: contextlib.ExitStack) -> None:
        if not self._root.exists():
            self._root.mkdir(parents=True)
            folders.sync_folder(self._root.parent)
        self.lock(held)
        folders.remove_debris(self._root)

    def clear_debris(self) -> None:
        if not self._root.is_dir():
            return
        # If another process is saving, or nothing can be written here, the next successful save clears it.
        with contextlib.suppress(CheckpointError, OSError), folders.writer_lock(self._root):
            folders.remove_debris(self._root)

    def free_bytes(self) -> int | None:
        existing = next(path for path in (self._root, *self._root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def begin(self, step: int) -> Location:
        return folders.new_temp_folder(self._root, step)

    def finalize(self, step: int, place: Location) -> Location:
        final = self._root / folders.folder_name(step)
        if (final / COMMIT_NAME).is_file():
            target = final.with_name(final.name + ".again")
        else:
            target = final
            if os.path.lexists(final):  # From a killed writer, or a dangling link: it was not a checkpoint.
                folders.move_to_trash(final)
        cast(Path, place).rename(target)
        return target

    def commit(self, place: Location, text: bytes) -> None:
        unnamed = cast(Path, place) / f".{COMMIT_NAME}"
        file = self.create(unnamed)
        try:
            file.write(text)
            file.finish()
        finally:
            file.close()
        os.rename(unnamed, cast(Path, place) / COMMIT_NAME)
        self.sync(place)

    def replace(self, again: Location, final: Location) -> Location:
        # Readers accept both names, so a complete checkpoint of this step always exists.
        if final.exists():
            folders.move_to_trash(cast(Path, final))
        cast(Path, again).rename(cast(Path, final))
        self.sync(self._root)
        return final

    def sync(self, place: Location) -> None:
        folders.sync_folder(cast(Path, place))

    def discard(self, place: Location) -> None:
        folders.discard(cast(Path, place))

    def remove(self, places: Collection[Location]) -> None:
        for place in places:
            folders.move_to_trash(cast(Path, place))
        folders.empty_trash(self._root)

    def set_aside(self, place: Location) -> Location:
        number = 1
        while (target := place.with_name(f"{place.name}.aside{'' if number == 1 else f'-{number}'}")).exists():
            number += 1
        cast(Path, place).rename(cast(Path, target))
        self.sync(self._root)
        return target

    def set_unfinished_aside(self, place: Location) -> Location | None:
        return self.set_aside(place)

    def reading(self, place: Location) -> Callable[[], None] | None:
        handle = folders.lock_for_reading(cast(Path, place))
        return None if handle is None else functools.partial(os.close, handle)

    def is_being_read(self, place: Location) -> bool:
        return folders.is_being_read(cast(Path, place))

    def create(self, file: Location) -> _NewFile:
        return _NewFile(cast(Path, file))

    def size(self, file: Location) -> int:
        status = os.lstat(cast(Path, file))
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file.name} is not a plain file")
        return status.st_size

    def open(self, file: Location) -> _OpenFile:
        return _OpenFile(cast(Path, file))

    def file_sizes(self, place: Location) -> dict[str, int]:
        with os.scandir(cast(Path, place)) as found:
            files = [file for file in found if file.is_symlink() or file.is_file(follow_symlinks=False)]
        return {file.name: file.stat(follow_symlinks=False).st_size for file in files}

    def take(self, files: Collection[Location]) -> Mapping[Location, bytes]:
        found = {file: cast(Path, file).read_bytes() for file in files}
        for file in found:
            cast(Path, file).unlink()
        return found


@functools.cache
def _start_writing() -> Callable[[int, int, int], object]:
    """Return a function (descriptor, start, size) that starts writeback of a file range without waiting.

    Writeback then overlaps with the digests, and the final fsync has little left to write. Only Linux has it; elsewhere
    the function does nothing.
    """
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return lambda handle, start, size: None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda handle, start, size: call(handle, start, size, _SYNC_FILE_RANGE_WRITE)


class _NewFile:
    """A new file. `finish` flushes it to disk."""

    def __init__(self, path: Path):
        self._file = path.open("xb")
        self._num_bytes = self._started = 0

    def write(self, data: bytes | memoryview) -> object:
        self._num_bytes += len(data)
        written = self._file.write(data)
        if self._num_bytes - self._started >= _STRETCH_BYTES:
            _start_writing()(self._file.fileno(), self._started, self._num_bytes - self._started)
            self._started = self._num_bytes
        return written

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _OpenFile:
    """A file that is read and not mapped, so a truncated file is an error and does not kill the process."""

    chunk_bytes = 4 * 2**20

    def __init__(self, path: Path):
        if path.parent.parent.name == "snapshots":  # the cache of Hugging Face, whose files are links
            path = resolved_inside(path.parent, path)
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._handle)
        self.num_bytes = status.st_size if stat.S_ISREG(status.st_mode) else -1

    def into(self, out: memoryview, offset: int) -> int:
        return os.preadv(self._handle, [out], offset)

    def close(self) -> None:
        os.close(self._handle)


def target_at(root: Location) -> Target:
    """Return the target for the checkpoints in `root`: a folder or an object store."""
    return StoreTarget(root) if isinstance(root, StorePath) else FolderTarget(root)
