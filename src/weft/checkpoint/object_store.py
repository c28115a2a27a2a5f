"""Checkpoints in object stores, on any file system of fsspec.

`StorePath` has the part of pathlib's API that reading needs. `StoreTarget` writes and deletes.

Examples are s3://bucket/prefix, gs://bucket/prefix, abfs://container/prefix, memory://name. Credentials are configured
outside Weft, as for each store's tools: by environment variables or by files in the home folder.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from weft.checkpoint import folders
from weft.checkpoint.folders import StepFolder
from weft.checkpoint.manifest import COMMIT_NAME
from weft.errors import CheckpointError, MissingExtra

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)")
#: Protocols that need a package in addition to fsspec: that package, and the Weft extra that installs it.
_EXTRAS = {
    "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"), "abfs": ("adlfs", "azure"), "abfss": ("adlfs", "azure"),
}  # fmt: skip
#: Seconds before the first retry of a failed request, and maximum number of retries.
_PAUSE_S, _RETRIES = 0.25, 3
#: Names of exception classes that are not retried. Names, because the stores' packages are imported only on use.
_FINAL = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError",
    "ClientAuthenticationError", "ParamValidationError", "InvalidBucketName",
}  # fmt: skip
_NO_ACCESS = "the store refused access: check the credentials of this machine, and what they may do there"


class StoreError(CheckpointError, OSError):
    """Raised if a store rejects a request or does not respond. Also an OSError, like disk errors.

    `strerror` is the reason, and `filename` the URL.
    """

    def __init__(self, code: int, reason: str, url: str):
        OSError.__init__(self, code, reason, url)

    def __str__(self) -> str:
        hint = "" if self.errno == errno.EACCES else " Check the URL and the network."
        return f"{self.filename}: {self.strerror}.{hint}"


class StoreStatus(NamedTuple):
    """Size in bytes, and modification time (s since 1970), which is 0.0 if the store does not report it."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True, slots=True, order=True)
class StorePath:
    """A URL in an object store.

    Attributes:
        url: URL without a slash at its end.
        system: fsspec file system, or None to find it from the URL.
    """

    url: str
    system: Any = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Part of the URL after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """Path one level up; for a bucket, the bucket itself."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith(":/") else replace(self, url=above)

    @property
    def bucket(self) -> StorePath:
        """Path of the bucket or container."""
        scheme, _, rest = self.url.partition("://")
        return StorePath(f"{scheme}://{rest.partition('/')[0]}")

    def __truediv__(self, name: str) -> StorePath:
        return replace(self, url=f"{self.url}/{name}")

    def with_name(self, name: str) -> StorePath:
        """Return the path with its last component replaced."""
        return self.parent / name

    def __str__(self) -> str:
        return self.url

    def is_dir(self) -> bool:
        """Return True if there are objects below this path."""
        return bool(ask(self, "isdir", self._key))

    def is_file(self) -> bool:
        """Return True if this path is an object."""
        return bool(ask(self, "isfile", self._key))

    def exists(self) -> bool:
        """Return True if this path is an object, or if there are objects below it."""
        return bool(ask(self, "exists", self._key))

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the paths directly below this path."""
        try:
            found = ask(self, "ls", self._key, detail=False)
        except FileNotFoundError:
            return
        names = {str(one).rstrip("/").rpartition("/")[2] for one in found if str(one).rstrip("/") != self._key}
        yield from (self / name for name in sorted(names))

    def stat(self) -> StoreStatus:
        """Return size and modification time from the store. Raises FileNotFoundError if there is no such object."""
        found = ask(self, "info", self._key)
        when = found.get("LastModified") or found.get("mtime") or found.get("updated") or found.get("created")
        stamp = when.timestamp() if hasattr(when, "timestamp") else float(when) if isinstance(when, int | float) else 0
        return StoreStatus(int(found.get("size") or 0), stamp)

    def lstat(self) -> StoreStatus:
        """Return `stat`, since stores have no links."""
        return self.stat()

    @property
    def _key(self) -> str:
        return key_of(self)


Location = Path | StorePath


def located(words: str | Path | StorePath) -> Location:
    """Return the location for a user's input: a URL of an object store, or a path. file:// is a path.

    Raises CheckpointError if a URL has no bucket, or contains a user, a password or a query, which would be printed and
    stored.
    """
    match = _SCHEME.fullmatch(words) if isinstance(words, str) else None
    if match is None:
        return words if isinstance(words, StorePath) else Path(words)
    scheme, rest = match.groups()
    if scheme in ("file", "local"):
        return Path(rest)
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        raise CheckpointError(
            f"{scheme}://...: a URL with a user, a password or a query would be printed and stored. Use "
            f"{scheme}://bucket/prefix, and leave credentials to the environment or to the store's own files."
        )
    if not rest.strip("/"):
        raise CheckpointError(f"{scheme}://: it names no bucket. Use {scheme}://bucket/prefix.")
    return StorePath(f"{scheme}://{re.sub('/+', '/', rest).strip('/')}")


def key_of(path: StorePath) -> str:
    """Return the name of the path in its fsspec file system."""
    return _opened(path)[1]


def file_system(path: StorePath) -> Any:
    """Return the fsspec file system of a URL, which is cached in the process.

    Raises MissingExtra if its package is not installed, and CheckpointError if fsspec does not have the protocol.
    """
    return _opened(path)[0]


def _opened(path: StorePath) -> tuple[Any, str]:
    if path.system is not None:
        return path.system, path.url.partition("://")[2]
    from fsspec.core import url_to_fs

    scheme = path.url.partition("://")[0]
    package, extra = _EXTRAS.get(scheme, (f"a file system of fsspec for {scheme}://", "s3"))
    try:
        return url_to_fs(path.url, use_listings_cache=False)  # other processes write there
    except ImportError as error:
        raise MissingExtra(package, extra, f"{scheme}://") from error
    except ValueError as error:
        known = "s3://, gs://, abfs:// or another protocol of fsspec"
        raise CheckpointError(f"{scheme}://: fsspec has no such protocol. Use {known}.") from error


def ask(path: StorePath, request: str, *args: Any, **options: Any) -> Any:
    act: Callable[..., Any] = getattr(file_system(path), request)
    return insisted(path, lambda: act(*args, **options))


def insisted(path: StorePath, act: Callable[[], Any], retries: int = _RETRIES) -> Any:
    """Return the result of `act`. Transient errors of a store are retried with exponential backoff.

    Raises FileNotFoundError if the object does not exist, and StoreError if access is denied; these are not retried.
    Raises StoreError also after the last retry.
    """
    for number in range(retries + 1):
        try:
            return act()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, _first_line(error), path.url) from error
        except PermissionError as error:
            raise StoreError(errno.EACCES, _NO_ACCESS, path.url) from error
        except MissingExtra:
            raise
        except Exception as error:
            if type(error).__name__ in _FINAL:
                raise StoreError(errno.EACCES, _NO_ACCESS, path.url) from error
            if isinstance(error, TypeError | NotImplementedError) or number == retries:
                raise StoreError(errno.EIO, _first_line(error), path.url) from error
            time.sleep(_PAUSE_S * 2**number)
    raise AssertionError


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0][:200]
    return text.rstrip(".") or type(error).__name__


# Checkpoints in an object store, which has no rename and no locks, and lists objects in pages.

_ASIDE = ".aside"
_PROBE = ".weft-can-write"
#: Bytes per part of an upload, and per request of a large read. Several parts are in flight.
_UPLOAD_PART, _READ_PART = 32 * 2**20, 8 * 2**20
#: Maximum bytes of one read, to limit the memory of the second copy.
_AT_ONCE = 4 * _READ_PART
#: Minimum bytes of a request. Smaller reads are usually sequential.
_READ_AHEAD = 4 * 2**20


class StoreTarget:
    """`Target` for checkpoints below a prefix of an object store. It has no locks."""

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

    def lock(self, held: contextlib.ExitStack) -> None:
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

    def finalize(self, step: int, place: Location) -> Location:
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
        with contextlib.suppress(OSError):  # leftovers have no COMMIT
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
    """A new object. It becomes visible when the upload is finished. fsspec retries failed parts."""

    def __init__(self, path: StorePath):
        self._path, self._is_finished = path, False
        self._file: Any = ask(path, "open", key_of(path), "wb", block_size=_UPLOAD_PART)

    def write(self, data: bytes | memoryview) -> object:
        return _with_store_errors(self._path, lambda: self._file.write(data))

    def finish(self) -> None:
        _with_store_errors(self._path, self._file.close)
        self._is_finished = True

    def close(self) -> None:
        if self._is_finished:
            return
        with contextlib.suppress(Exception):  # an aborted upload leaves no object
            self._file.discard()
        self._file.closed = True


def _with_store_errors(path: StorePath, act: Callable[[], object]) -> object:
    """Call `act` without retries, because a part must not be sent twice, and convert its errors to OSError."""
    return insisted(path, act, retries=0)


class _OpenObject:
    """Range reads of an object.

    Small reads are served from a read-ahead buffer. Large reads request several parts together.
    """

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
                self._path, lambda: self._system.cat_ranges([self._key] * len(ends), [*starts], ends, on_error="raise")
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
