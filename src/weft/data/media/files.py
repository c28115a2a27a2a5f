"""Records with an image or audio clip and a label or text, in `.tar` shards, jsonl, parquet and folders of classes.

Records give the location of their media, which is not decoded.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import os
import re
import struct
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.media.images import Encoded
from weft.data.media.records import PICTURE, MediaKind, class_files
from weft.data.text.records import is_valid_text
from weft.errors import DataError, WeftError
from weft.files import open_regular

#: File suffixes of record files.
RECORD_SUFFIXES = (".tar", ".jsonl", ".ndjson", ".parquet", ".json")
#: How media are stored: byte range of the file, separate file, base64 in a JSON line, table row, file in a class
#: folder.
STRETCH, FILE, LINE, ROW, BELOW = range(5)

_LABELS = ("label", "cls", "class", "category", "label_name", "class_name")
_TEXTS = ("text", "transcription", "transcript", "sentence", "txt", "normalized_text", "caption")
_MOST_LABEL_BYTES = 2**16
#: Maximum size of a line of JSON. Longer lines are skipped. An image in base64 is far smaller.
_MOST_LINE_BYTES = 256 * 2**20
_READ_BYTES = 2**20
_COMMA = re.compile(r"\s*,\s*")
#: Number of row groups of parquet files that a process caches.
_GROUPS = 4
#: Exceptions raised when a damaged row of a parquet file is converted to Python values.
_BAD_ROW = (ValueError, OverflowError, TypeError, KeyError, ImportError)


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Names of the columns (in a tar: suffixes) of media and targets. "" selects the usual names.

    Attributes:
        media: column of the media.
        label: column of the class or text.
        kind: kind of the media.
        is_text: whether the target is a text, not a class.
    """

    media: str = ""
    label: str = ""
    kind: MediaKind = PICTURE
    is_text: bool = False

    @property
    def learnt(self) -> str:
        """Kind of target, "text" or "label". The config option for its column has the same name."""
        return "text" if self.is_text else "label"

    def media_column(self, record: Mapping[str, Any], path: Path) -> str:
        """Return the column of the media.

        Raises:
            DataError: if the record has no such column.
        """
        return _column(record, self.media, self.kind.columns, (self.kind.one, self.kind.option), path)

    def label_column(self, record: Mapping[str, Any], path: Path) -> str:
        """Return the column of the target.

        Raises:
            DataError: if the record has no such column.
        """
        return _column(record, self.label, _TEXTS if self.is_text else _LABELS, (self.learnt, self.learnt), path)

    def label_of(self, value: Any) -> int | str | None:
        """Return a class number, a class name or a text, or None for any other value."""
        if isinstance(value, str) and not is_valid_text(value):
            return None
        if self.is_text:
            return value.strip() or None if isinstance(value, str) else None
        return class_label(value)


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record found in a source file, with the location of its image or audio clip.

    Attributes:
        name: name for messages.
        kind: how the media is stored: STRETCH (byte range of the file), FILE (separate file), LINE (base64 in a line of
            JSON), ROW (table row) or BELOW (file in a class folder).
        offset: byte offset in the file, or row index.
        length: number of bytes of the media, or of the line of JSON that contains it. -1 for a file or a table row.
        path: path of a separate file.
        encoded: the encoded media.
        label: a class number, a class name or a text.
        reason: why the record cannot be used, or "".
    """

    name: str
    kind: int = STRETCH
    offset: int = 0
    length: int = -1
    path: str = ""
    encoded: Encoded | None = None
    label: int | str = ""
    reason: str = ""


def records_in(path: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    """Yield the records of a file, in order.

    Args:
        path: a file of records, whose suffix gives the format, or a folder of classes.
        columns: columns of media and labels.

    Raises:
        DataError: if the file is damaged or truncated, or its first record lacks the columns.
    """
    try:
        if path.is_dir():
            yield from _folder_records(path, columns)
        elif path.suffix == ".tar":
            for tar, stem, sample in tar_samples(path):
                yield _tar_record(path, tar, stem, sample, columns)
        elif path.suffix == ".parquet":
            yield from _parquet_records(path, columns)
        else:
            yield from _line_records(path, columns)
    except OSError as error:
        raise DataError(
            f"{path}: it cannot be read ({error.strerror or error}). Repair it, or leave it out."
        ) from error


def media_at(path: Path, name: str, kind: int, offset: int, length: int, columns: RecordColumns) -> Encoded:
    """Return the encoded media of a record from its location.

    Args:
        path: the file of records.
        name: name of the record.
        kind: how the media is stored, as in `FoundRecord`.
        offset: byte offset in the file, or row index.
        length: number of bytes, as in `FoundRecord`.
        columns: columns of media and labels.

    Raises:
        DataError: if the record no longer contains the media, or its path leaves the folder. A separate file is not
            read here.
    """
    if kind in (FILE, BELOW):
        return Encoded(name, str(inside(path if kind == BELOW else path.parent, name)))
    if kind == STRETCH:
        return Encoded(f"{path}, {name}", str(path), offset, length)
    if kind == LINE:
        record = line_object(Encoded(name, str(path), offset, length).read_all())
        held = None if record is None else embedded_bytes(record[columns.media_column(record, path)])
    else:
        row = parquet_row(path, offset, lambda names: (columns.media_column(dict.fromkeys(names), path),))
        held = None if row is None else embedded_bytes(*row.values())
    if held is None:
        raise DataError(f"{path}, {name}: it holds no {columns.kind.one} any more. Start a new run for changed data.")
    return Encoded(f"{path}, {name}", held=held)


# --- folders of classes ---


def _folder_records(root: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    inside = root.resolve()
    for number, (name, label) in enumerate(class_files(root, columns.kind)):
        file = root / name
        if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(inside):
            yield FoundRecord(str(file), path=str(file), reason="it links out of the folder")
        else:
            yield FoundRecord(name, BELOW, number, -1, str(file), Encoded.of_file(file), label)


# --- tar ---


def tar_samples(path: Path) -> Iterator[tuple[tarfile.TarFile, str, dict[str, tarfile.TarInfo]]]:
    """Yield (archive, name, files by suffix) for consecutive files whose names are equal up to the first dot.

    Raises:
        DataError: if the file is damaged or truncated, has sparse files, or contains several archives.
    """
    sample: dict[str, tarfile.TarInfo] = {}
    stem = ""
    try:
        size, before = path.stat().st_size, -1
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                vars(tar)["members"].clear()  # tarfile would keep every member in memory
                if tar.offset <= before or member.size < 0:  # a wrong size would cause an endless loop
                    raise _truncated(path, f"the size of {member.name[:200]!r} is {member.size}")
                before = tar.offset
                if not member.isreg():
                    continue
                if member.issparse():
                    raise DataError(
                        f"{path}: {member.name[:200]!r} is stored with holes. Pack the archive again, without --sparse."
                    )
                if member.offset_data + member.size > size:
                    raise _truncated(path, "unexpected end of data")
                folder, slash, file = member.name.rpartition("/")
                first, _, suffix = file.partition(".")
                if folder + slash + first != stem and sample:
                    yield tar, stem, sample
                    sample = {}
                stem = folder + slash + first
                sample[suffix.lower()] = member
            if sample:
                yield tar, stem, sample
            _check_end(path, tar.offset)
    except (tarfile.TarError, struct.error, RecursionError, MemoryError) as error:
        raise _truncated(path, str(error) or type(error).__name__) from error
    except (ValueError, OverflowError, TypeError, IndexError) as error:  # from tarfile, for numbers in headers
        if isinstance(error, WeftError):
            raise
        raise _truncated(path, str(error)) from error


def _check_end(path: Path, end: int) -> None:
    """Check that the archive ends with blocks of zeros, with no data after them."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(end)
        ends = file.read(tarfile.BLOCKSIZE)
        if size < end or len(ends) < tarfile.BLOCKSIZE or ends.count(0) < tarfile.BLOCKSIZE:
            raise _truncated(path, "its end is missing")
        while block := file.read(2**20):
            if block.count(0) < len(block):
                raise DataError(f"{path}: another archive follows its end. Use separate archive files.")


def _truncated(path: Path, why: str) -> DataError:
    return DataError(f"{path}: the archive is damaged or truncated ({why}). Copy it again, or leave it out.")


def _tar_record(
    path: Path, tar: tarfile.TarFile, stem: str, sample: Mapping[str, tarfile.TarInfo], columns: RecordColumns
) -> FoundRecord:
    wanted = [columns.media] if columns.media else [suffix[1:] for suffix in columns.kind.suffixes]
    media = next((sample[name] for name in sample if name in wanted or name.rpartition(".")[2] in wanted), None)
    if media is None:
        return FoundRecord(f"{path}, {stem}", reason=f"it has no {columns.kind.one}")
    encoded = Encoded(f"{path}, {media.name}", str(path), media.offset_data, media.size)
    label = _tar_label(tar, sample, columns)
    if label is None:
        suffix = columns.label or ("txt" if columns.is_text else "cls")
        return FoundRecord(encoded.name, reason=f"it has no {columns.learnt}; a file {stem}.{suffix} holds it")
    return FoundRecord(media.name, STRETCH, media.offset_data, media.size, "", encoded, label)


def _tar_label(tar: tarfile.TarFile, sample: Mapping[str, tarfile.TarInfo], columns: RecordColumns) -> int | str | None:
    def text(name: str) -> str:
        member = sample[name]
        if member.size > _MOST_LABEL_BYTES:
            return ""
        return (
            Encoded(member.name, str(tar.name), member.offset_data, member.size).read_all().decode("utf-8", "replace")
        )

    plain = columns.label or ("txt" if columns.is_text else "cls")
    if plain in sample and plain != "json":
        return columns.label_of(text(plain))
    if "json" in sample:
        try:
            record = json.loads(text("json"))
        except (ValueError, RecursionError):
            return None
        names = [columns.label] if columns.label else _TEXTS if columns.is_text else _LABELS
        return next((columns.label_of(record[name]) for name in names if name in record), None) \
            if isinstance(record, dict) else None  # fmt: skip
    return None


# --- jsonl ---


def lines_of(path: Path) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (line number from 1, byte offset, line) of lines that are not blank, or of the elements of a JSON array.

    A line of more than 256 MiB is yielded as None.

    Raises:
        DataError: if a .json file is not an array of at most 256 MiB.
        OSError: if the file cannot be read.
    """
    if path.suffix == ".json":
        yield from _elements_of(path)
        return
    number = offset = 0
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(_MOST_LINE_BYTES):
            number, start = number + 1, offset
            offset += len(line)
            if len(line) == _MOST_LINE_BYTES and not line.endswith(b"\n"):
                while rest := file.readline(_READ_BYTES):
                    offset += len(rest)
                    if rest.endswith(b"\n"):
                        break
                yield number, start, None
            elif not line.isspace():
                yield number, start, line


def _elements_of(path: Path) -> Iterator[tuple[int, int, bytes]]:
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(_MOST_LINE_BYTES + 1)
    number, end, offset = 0, 0, 3 * data.startswith(codecs.BOM_UTF8)
    try:
        if len(data) > _MOST_LINE_BYTES:
            raise ValueError("it has more than 256 MiB")
        text = data.decode("utf-8-sig")
        found = re.match(r"\s*\[\s*(?!\])", text)
        while found is not None:
            _, stop = json.JSONDecoder().raw_decode(text, found.end())
            offset += len(text[end : found.end()].encode())
            element = text[found.end() : stop].encode()
            number, end = number + 1, stop
            yield number, offset, element
            offset += len(element)
            found = _COMMA.match(text, end)
        if text[end:].strip() != "]":
            raise ValueError("it is not an array of objects" if not number else f"element {number + 1} is damaged")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {error}. Write its records as .jsonl, one object per line.") from error


def line_object(line: bytes | None) -> dict[str, Any] | None:
    """Return the object of a line of JSON, or None if the line is not a JSON object."""
    try:
        found = None if line is None else json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _line_records(path: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    is_first = True
    for number, offset, line in lines_of(path):
        record = line_object(line)
        if line is None or record is None:
            reason = "it is not an object of JSON" if line is not None else "the line is too long"
            yield FoundRecord(f"{path}, line {number}", reason=reason)
            continue
        try:
            media = record[columns.media_column(record, path)]
            label = columns.label_of(record[columns.label_column(record, path)])
            yield _record(path, f"line {number}", media, label, (LINE, offset, len(line)), columns)
        except DataError as error:
            if is_first:  # an option probably names the wrong column
                raise
            yield FoundRecord(f"{path}, line {number}", reason=str(error).removeprefix(f"{path}: "))
        is_first = False


def _record(
    path: Path, name: str, media: Any, label: int | str | None, place: tuple[int, int, int], columns: RecordColumns
) -> FoundRecord:
    where = f"{path}, {name}"
    if label is None:
        return FoundRecord(where, reason=f"it has no {columns.learnt}")
    held = embedded_bytes(media)
    if held is not None:
        return FoundRecord(name, *place, "", Encoded(where, held=held), label)
    if isinstance(media, Mapping):
        media = media.get("path")
    if not isinstance(media, str) or not media:
        return FoundRecord(where, reason=f"it has neither a path nor bytes of a {columns.kind.one}")
    try:
        file = inside(path.parent, media)
        if not file.is_file():
            return FoundRecord(where, path=str(file), reason=f"there is no file {media[:200]!r} beside it")
    except DataError as error:
        return FoundRecord(where, reason=str(error))
    return FoundRecord(media, FILE, 0, -1, str(file), Encoded.of_file(file), label)


def inside(root: Path, path: str) -> Path:
    """Return the path of a file that a record refers to, `path` relative to `root`.

    Raises:
        DataError: if it is outside the folder, or the text is not a valid file name.
    """
    try:
        file = root / path
        is_inside = file.resolve().is_relative_to(root.resolve())
        file.is_file()  # raises OSError for names that are too long
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path[:200]!r} cannot be the name of a file ({why})") from error
    if not is_inside:
        raise DataError(f"{path[:200]!r} lies outside {root}, the folder of the records")
    return file


def embedded_bytes(value: Any) -> bytes | None:
    """Return the media bytes that a record contains, None if it contains no media, or b"" for invalid base64."""
    if isinstance(value, Mapping):
        value = value.get("bytes")
        if isinstance(value, str):
            value = f"data:,;base64,{value}"
    if isinstance(value, str) and value.startswith("data:") and ";base64," in value[:64]:
        try:
            return base64.b64decode(value.partition(";base64,")[2], validate=True)
        except (binascii.Error, ValueError):
            return b""
    return value if isinstance(value, bytes) else None


# --- parquet ---


def _parquet_records(path: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    schema = parquet_schema(path)
    names = dict.fromkeys(schema.names)
    media, label = columns.media_column(names, path), columns.label_column(names, path)
    classes = class_names(schema.metadata or {}, label)
    for number, record in parquet_rows(path, (media, label)):
        if record is None:
            yield FoundRecord(f"{path}, row {number}", reason="its values cannot be read")
            continue
        value = columns.label_of(record[label])
        if isinstance(value, int) and 0 <= value < len(classes):
            value = classes[value]
        yield _record(path, f"row {number}", record[media], value, (ROW, number, -1), columns)


@contextmanager
def _opened_parquet(path: Path) -> Iterator[Any]:
    """Open a parquet file. Errors of opening it, and of the body of `with`, are raised as DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as parquet:
            yield parquet
    except (pa.ArrowException, MemoryError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"{path}: it is damaged or truncated ({first}). Copy it again, or leave it out.") from error


def parquet_schema(path: Path) -> Any:
    """Return the arrow schema of a parquet file.

    Raises:
        DataError: if the file is damaged.
    """
    with _opened_parquet(path) as parquet:
        return parquet.schema_arrow


def parquet_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the index and the values of each row of a parquet file. The values of a damaged row are None.

    columns: columns to read, or None for all.

    Raises:
        DataError: if the file is damaged.
    """
    number = 0
    with _opened_parquet(path) as parquet:
        for batch in parquet.iter_batches(batch_size=64, columns=columns, use_threads=False):
            for record in rows_of(batch):
                yield number, record
                number += 1


def parquet_row(
    path: Path, number: int, chosen: Callable[[list[str]], tuple[str, ...]] | None = None
) -> dict[str, Any] | None:
    """Return a row by index, or None if it is damaged.

    chosen: function from the names of all columns to those to read; None for all.

    Raises:
        DataError: if the file is no longer there, or is damaged.
    """
    import pyarrow as pa

    try:
        starts, names = _layout(str(path))
        columns = None if chosen is None else chosen(names)
        group = max(index for index, start in enumerate(starts) if start <= number)
        return rows_of(_group(str(path), group, columns).slice(number - starts[group], 1))[0]
    except (pa.ArrowException, OSError, *_BAD_ROW, IndexError, MemoryError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"{path}: row {number} cannot be read ({first}). Start a new run for changed data.") from error


@lru_cache(maxsize=256)
def _layout(path: str) -> tuple[list[int], list[str]]:
    """Return the index of the first row of each row group, and the names of the columns."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        sizes = [parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups)]
        return [sum(sizes[:index]) for index in range(len(sizes))], list(parquet.schema_arrow.names)


@lru_cache(maxsize=_GROUPS)
def _group(path: str, group: int, columns: tuple[str, ...] | None) -> Any:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        return parquet.read_row_group(group, columns=None if columns is None else list(columns), use_threads=False)


def rows_of(batch: Any) -> list[dict[str, Any] | None]:
    """Return the rows of an arrow batch as Python values. A damaged row, such as invalid UTF-8, is None."""
    try:
        return batch.to_pylist()
    except _BAD_ROW:
        return [_row_of(batch, index) for index in range(batch.num_rows)]


def _row_of(batch: Any, index: int) -> dict[str, Any] | None:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except _BAD_ROW:
        return None


def class_names(metadata: Mapping[bytes, bytes], label: str) -> Sequence[str]:
    """Return the class names that Hugging Face's datasets library stored for a label column, or () if it did not.

    metadata: metadata of a parquet file's schema.
    """
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][label]
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        return [str(name) for name in feature["names"]]
    except (KeyError, ValueError, TypeError, RecursionError):
        return ()


# --- columns ---


def _column(record: Mapping[str, Any], asked: str, usual: Sequence[str], what: tuple[str, str], path: Path) -> str:
    found = asked if asked in record else next((name for name in usual if name in record), "") if not asked else ""
    if not found:
        names = ", ".join(map(str, record)) or "none"
        raise DataError(
            f"{path}: {f'column {asked!r}' if asked else f'a column with the {what[0]}'} was not found; its columns "
            f"are {names}. Name it with task.options.{what[1]}=NAME."
        )
    return found


def class_label(value: Any) -> int | str | None:
    """Return a class number or name, or None for any other value. A text of up to nine digits is a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    if not isinstance(value, str):
        return None
    text = value.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text or None


def name_bytes(name: str) -> np.ndarray:
    """Return the name of a file or a record as bytes, uint8 (B,). Names on the disk may be invalid UTF-8."""
    return np.frombuffer(name.encode("utf-8", "surrogateescape"), np.uint8)


def name_text(data: np.ndarray) -> str:
    """Return the name that `name_bytes` encoded."""
    return data.tobytes().decode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """Return a message with unprintable characters escaped, such as those of a name that is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
