"""Media of records by index. A table of locations, sizes and labels is built once from headers, and cached."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.data.media.audio import sound_size
from weft.data.media.class_folder import MOST_BAD
from weft.data.media.files import (
    RECORD_SUFFIXES,
    FoundRecord,
    RecordColumns,
    media_at,
    name_bytes,
    name_text,
    printable,
    records_in,
)
from weft.data.media.images import Encoded, picture_size
from weft.data.media.records import KINDS, PICTURE, MediaKind, class_files
from weft.data.order.stream import permutation
from weft.data.store.row_table import RowTable, RowWriter, ready_table
from weft.errors import DataError
from weft.units import format_count

_VERSION = 2
#: Maximum number of stored reasons for unreadable records.
_MOST_REASONS = 1000
_TOLD_EVERY = 512

Told = Callable[[int, int], None]


@dataclass(frozen=True)
class MediaRecords:
    """Images or audio clips of records, in the order of their files.

    Attributes:
        root: the path or pattern that the user gave.
        folder: folder of the table.
        digest: digest of the table's content.
        classes: class names in order, or empty if the targets are texts.
        labels: class number of each label index of the table.
        files: the files of records.
        columns: columns of media and labels.
        unreadable: records that were skipped, with the reason.
        held_out: held-out share, or 0 for no split.
        is_held: whether this is the held-out part of the split.
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
        """The table, which is memory-mapped on first access."""
        if not self._table:
            self._table.append(RowTable(Path(self.folder)))
        return self._table[0]

    @cached_property
    def _chosen(self) -> NDArray[np.int64] | None:
        if not self.held_out:
            return None
        total = len(self.table)
        order = permutation(total, f"held out {self.columns.kind.many}")
        held = order.take(np.arange(max(1, round(self.held_out * total))))
        is_held = np.zeros(total, bool)
        is_held[held] = True
        return np.flatnonzero(is_held == self.is_held)

    def _row(self, index: int) -> dict[str, np.ndarray]:
        return self.table[index if self._chosen is None else int(self._chosen[index])]

    def __len__(self) -> int:
        return len(self.table) if self._chosen is None else len(self._chosen)

    def split(self, share: float) -> tuple[MediaRecords, MediaRecords]:
        """Return a training part, and a held-out part with `share` of the samples, but at least one.

        The split depends only on the number of samples and on `share`.
        """
        rest, held = (replace(self, held_out=share, is_held=is_held) for is_held in (False, True))
        return rest, replace(held, unreadable=())

    def format(self) -> str:
        """Return the text that `parse` reads."""
        names = ("root", "folder", "digest", "classes", "labels", "files", "unreadable", "held_out", "is_held")
        asked = self.columns
        columns = {"media": asked.media, "label": asked.label, "kind": asked.kind.one, "is_text": asked.is_text}
        return json.dumps({"records": 1, **{name: getattr(self, name) for name in names}, "columns": columns})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `format`.

        Raises:
            DataError: if the text is not valid.
        """
        try:
            found = json.loads(text)
            values: dict[str, Any] = {name: found[name] for name in ("root", "folder", "digest", "held_out", "is_held")}
            values |= {name: tuple(found[name]) for name in ("classes", "labels", "files", "unreadable")}
            asked = dict(found["columns"])
            return cls(**values, columns=RecordColumns(**{**asked, "kind": KINDS[asked["kind"]]}))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the run's list of media: it is damaged ({error}). Delete it to have the files found again."
            ) from error

    def label(self, index: int) -> int:
        """Return the class number of a sample."""
        return self.labels[int(self._row(index)["place"][-1])]

    def text(self, index: int) -> str:
        """Return the text of a sample, if the targets are texts."""
        return self._row(index)["text"].tobytes().decode()

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Return the tokens of a sample's text."""
        return self._row(index)["tokens"]

    def token_counts(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, int64 (samples,). Markers of images and audio clips count."""
        return self._lengths("tokens")

    def _lengths(self, column: str) -> NDArray[np.int64]:
        found = self.table.lengths(column)
        return found if self._chosen is None else found[self._chosen]

    def size(self, index: int) -> tuple[int, ...]:
        """Return the width and height of an image, or frames, frames per second and channels of an audio clip."""
        return tuple(map(int, self._row(index)["place"][4:-1]))

    def sizes_of_all(self) -> NDArray[np.int64]:
        """Return the sizes of all samples, as `size` returns them: int64 (samples, numbers)."""
        found = self.table.column("place").reshape(len(self.table), -1)[:, 4:-1]
        return np.asarray(found if self._chosen is None else found[self._chosen], np.int64)

    def encoded(self, index: int) -> Encoded:
        """Return an encoded image or audio clip."""
        row = self._row(index)
        kind, file, offset, length = map(int, row["place"][:4])
        name = name_text(row["name"])
        return media_at(Path(self.files[file]), name, kind, offset, length, self.columns)

    def file(self, index: int) -> str:
        """Return the location of a sample, for messages."""
        row = self._row(index)
        return f"{self.files[int(row['place'][1])]}, {printable(name_text(row['name']))}"


def record_files(path: str, kind: MediaKind = PICTURE) -> list[Path]:
    """Return the sorted files of records of a path: one file, the files of a folder, or the files of a glob.

    Files without a suffix of `RECORD_SUFFIXES` are left out, so the result may be empty. So are a folder's .json files.

    path: path or pattern that the user gave. kind: kind of their media.

    Raises:
        DataError: if a file is a compressed archive.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        found = [place / name for name in os.listdir(place) if not name.endswith(".json")]
    elif place.is_file():
        found = [place]
    else:
        found = [Path(name) for name in glob.glob(str(place), recursive=True)]
    packed = [file for file in found if file.name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"))]
    if packed:
        raise DataError(
            f"data={path}: {packed[0].name} is compressed, so that no {kind.one} in it can be read alone. Unpack it "
            f"to a .tar; {kind.many} hardly shrink."
        )
    return sorted(file for file in found if file.suffix in RECORD_SUFFIXES and file.is_file())


@dataclass(frozen=True, slots=True)
class Survey:
    """Checks of each record in addition to the check of its media's header.

    Attributes:
        key: JSON values that determine the results.
        refuse: function from a record's size (`MediaRecords.size`) to the reason to skip it, or "".
        tokens: function from a record's text to its tokens, or to the reason to skip it. None if the targets are
            classes.
    """

    key: tuple[Any, ...] = ()
    refuse: Callable[[tuple[int, ...]], str] | None = None
    tokens: Callable[[str], Sequence[int] | str] | None = None


def find_records(
    path: str,
    files: Sequence[Path],
    columns: RecordColumns,
    cache: Path,
    told: Told | None,
    survey: Survey | None = None,
) -> MediaRecords:
    """Find the media of records, and return them as samples. Unusable records are skipped.

    Args:
        path: path or pattern that the user gave.
        files: files of records, or one folder of classes.
        columns: columns of media and labels.
        cache: folder that stores the table.
        told: called with (bytes or files read, total).
        survey: additional checks of each record.

    Raises:
        DataError: if a file is damaged, labels have fewer than two classes, or more than 1 % of the records cannot be
            used.
    """
    asked = [columns.kind.one, columns.is_text, columns.media, columns.label]
    key = ["media", _VERSION, asked, list(survey.key) if survey is not None else []]

    def write(writer: RowWriter) -> dict[str, Any]:
        rows = _Rows(columns, survey or Survey())
        notes = add_rows(writer, path, files, columns.kind, told, lambda file: records_in(file, columns), rows.row)
        return {**rows.notes(), **notes}

    table = records_table(cache, key, files, columns.kind, write)
    seen: list[int | str] = table.notes["labels"]
    classes: tuple[str, ...] = ()
    if not columns.is_text:
        is_numbered = all(isinstance(label, int) for label in seen)
        classes = tuple(map(str, sorted(seen, key=int))) if is_numbered else tuple(sorted({*map(str, seen)}))
    if len(classes) < 2 and not columns.is_text:
        raise DataError(f"data={path}: its records have {len(classes)} class. Give records of 2 or more.")
    numbers = {name: number for number, name in enumerate(classes)}
    return MediaRecords(
        path, str(table.folder), table.digest, classes, tuple(numbers[str(label)] for label in seen),
        tuple(str(file.absolute()) for file in files), columns, tuple(table.notes["reasons"]), _table=[table],
    )  # fmt: skip


def records_table(
    cache: Path, key: list[Any], files: Sequence[Path], kind: MediaKind, write: Callable[[RowWriter], dict[str, Any]]
) -> RowTable:
    """Return the cached table of files. It is rewritten if a file has changed or a missing file has appeared.

    Args:
        cache: folder that stores the table.
        key: other values that determine the rows.
        files: files of records.
        kind: kind of their media.
        write: adds the rows and returns the table's notes. Their "missing" has (path, result of `file_state`) of
            missing files.

    Raises:
        DataError: if `write` raises it, or the cache cannot be used.
    """
    key = [*key, [_file_stat(file, kind) for file in files]]
    table = ready_table(cache, key, write, None)
    now = [file_state(file) for file, _ in table.notes["missing"]]
    if now != [was for _, was in table.notes["missing"]]:
        table = ready_table(cache, [*key, now], write, None)
    return table


def refuse_unusable(
    path: str, kind: MediaKind, count: int, num_bad: int, reasons: Sequence[str], most_bad: float = MOST_BAD
) -> None:
    """Raise DataError for data without records, or with too many unusable records.

    Args:
        path: path or pattern that the user gave.
        kind: kind of the media.
        count: number of records.
        num_bad: number of unusable records.
        reasons: reasons for the first unusable records.
        most_bad: maximum share of unusable records.

    Raises:
        DataError: for such data.
    """
    if not count:
        raise DataError(f"data={path}: its files hold no records. Give files with {kind.many} in them.")
    if num_bad > most_bad * count:
        raise DataError(
            f"data={path}: {num_bad} of {format_count(count)} {kind.many} cannot be used, more than {most_bad:.0%}. "
            f"The first: {'; '.join(reasons[:3])}"
        )


def _file_stat(file: Path, kind: MediaKind) -> tuple[Any, ...]:
    """Return values that change when a file, or a file in a folder of classes, changes."""
    if file.is_file():
        return str(file.absolute()), (stat := file.stat()).st_size, stat.st_mtime_ns
    hasher = hashlib.blake2b(digest_size=16)
    for name, _ in class_files(file, kind):
        hasher.update(json.dumps([name, *file_state(str(file / name))]).encode())
    return str(file.absolute()), hasher.hexdigest()


def with_classes(records: MediaRecords, classes: Sequence[str], option: str) -> MediaRecords:
    """Return the samples with class numbers according to the class names `classes` of other data.

    Args:
        records: the samples to number.
        classes: class names in order.
        option: config option of the records, for messages.

    Raises:
        DataError: if a sample has a class that is not in `classes`.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for name in records.classes:
        if name not in numbers:
            raise DataError(f"{option}={records.root}: class {name!r} is not among those of the training data.")
    labels = tuple(numbers[records.classes[label]] for label in records.labels)
    return replace(records, classes=tuple(classes), labels=labels)


#: Function from (file index, record) to the table's row, or to None and the reason why the record is unusable.
RowOf = Callable[[int, Any], tuple[dict[str, Any] | None, str]]


def add_rows(
    writer: RowWriter,
    path: str,
    files: Sequence[Path],
    kind: MediaKind,
    told: Told | None,
    records: Callable[[Path], Iterable[Any]],
    row_of: RowOf,
    most_bad: float = MOST_BAD,
) -> dict[str, Any]:
    """Read every record once, add a row for each usable one, and return the table's notes.

    Args:
        writer: writer of the table.
        path: path or pattern that the user gave.
        files: files of records, or one folder of classes.
        kind: kind of the media.
        told: called with (bytes or files read, total).
        records: returns the records of a file. They have an `offset`, and a `path` if their media is a separate file.
        row_of: converts a record to a row.
        most_bad: maximum share of unusable records.

    Raises:
        DataError: as in `refuse_unusable`.
    """
    reasons: list[str] = []
    missing: list[tuple[str, list[int]]] = []
    num_bad = done = count = 0
    sizes = [len(class_files(file, kind)) if file.is_dir() else file.stat().st_size for file in files]
    for number, file in enumerate(files):
        for record in records(file):
            count += 1
            row, reason = row_of(number, record)
            if row is not None:
                writer.add(row)
            else:
                num_bad += 1
                reasons += [printable(reason)] if len(reasons) < _MOST_REASONS else []
                if record.path and len(missing) < _MOST_REASONS:
                    missing.append((record.path, file_state(record.path)))
            if told is not None and not count % _TOLD_EVERY:
                told(done + max(0, record.offset), sum(sizes))
        done += sizes[number]
    refuse_unusable(path, kind, count, num_bad, reasons, most_bad)
    return {"reasons": reasons, "num_bad": num_bad, "missing": missing}


class _Rows:
    """Converts records with classes or texts to rows, and collects their labels."""

    def __init__(self, columns: RecordColumns, survey: Survey):
        self._survey, self._size = survey, picture_size if columns.kind is PICTURE else sound_size
        self._labels: dict[int | str, int] = {}

    def notes(self) -> dict[str, Any]:
        return {"labels": list(self._labels)}

    def row(self, file: int, record: FoundRecord) -> tuple[dict[str, Any] | None, str]:
        if record.encoded is None or record.reason:
            return None, f"{record.name}: {record.reason}"
        try:
            size = self._size(record.encoded)
        except DataError as error:
            return None, str(error)
        more: dict[str, Any] = {}
        reason, label = self._survey.refuse(size) if self._survey.refuse is not None else "", 0
        if not reason and self._survey.tokens is not None:
            tokens = self._survey.tokens(str(record.label))
            reason = tokens if isinstance(tokens, str) else ""
            more = {"text": np.frombuffer(str(record.label).encode(), np.uint8), "tokens": np.array(tokens, np.int32)} \
                if not reason else {}  # fmt: skip
        elif not reason:
            label = self._labels.setdefault(record.label, len(self._labels))
        if reason:
            return None, f"{record.encoded.name}: {reason}"
        place = np.array([record.kind, file, record.offset, record.length, *size, label], np.int64)
        return {"place": place, "name": name_bytes(record.name), **more}, ""


def file_state(path: str) -> list[int]:
    """Return values that change when a file changes, or [-1, -1] if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return [-1, -1]
    return [found.st_size, found.st_mtime_ns]
