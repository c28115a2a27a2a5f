"""Checkpoints in an object store, which has no rename, no locks, and lists what it likes in pages.

    every rank    uploads its own objects to <prefix>/step_00000120/, each of which appears when all of it is there
    first rank    manifest.json, and COMMIT last: an object that exists whole or not at all

A name is written once: where something lies under step_00000120, a killed upload or a checkpoint, the next save of that
step goes to step_00000120.again, then .again2 and so on; the last one that is whole counts. Deleting begins with
COMMIT.
step_00000120.aside, an empty object beside, takes a checkpoint out of the way.
Finding the newest checkpoint is one listing of the prefix and a request for each COMMIT, whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from weft.checkpoint import folders
from weft.checkpoint.folders import StepFolder
from weft.checkpoint.manifest import COMMIT_NAME
from weft.checkpoint.targets.store_path import Location, StorePath, ask, file_system, insisted, key_of

_ASIDE = ".aside"
_PROBE = ".weft-can-write"
#: Bytes of an upload's part, and of a request of a large read; several of them are under way at a time.
_UPLOAD_PART, _READ_PART = 32 * 2**20, 8 * 2**20
#: Most bytes of one read, so that what is in memory twice stays small.
_AT_ONCE = 4 * _READ_PART
#: Smaller reads ask for this much, since what comes next in the file is wanted next.
_READ_AHEAD = 4 * 2**20


class StoreTarget:
    """A prefix of an object store."""

    def __init__(self, root: StorePath):
        self._root = root
        self.setting = f"checkpoint.dir={root}" if root.system is None else "checkpoint.peer_every"
        self.remedy = (
            "Check that this machine may write there, or choose another checkpoint.dir, and run the command again"
        )

    def step_folders(self) -> list[StepFolder]:
        names = {path.name for path in self._root.iterdir()}
        found = (name for name in names if folders.step_in_name(name) is not None and f"{name}{_ASIDE}" not in names)
        return sorted(folders.step_folder(self._root / name) for name in found)

    def hold(self, held: contextlib.ExitStack) -> None:
        pass

    def prepare(self, held: contextlib.ExitStack) -> None:
        pass

    def clear_debris(self) -> None:
        pass

    def free_bytes(self) -> int | None:
        probe = self._root / _PROBE
        ask(probe, "pipe_file", key_of(probe), b"")
        with contextlib.suppress(OSError):
            ask(probe, "rm_file", key_of(probe))
        return None

    def begin(self, step: int) -> Location:
        names = (path.name.removesuffix(_ASIDE) for path in self._root.iterdir())
        taken = [folders.step_folder(self._root / name) for name in names if folders.step_in_name(name) == step]
        number = max((one.again for one in taken), default=-1) + 1
        again = f".again{number if number > 1 else ''}" if number else ""
        return self._root / f"{folders.folder_name(step)}{again}"

    def settle(self, step: int, place: Location) -> Location:
        return place

    def commit(self, place: Location, text: bytes) -> None:
        file = cast(StorePath, place) / COMMIT_NAME
        ask(file, "pipe_file", key_of(file), text)

    def replace(self, again: Location, final: Location) -> Location:
        new = folders.step_folder(again)
        self.remove([one.path for one in self.step_folders() if one.step == new.step and one.again < new.again])
        return again

    def sync(self, place: Location) -> None:
        pass

    def discard(self, place: Location) -> None:
        with contextlib.suppress(OSError):  # what stays has no COMMIT
            self.remove([place])

    def remove(self, places: Collection[Location]) -> None:
        for place in cast(Collection[StorePath], places):
            with contextlib.suppress(FileNotFoundError):
                ask(place, "rm_file", key_of(place / COMMIT_NAME))
            with contextlib.suppress(FileNotFoundError):
                ask(place, "rm", key_of(place), recursive=True)

    def set_aside(self, place: Location) -> Location:
        mark = place.with_name(place.name + _ASIDE)
        ask(cast(StorePath, mark), "pipe_file", key_of(cast(StorePath, mark)), b"")
        return mark

    def set_unfinished_aside(self, place: Location) -> Location | None:
        return None

    def reading(self, place: Location) -> Callable[[], None] | None:
        return None

    def is_being_read(self, place: Location) -> bool:
        return False

    def create(self, file: Location) -> _Upload:
        return _Upload(cast(StorePath, file))

    def size(self, file: Location) -> int:
        return file.stat().st_size

    def open(self, file: Location) -> _OpenObject:
        return _OpenObject(cast(StorePath, file))

    def file_sizes(self, place: Location) -> dict[str, int]:
        found = ask(cast(StorePath, place), "ls", key_of(cast(StorePath, place)), detail=True)
        return {one["name"].rpartition("/")[2]: int(one["size"] or 0) for one in found if one["type"] == "file"}

    def take(self, files: Collection[Location]) -> Mapping[Location, bytes]:
        if not files:
            return {}
        keys = {key_of(cast(StorePath, file)): file for file in files}
        some = cast(StorePath, next(iter(files)))
        found: Any = ask(some, "cat", [*keys])
        if isinstance(found, bytes):
            found = {next(iter(keys)): found}
        ask(some, "rm", [*keys])
        return {keys[key]: text for key, text in found.items()}


class _Upload:
    """An object that appears once it is finished. The store's file system sends a part again where that fails."""

    def __init__(self, path: StorePath):
        self._path, self._is_finished = path, False
        self._file: Any = ask(path, "open", key_of(path), "wb", block_size=_UPLOAD_PART)

    def write(self, data: bytes | memoryview) -> object:
        return _told(self._path, lambda: self._file.write(data))

    def finish(self) -> None:
        _told(self._path, self._file.close)
        self._is_finished = True

    def close(self) -> None:
        if self._is_finished:
            return
        with contextlib.suppress(Exception):  # an upload that is given up leaves nothing that counts
            self._file.discard()
        self._file.closed = True


def _told(path: StorePath, act: Callable[[], object]) -> object:
    """Once: a part must not be sent twice. Raises OSError in words."""
    return insisted(path, act, retries=0)


class _OpenObject:
    """Ranges of an object. What is small comes from a stretch that was read ahead; large ones come in parts at once."""

    chunk_bytes = 2 * _READ_PART

    def __init__(self, path: StorePath):
        self._path, self._key, self._system = path, key_of(path), file_system(path)
        self.num_bytes = path.stat().st_size
        self._ahead, self._ahead_at = b"", 0

    def into(self, out: memoryview, offset: int) -> int:
        size = max(0, min(len(out), self.num_bytes - offset, _AT_ONCE))
        if not size:
            return 0
        if size >= _READ_AHEAD:
            starts = range(offset, offset + size, _READ_PART)
            ends = [min(start + _READ_PART, offset + size) for start in starts]
            parts = insisted(
                self._path,
                lambda: self._system.cat_ranges([self._key] * len(ends), [*starts], ends, on_error="raise"),
            )
            for start, part in zip(starts, parts, strict=True):
                out[start - offset : start - offset + len(part)] = part
            return size
        if not self._ahead_at <= offset <= offset + size <= self._ahead_at + len(self._ahead):
            end = min(offset + _READ_AHEAD, self.num_bytes)
            self._ahead = insisted(self._path, lambda: self._system.cat_file(self._key, start=offset, end=end))
            self._ahead_at = offset
        data = self._ahead[offset - self._ahead_at :][:size]
        out[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._ahead = b""
