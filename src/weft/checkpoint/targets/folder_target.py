"""Checkpoints in a folder: hidden until they are complete, then renamed; what is deleted is renamed first."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import cast

from weft.checkpoint import folders
from weft.checkpoint.folders import StepFolder
from weft.checkpoint.manifest import COMMIT_NAME
from weft.checkpoint.targets.store_path import Location
from weft.errors import CheckpointError

_SYNC_FILE_RANGE_WRITE = 2
#: The disk is told to begin with so many bytes at a time.
_STRETCH_BYTES = 16 * 2**20


class FolderTarget:
    """A folder of a file system that all ranks share."""

    def __init__(self, root: Path):
        self._root = root
        self.setting = f"run.dir={root}"
        self.remedy = "Free some space or choose another run.dir, and run the command again"

    def step_folders(self) -> list[StepFolder]:
        return folders.step_folders(self._root)

    def hold(self, held: contextlib.ExitStack) -> None:
        held.enter_context(folders.writer_lock(self._root))

    def prepare(self, held: contextlib.ExitStack) -> None:
        if not self._root.exists():
            self._root.mkdir(parents=True)
            folders.sync_folder(self._root.parent)
        self.hold(held)
        folders.remove_debris(self._root)

    def clear_debris(self) -> None:
        if not self._root.is_dir():
            return
        # Another process is saving, or nothing can be written here: the next save that can will clear it.
        with contextlib.suppress(CheckpointError, OSError), folders.writer_lock(self._root):
            folders.remove_debris(self._root)

    def free_bytes(self) -> int | None:
        existing = next(path for path in (self._root, *self._root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def begin(self, step: int) -> Location:
        return folders.new_temp_folder(self._root, step)

    def settle(self, step: int, place: Location) -> Location:
        final = self._root / folders.folder_name(step)
        if (final / COMMIT_NAME).is_file():
            target = final.with_name(final.name + ".again")
        else:
            target = final
            if os.path.lexists(final):  # Left by a killed writer, or a link to nowhere: it never counted.
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
        # Readers know both names, so there is no moment without a complete checkpoint of this step.
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
        handle = folders.hold_for_reading(cast(Path, place))
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
    """Ask the kernel to begin with the disk's part of a stretch of a file (descriptor, from, bytes), without waiting.

    The disk then works beside the digests, and little is left to the fsync at the end. Linux alone has it.
    """
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return lambda handle, start, size: None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda handle, start, size: call(handle, start, size, _SYNC_FILE_RANGE_WRITE)


class _NewFile:
    """A file that is on the disk itself once it is finished."""

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
    """Read, not mapped: a file that is cut off is then an error, and not the end of the process."""

    chunk_bytes = 4 * 2**20

    def __init__(self, path: Path):
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._handle)
        self.num_bytes = status.st_size if stat.S_ISREG(status.st_mode) else -1

    def into(self, out: memoryview, offset: int) -> int:
        return os.preadv(self._handle, [out], offset)

    def close(self) -> None:
        os.close(self._handle)
