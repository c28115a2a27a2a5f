"""Pictures of records by index: a table of places, sizes and labels, made from headers once, kept in the cache."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.class_folder import MOST_BAD
from weft.data.media.encoded import Encoded
from weft.data.media.file_forms import RECORD_SUFFIXES, FoundRecord, RecordColumns, picture_at, records_in
from weft.data.media.pixels import picture_size
from weft.data.order import permutation
from weft.data.prepared import RowTable, RowWriter, ready_table
from weft.errors import DataError
from weft.units import format_count

_VERSION = 1
#: Reasons that are kept of what cannot be read.
_MOST_REASONS = 1000
_TOLD_EVERY = 512

Told = Callable[[int, int], None]


@dataclass(frozen=True)
class RecordPictures:
    """Pictures of records, in the order of their files.

    root: what the user named. folder: of the table. digest: of its content. classes: in order. labels: the number of
    its class for each label in the table. files: of records. held_out: share of all that is one part; is_held: whether
    this is that part.
    """

    root: str
    folder: str
    digest: str
    classes: tuple[str, ...]
    labels: tuple[int, ...]
    files: tuple[str, ...]
    columns: RecordColumns
    unreadable: tuple[str, ...] = ()
    held_out: float = 0.0
    is_held: bool = False
    _table: list[RowTable] = field(default_factory=list, repr=False, compare=False)

    @property
    def table(self) -> RowTable:
        """The places, mapped when they are first asked for."""
        if not self._table:
            self._table.append(RowTable(Path(self.folder)))
        return self._table[0]

    @cached_property
    def _chosen(self) -> NDArray[np.int64] | None:
        """Places of this part in the table; None: all."""
        if not self.held_out:
            return None
        total = len(self.table)
        held = permutation(total, "held out pictures").take(np.arange(max(1, round(self.held_out * total))))
        is_held = np.zeros(total, bool)
        is_held[held] = True
        return np.flatnonzero(is_held == self.is_held)

    def _row(self, index: int) -> dict[str, np.ndarray]:
        return self.table[index if self._chosen is None else int(self._chosen[index])]

    def __len__(self) -> int:
        return len(self.table) if self._chosen is None else len(self._chosen)

    def split(self, share: float) -> tuple[RecordPictures, RecordPictures]:
        """Return what is left to train on, and a share that is held out, the same one every time."""
        rest, held = (replace(self, held_out=share, is_held=is_held) for is_held in (False, True))
        return rest, replace(held, unreadable=())

    def format(self) -> str:
        """Return it as text that `parse` reads."""
        names = ("root", "folder", "digest", "classes", "labels", "files", "unreadable", "held_out", "is_held")
        columns = {"picture": self.columns.picture, "label": self.columns.label}
        return json.dumps({"records": 1, **{name: getattr(self, name) for name in names}, "columns": columns})

    @classmethod
    def parse(cls, text: str) -> RecordPictures:
        """Read what `format` wrote.

        Raises:
            DataError: for another text.
        """
        try:
            found = json.loads(text)
            values: dict[str, Any] = {name: found[name] for name in ("root", "folder", "digest", "held_out", "is_held")}
            values |= {name: tuple(found[name]) for name in ("classes", "labels", "files", "unreadable")}
            return cls(**values, columns=RecordColumns(**found["columns"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"pictures.json: it is damaged ({error}). Delete it to have the pictures found again."
            ) from error

    def label(self, index: int) -> int:
        """Return the number of a picture's class."""
        return self.labels[int(self._row(index)["place"][6])]

    def size(self, index: int) -> tuple[int, int]:
        """Return a picture's width and height."""
        place = self._row(index)["place"]
        return int(place[4]), int(place[5])

    def encoded(self, index: int) -> Encoded:
        """Return where a picture lies."""
        row = self._row(index)
        kind, file, offset, length = map(int, row["place"][:4])
        name = row["name"].tobytes().decode()
        return picture_at(Path(self.files[file]), name, kind, offset, length, self.columns)

    def file(self, index: int) -> str:
        """Say where a picture is found."""
        row = self._row(index)
        return f"{self.files[int(row['place'][1])]}, {row['name'].tobytes().decode()}"


def record_files(path: str) -> list[Path]:
    """Return the files of records that a path names: one, those of a folder, or those of a glob; sorted.

    Raises:
        DataError: for an archive that is compressed as a whole.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        found = [place / name for name in os.listdir(place)]
    elif place.is_file():
        found = [place]
    else:
        found = [Path(name) for name in glob.glob(str(place), recursive=True)]
    packed = [file for file in found if file.name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"))]
    if packed:
        raise DataError(
            f"data={path}: {packed[0].name} is compressed as a whole, so that no picture in it can be read alone. "
            "Unpack it to a .tar; pictures hardly shrink."
        )
    return sorted(file for file in found if file.suffix in RECORD_SUFFIXES and file.is_file())


def find_records(
    path: str, files: Sequence[Path], columns: RecordColumns, cache: Path, told: Told | None
) -> RecordPictures:
    """Find the pictures of records, and leave out those whose header cannot be read.

    Args:
        path: what the user named.
        files: of records.
        columns: where picture and label are.
        cache: folder that keeps the table.
        told: of (bytes read, all of them).

    Raises:
        DataError: where a file is damaged, there is one class alone, or more than 1 % of the pictures cannot be read.
    """
    stats = [(str(file.absolute()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    key: list[Any] = ["pictures", _VERSION, stats, columns.picture, columns.label]
    writer = _Survey(path, files, columns, told)
    table = ready_table(cache, key, writer.write, None)
    if (now := [_stat(file) for file, _ in table.notes["missing"]]) != [was for _, was in table.notes["missing"]]:
        table = ready_table(cache, [*key, now], writer.write, None)
    seen: list[int | str] = table.notes["labels"]
    classes = _in_order(seen)
    if len(classes) < 2:
        raise DataError(f"data={path}: its records have {len(classes)} class. Give records of 2 or more.")
    numbers = {name: number for number, name in enumerate(classes)}
    return RecordPictures(
        path, str(table.folder), table.digest, classes, tuple(numbers[str(label)] for label in seen),
        tuple(str(file.absolute()) for file in files), columns, tuple(table.notes["reasons"]), _table=[table],
    )  # fmt: skip


def with_classes(pictures: RecordPictures, classes: Sequence[str], option: str) -> RecordPictures:
    """Return the pictures numbered by the classes of others.

    Args:
        pictures: to number.
        classes: by name.
        option: that named the pictures.

    Raises:
        DataError: where a picture is of none of them.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for name in pictures.classes:
        if name not in numbers:
            raise DataError(f"{option}={pictures.root}: class {name!r} is not among those of the training data.")
    labels = tuple(numbers[pictures.classes[label]] for label in pictures.labels)
    return replace(pictures, classes=tuple(classes), labels=labels)


def _in_order(labels: Sequence[int | str]) -> tuple[str, ...]:
    """Classes by number where all labels are numbers, else by name."""
    if all(isinstance(label, int) for label in labels):
        return tuple(str(label) for label in sorted(labels, key=int))
    return tuple(sorted({str(label) for label in labels}))


class _Survey:
    """Looks at every record once, and writes a row for each that can be used."""

    def __init__(self, path: str, files: Sequence[Path], columns: RecordColumns, told: Told | None):
        self._path, self._files, self._columns, self._told = path, files, columns, told

    def write(self, writer: RowWriter) -> dict[str, Any]:
        """Write the rows, and return what the reader needs beside them."""
        labels: dict[int | str, int] = {}
        reasons: list[str] = []
        missing: list[tuple[str, list[int]]] = []
        num_bad = done = count = 0
        total = sum(file.stat().st_size for file in self._files)
        for number, file in enumerate(self._files):
            for record in records_in(file, self._columns):
                count += 1
                size = (0, 0)
                reason = f"{record.name}: {record.reason}" if record.reason else ""
                if record.encoded is not None and not reason:
                    try:
                        size = picture_size(record.encoded)
                    except DataError as error:
                        reason = str(error)
                if reason:
                    num_bad += 1
                    reasons += [reason] if len(reasons) < _MOST_REASONS else []
                    if record.path and len(missing) < _MOST_REASONS:
                        missing.append((record.path, _stat(record.path)))
                    continue
                self._add(writer, number, record, size, labels.setdefault(record.label, len(labels)))
                if self._told is not None and not count % _TOLD_EVERY:
                    self._told(done + max(0, record.offset), total)
            done += file.stat().st_size
        if not count:
            raise DataError(f"data={self._path}: its files hold no records. Give files with pictures in them.")
        if num_bad > MOST_BAD * count:
            raise DataError(
                f"data={self._path}: {num_bad} of {format_count(count)} pictures cannot be used, more than "
                f"{MOST_BAD:.0%}. The first: {'; '.join(reasons[:3])}"
            )
        return {"labels": list(labels), "reasons": reasons, "num_bad": num_bad, "missing": missing}

    @staticmethod
    def _add(writer: RowWriter, number: int, record: FoundRecord, size: tuple[int, int], label: int) -> None:
        place = np.array([record.kind, number, record.offset, record.length, *size, label], np.int64)
        writer.add({"place": place, "name": np.frombuffer(record.name.encode(), np.uint8)})


def _stat(path: str) -> list[int]:
    try:
        found = os.stat(path)
    except OSError:
        return [-1, -1]
    return [found.st_size, found.st_mtime_ns]
