"""Tables whose rows have named arrays of any length. They are written once and then memory-mapped.

A folder has `table.json` (columns, counts, digests, notes of the writer), and for each column a file of the
concatenated values and a file of the rows' starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.store.prepared import key_of
from weft.data.token_files import new_folder
from weft.errors import DataError
from weft.files import locked

_ABOUT = "table.json"
_READ_BYTES = 2**20

Row = Mapping[str, np.ndarray]


class RowWriter:
    """Writes the rows of a table in order, in bounded memory. The first row defines the columns."""

    def __init__(self, folder: Path):
        self.num_rows = 0
        self._folder = folder
        self._exits = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._starts: dict[str, array[int]] = {}

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def add(self, row: Row) -> None:
        """Append a row. All rows must have the columns of the first row. Values are converted to its dtypes."""
        for name, values in row.items():
            if name not in self._files:
                self._files[name] = self._exits.enter_context((self._folder / f"{name}.values").open("wb"))
                self._dtypes[name], self._starts[name] = values.dtype, array("q", [0])
            self._files[name].write(np.ascontiguousarray(values, self._dtypes[name]).tobytes())
            self._starts[name].append(self._starts[name][-1] + len(values))
        self.num_rows += 1

    def finish(self, notes: Mapping[str, Any]) -> None:
        """Write the table's description. notes: JSON values for the reader."""
        self._exits.close()
        columns: dict[str, Any] = {}
        for name, starts in self._starts.items():
            np.save(self._folder / f"{name}.starts.npy", np.frombuffer(starts, np.int64))
            digests = [_digest(self._folder / f"{name}.{part}") for part in ("values", "starts.npy")]
            columns[name] = {"dtype": str(self._dtypes[name]), "digests": digests}
        about = {"num_rows": self.num_rows, "columns": columns, "notes": dict(notes)}
        (self._folder / _ABOUT).write_text(json.dumps(about, indent=1) + "\n", "utf-8")


class RowTable(Sequence[dict[str, np.ndarray]]):
    """The rows of a folder by index, memory-mapped.

    Raises:
        DataError: if the folder has no readable table.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            about = json.loads((folder / _ABOUT).read_text("utf-8"))
            self._num_rows, columns, self.notes = about["num_rows"], about["columns"], about["notes"]
            self._digests = {name: each["digests"] for name, each in columns.items()}
            self._starts = {name: np.load(folder / f"{name}.starts.npy", mmap_mode="r") for name in columns}
            self._values = {
                name: _mapped(folder / f"{name}.values", np.dtype(each["dtype"]), int(self._starts[name][-1]))
                for name, each in columns.items()
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{folder}: no table of rows can be read there ({error}). Repeat the weft train command, which "
                "prepares the data again."
            ) from error

    @property
    def digest(self) -> str:
        """Digest of the content of all rows."""
        return key_of(self._num_rows, self._digests)

    def problems(self) -> list[str]:
        """Read every file of values and starts, compare its digest, and return a message for each damaged file."""
        return [
            f"{name}.{part} does not match its digest"
            for name, digests in self._digests.items()
            for part, digest in zip(("values", "starts.npy"), digests, strict=True)
            if _digest(self.folder / f"{name}.{part}") != digest
        ]

    def total(self, name: str) -> int:
        """Return the sum of all values of an integer column, or 0 if there is no such column."""
        return int(self._values[name].sum(dtype=np.int64)) if name in self._values else 0

    def lengths(self, name: str) -> np.ndarray:
        """Return the number of values of each row in a column, int64 (rows,)."""
        return np.diff(self._starts[name])

    def starts(self, name: str) -> np.ndarray:
        """Return the index of each row's first value in `column`, int64 (rows,)."""
        return self._starts[name][:-1]

    def column(self, name: str) -> np.ndarray:
        """Return the concatenated values of all rows in a column."""
        return self._values[name]

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        return {
            name: self._values[name][starts[index] : starts[index + 1]] for name, starts in self._starts.items()
        }  # fmt: skip


def ready_table(
    cache: Path, key: Sequence[Any], write: Callable[[RowWriter], Mapping[str, Any]], waiting: Callable[[], None] | None
) -> RowTable:
    """Return a table of the cache. It is written first if it is missing or damaged.

    Args:
        cache: folder of prepared data.
        key: JSON values that determine the content.
        write: adds the rows and returns the notes.
        waiting: called once if another process is writing the table.

    Raises:
        DataError: if `write` raises it, or the cache cannot be used.
    """
    folder = cache / f"rows-{key_of(*key)}"
    try:
        with locked(cache / "locks" / f"{folder.name}.lock", waiting):
            if folder.is_dir():
                with contextlib.suppress(DataError):
                    table = RowTable(folder)
                    if not table.problems():
                        return table
                shutil.rmtree(folder)
            with new_folder(folder) as draft, RowWriter(draft) as writer:
                writer.finish(write(writer))
            return RowTable(folder)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cache}: cannot be used ({error.strerror or error}). "
            "Give a folder with room that you may write to, or set WEFT_HOME."
        ) from error


def _mapped(file: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    if file.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes, not {count * dtype.itemsize}")
    return np.memmap(file, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _digest(file: Path) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for block in _blocks(file):
        hasher.update(block)
    return hasher.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            yield block
