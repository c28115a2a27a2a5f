"""Records with a picture and a label in `.tar` shards, jsonl and parquet files: where each picture lies, unread."""

from __future__ import annotations

import base64
import binascii
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.data.media.class_folder import SUFFIXES
from weft.data.media.encoded import Encoded
from weft.errors import DataError

#: Suffixes of files of records.
RECORD_SUFFIXES = (".tar", ".jsonl", ".ndjson", ".parquet")
#: How a picture is reached: a stretch of the file, a file of its own, base64 in a line, a row.
STRETCH, FILE, LINE, ROW = range(4)

_PICTURES = ("image", "picture", "img", "jpg", "jpeg", "png", "webp", "file_name", "image_path", "path", "bytes")
_LABELS = ("label", "cls", "class", "category", "label_name", "class_name")
_MOST_LABEL_BYTES = 2**16
#: Row groups of pictures that a process holds.
_GROUPS = 4


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Names of the columns, or of the suffixes in a tar, that hold picture and label; "": the usual names."""

    picture: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """One record. name: as people find it. kind, offset, length: how its picture is reached, and where.

    encoded: the picture. label: a number or a text. reason: why it cannot be used; "": it can.
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
    """Yield the records of a file, in its order.

    Args:
        path: of the file; its suffix says how it is read.
        columns: where picture and label are.

    Raises:
        DataError: where the file is damaged, cut off or has no such columns.
    """
    try:
        if path.suffix == ".tar":
            yield from _tar_records(path, columns)
        elif path.suffix == ".parquet":
            yield from _parquet_records(path, columns)
        else:
            yield from _line_records(path, columns)
    except OSError as error:
        raise DataError(
            f"{path}: it cannot be read ({error.strerror or error}). Repair it, or leave it out."
        ) from error


def picture_at(path: Path, name: str, kind: int, offset: int, length: int, columns: RecordColumns) -> Encoded:
    """Return the picture of a record whose place is known.

    Args:
        path: of the file of records.
        name: of the record.
        kind: how the picture is reached.
        offset: in the file, or the number of the row.
        length: of the stretch.
        columns: where picture and label are.

    Raises:
        DataError: where it is not there any more.
    """
    if kind == FILE:
        return Encoded(name, str(_inside(path.parent, name)))
    if kind == STRETCH:
        return Encoded(f"{path}, {name}", str(path), offset, length)
    if kind == LINE:
        record = json.loads(Encoded(name, str(path), offset, length).whole())
        held = _held(record[_column(record, columns.picture, _PICTURES, "picture", path)])
    else:
        held = _row(path, offset, columns)
    if held is None:
        raise DataError(f"{path}, {name}: it holds no picture any more. Start a new run for changed data.")
    return Encoded(f"{path}, {name}", held=held)


# --- tar ---


def _tar_records(path: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    """Files that follow one another and share all before the first dot of their names are one sample."""
    sample: dict[str, tarfile.TarInfo] = {}
    stem = ""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                vars(tar)["members"].clear()  # it would remember every member
                if not member.isreg():
                    continue
                folder, slash, file = member.name.rpartition("/")
                first, _, suffix = file.partition(".")
                if folder + slash + first != stem and sample:
                    yield _tar_record(path, tar, stem, sample, columns)
                    sample = {}
                stem = folder + slash + first
                sample[suffix.lower()] = member
            if sample:
                yield _tar_record(path, tar, stem, sample, columns)
            _check_end(path, tar.offset)
    except tarfile.TarError as error:
        raise _cut_off(path, str(error)) from error


def _check_end(path: Path, end: int) -> None:
    """An archive ends with blocks of zeros, and nothing stands after them."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(end)
        ends = file.read(tarfile.BLOCKSIZE)
        if size < end or len(ends) < tarfile.BLOCKSIZE or ends.count(0) < tarfile.BLOCKSIZE:
            raise _cut_off(path, "its end is missing")
        while block := file.read(2**20):
            if block.count(0) < len(block):
                raise DataError(f"{path}: another archive follows its end. Give the archives as files of their own.")


def _cut_off(path: Path, why: str) -> DataError:
    return DataError(f"{path}: the archive is damaged or cut off ({why}). Copy it again, or leave it out.")


def _tar_record(
    path: Path, tar: tarfile.TarFile, stem: str, sample: Mapping[str, tarfile.TarInfo], columns: RecordColumns
) -> FoundRecord:
    wanted = [columns.picture] if columns.picture else [suffix[1:] for suffix in SUFFIXES]
    picture = next((sample[name] for name in sample if name in wanted or name.rpartition(".")[2] in wanted), None)
    if picture is None:
        return FoundRecord(f"{path}, {stem}", reason="it has no picture")
    encoded = Encoded(f"{path}, {picture.name}", str(path), picture.offset_data, picture.size)
    label = _tar_label(tar, sample, columns)
    if label is None:
        return FoundRecord(encoded.name, reason=f"it has no label; a file {stem}.{columns.label or 'cls'} holds it")
    return FoundRecord(picture.name, STRETCH, picture.offset_data, picture.size, "", encoded, label)


def _tar_label(tar: tarfile.TarFile, sample: Mapping[str, tarfile.TarInfo], columns: RecordColumns) -> int | str | None:
    def text(name: str) -> str:
        member = sample[name]
        if member.size > _MOST_LABEL_BYTES:
            return ""
        return Encoded(member.name, str(tar.name), member.offset_data, member.size).whole().decode("utf-8", "replace")

    plain = columns.label or "cls"
    if plain in sample and plain != "json":
        return _label(text(plain))
    if "json" in sample:
        try:
            record = json.loads(text("json"))
        except (ValueError, RecursionError):
            return None
        names = [columns.label] if columns.label else _LABELS
        return next((_label(record[name]) for name in names if name in record), None) \
            if isinstance(record, dict) else None  # fmt: skip
    return None


# --- jsonl ---


def _line_records(path: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            length = len(line)
            if not line.isspace():
                yield _line_record(path, number, line, offset, columns)
            offset += length


def _line_record(path: Path, number: int, line: bytes, offset: int, columns: RecordColumns) -> FoundRecord:
    name = f"line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        return FoundRecord(f"{path}, {name}", reason="it is not an object of JSON")
    picture = record[_column(record, columns.picture, _PICTURES, "picture", path)]
    label = _label(record[_column(record, columns.label, _LABELS, "label", path)])
    return _record(path, name, picture, label, (LINE, offset, len(line)))


def _record(path: Path, name: str, picture: Any, label: int | str | None, place: tuple[int, int, int]) -> FoundRecord:
    where = f"{path}, {name}"
    if label is None:
        return FoundRecord(where, reason="it has no label")
    held = _held(picture)
    if held is not None:
        return FoundRecord(name, *place, "", Encoded(where, held=held), label)
    if isinstance(picture, Mapping):
        picture = picture.get("path")
    if not isinstance(picture, str) or not picture:
        return FoundRecord(where, reason="it has neither a path nor bytes of a picture")
    try:
        file = _inside(path.parent, picture)
    except DataError as error:
        return FoundRecord(where, reason=str(error))
    if not file.is_file():
        return FoundRecord(where, path=str(file), reason=f"there is no file {picture!r} beside it")
    return FoundRecord(picture, FILE, 0, -1, str(file), Encoded.of_file(file), label)


def _inside(root: Path, path: str) -> Path:
    """The file that a record names. DataError where it lies outside of the folder of the records."""
    file = root / path
    if not file.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{path!r} lies outside of {root}, the folder of the records")
    return file


def _held(value: Any) -> bytes | None:
    """The bytes of a picture that stand in the record itself."""
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as parquet:
            schema = parquet.schema_arrow
            names = dict.fromkeys(schema.names)
            picture = _column(names, columns.picture, _PICTURES, "picture", path)
            label = _column(names, columns.label, _LABELS, "label", path)
            classes, number = _class_names(schema.metadata or {}, label), 0
            for batch in parquet.iter_batches(batch_size=64, columns=[picture, label], use_threads=False):
                for record in batch.to_pylist():
                    value = _label(record[label])
                    if isinstance(value, int) and 0 <= value < len(classes):
                        value = classes[value]
                    yield _record(path, f"row {number}", record[picture], value, (ROW, number, -1))
                    number += 1
    except pa.ArrowException as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"{path}: it is damaged or cut off ({first}). Copy it again, or leave it out.") from error


def _class_names(metadata: Mapping[bytes, bytes], label: str) -> Sequence[str]:
    """What the datasets library wrote beside a column of numbers."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, ValueError, TypeError):
        return ()


def _row(path: Path, number: int, columns: RecordColumns) -> bytes | None:
    starts, picture = _groups(str(path), columns)
    group = max(index for index, start in enumerate(starts) if start <= number)
    return _held(_group(str(path), group, picture)[number - starts[group]].as_py())


@lru_cache(maxsize=256)
def _groups(path: str, columns: RecordColumns) -> tuple[list[int], str]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        sizes = [parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups)]
        names = dict.fromkeys(parquet.schema_arrow.names)
    return [sum(sizes[:index]) for index in range(len(sizes))], _column(
        names, columns.picture, _PICTURES, "picture", Path(path)
    )


@lru_cache(maxsize=_GROUPS)
def _group(path: str, group: int, picture: str) -> Any:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        return parquet.read_row_group(group, columns=[picture], use_threads=False).column(0)


# --- columns ---


def _column(record: Mapping[str, Any], asked: str, usual: Sequence[str], what: str, path: Path) -> str:
    found = asked if asked in record else next((name for name in usual if name in record), "") if not asked else ""
    if not found:
        names = ", ".join(map(str, record)) or "none"
        raise DataError(
            f"{path}: {f'column {asked!r}' if asked else f'a column with the {what}'} was not found; its columns are "
            f"{names}. Name it with task.options.{what}=NAME."
        )
    return found


def _label(value: Any) -> int | str | None:
    """A class by number or name; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if not isinstance(value, str):
        return None
    text = value.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text or None
