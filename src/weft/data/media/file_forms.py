"""Records with a picture or sound, and what it shows or says, in `.tar` shards, jsonl, parquet and folders of classes.

They say where each lies, unread.
"""

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

from weft.data.media.encoded import Encoded
from weft.data.media.media_kinds import PICTURE, MediaKind, class_files
from weft.errors import DataError

#: Suffixes of files of records.
RECORD_SUFFIXES = (".tar", ".jsonl", ".ndjson", ".parquet")
#: How media is reached: a stretch of the file, a file beside it, base64 in a line, a row, a file below a folder.
STRETCH, FILE, LINE, ROW, BELOW = range(5)

_LABELS = ("label", "cls", "class", "category", "label_name", "class_name")
_TEXTS = ("text", "transcription", "transcript", "sentence", "txt", "normalized_text", "caption")
_MOST_LABEL_BYTES = 2**16
#: Row groups of media that a process holds.
_GROUPS = 4


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Names of the columns, or of the suffixes in a tar, that hold media and what is learnt of it; "": the usual names.

    kind: of the media. is_text: whether a text is learnt, in place of a class.
    """

    media: str = ""
    label: str = ""
    kind: MediaKind = PICTURE
    is_text: bool = False

    @property
    def learnt(self) -> str:
        """What is learnt, in a word, which is also the option that names its column."""
        return "text" if self.is_text else "label"

    def media_column(self, record: Mapping[str, Any], path: Path) -> str:
        """Return the column of the media. DataError where there is none."""
        return _column(record, self.media, self.kind.columns, (self.kind.one, self.kind.option), path)

    def label_column(self, record: Mapping[str, Any], path: Path) -> str:
        """Return the column of what is learnt. DataError where there is none."""
        return _column(record, self.label, _TEXTS if self.is_text else _LABELS, (self.learnt, self.learnt), path)

    def label_of(self, value: Any) -> int | str | None:
        """Return a class by number or name, or a text; None for anything else."""
        if self.is_text:
            return value.strip() or None if isinstance(value, str) else None
        return class_label(value)


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """One record. name: as people find it. kind, offset, length: how its media is reached, and where.

    encoded: the media. label: a number or a text. reason: why it cannot be used; "": it can.
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
        path: of the file, whose suffix says how it is read, or of a folder of classes.
        columns: where media and labels are.

    Raises:
        DataError: where the file is damaged, cut off or has no such columns.
    """
    try:
        if path.is_dir():
            yield from _folder_records(path, columns)
        elif path.suffix == ".tar":
            yield from _tar_records(path, columns)
        elif path.suffix == ".parquet":
            yield from _parquet_records(path, columns)
        else:
            yield from _line_records(path, columns)
    except OSError as error:
        raise DataError(
            f"{path}: it cannot be read ({error.strerror or error}). Repair it, or leave it out."
        ) from error


def media_at(path: Path, name: str, kind: int, offset: int, length: int, columns: RecordColumns) -> Encoded:
    """Return the media of a record whose place is known.

    Args:
        path: of the file of records.
        name: of the record.
        kind: how it is reached.
        offset: in the file, or the number of the row.
        length: of the stretch.
        columns: where media and labels are.

    Raises:
        DataError: where it is not there any more.
    """
    if kind in (FILE, BELOW):
        return Encoded(name, str(inside(path if kind == BELOW else path.parent, name)))
    if kind == STRETCH:
        return Encoded(f"{path}, {name}", str(path), offset, length)
    if kind == LINE:
        record = json.loads(Encoded(name, str(path), offset, length).whole())
        held = held_bytes(record[columns.media_column(record, path)])
    else:
        held = _row(path, offset, columns)
    if held is None:
        raise DataError(f"{path}, {name}: it holds no {columns.kind.one} any more. Start a new run for changed data.")
    return Encoded(f"{path}, {name}", held=held)


# --- folders of classes ---


def _folder_records(root: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    inside = root.resolve()
    for number, (name, label) in enumerate(class_files(root, columns.kind)):
        file = root / name
        if file.is_symlink() and not file.resolve().is_relative_to(inside):
            yield FoundRecord(str(file), path=str(file), reason="it links out of the folder")
        else:
            yield FoundRecord(name, BELOW, number, -1, str(file), Encoded.of_file(file), label)


# --- tar ---


def _tar_records(path: Path, columns: RecordColumns) -> Iterator[FoundRecord]:
    for tar, stem, sample in tar_samples(path):
        yield _tar_record(path, tar, stem, sample, columns)


def tar_samples(path: Path) -> Iterator[tuple[tarfile.TarFile, str, dict[str, tarfile.TarInfo]]]:
    """Yield (archive, name, files by suffix) of files that share all before the first dot, one after another.

    path: of the archive.

    Raises:
        DataError: where it is damaged or cut off.
    """
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
                    yield tar, stem, sample
                    sample = {}
                stem = folder + slash + first
                sample[suffix.lower()] = member
            if sample:
                yield tar, stem, sample
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
        return Encoded(member.name, str(tar.name), member.offset_data, member.size).whole().decode("utf-8", "replace")

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
    media = record[columns.media_column(record, path)]
    label = columns.label_of(record[columns.label_column(record, path)])
    return _record(path, name, media, label, (LINE, offset, len(line)), columns)


def _record(
    path: Path, name: str, media: Any, label: int | str | None, place: tuple[int, int, int], columns: RecordColumns
) -> FoundRecord:
    where = f"{path}, {name}"
    if label is None:
        return FoundRecord(where, reason=f"it has no {columns.learnt}")
    held = held_bytes(media)
    if held is not None:
        return FoundRecord(name, *place, "", Encoded(where, held=held), label)
    if isinstance(media, Mapping):
        media = media.get("path")
    if not isinstance(media, str) or not media:
        return FoundRecord(where, reason=f"it has neither a path nor bytes of a {columns.kind.one}")
    try:
        file = inside(path.parent, media)
    except DataError as error:
        return FoundRecord(where, reason=str(error))
    if not file.is_file():
        return FoundRecord(where, path=str(file), reason=f"there is no file {media!r} beside it")
    return FoundRecord(media, FILE, 0, -1, str(file), Encoded.of_file(file), label)


def inside(root: Path, path: str) -> Path:
    """Return the file that a record names.

    Args:
        root: folder of the records.
        path: as the record has it.

    Raises:
        DataError: where it lies outside of the folder.
    """
    file = root / path
    if not file.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{path!r} lies outside of {root}, the folder of the records")
    return file


def held_bytes(value: Any) -> bytes | None:
    """Return the bytes of media that stand in the record itself; None: there are none."""
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
            media, label = columns.media_column(names, path), columns.label_column(names, path)
            classes, number = _class_names(schema.metadata or {}, label), 0
            for batch in parquet.iter_batches(batch_size=64, columns=[media, label], use_threads=False):
                for record in batch.to_pylist():
                    value = columns.label_of(record[label])
                    if isinstance(value, int) and 0 <= value < len(classes):
                        value = classes[value]
                    yield _record(path, f"row {number}", record[media], value, (ROW, number, -1), columns)
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
    starts, media = _groups(str(path), columns)
    group = max(index for index, start in enumerate(starts) if start <= number)
    return held_bytes(_group(str(path), group, media)[number - starts[group]].as_py())


@lru_cache(maxsize=256)
def _groups(path: str, columns: RecordColumns) -> tuple[list[int], str]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        sizes = [parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups)]
        names = dict.fromkeys(parquet.schema_arrow.names)
    return [sum(sizes[:index]) for index in range(len(sizes))], columns.media_column(names, Path(path))


@lru_cache(maxsize=_GROUPS)
def _group(path: str, group: int, media: str) -> Any:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        return parquet.read_row_group(group, columns=[media], use_threads=False).column(0)


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
    """Return a class by number or name; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if not isinstance(value, str):
        return None
    text = value.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text or None
