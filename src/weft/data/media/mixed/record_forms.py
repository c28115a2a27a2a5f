"""Records of text, pictures and sound in tars, lines of JSON and parquet files, and where their media lie."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.data.media.encoded import Encoded
from weft.data.media.file_forms import (
    FILE,
    LINE,
    ROW,
    STRETCH,
    held_bytes,
    inside,
    line_object,
    lines_of,
    rows_of,
    tar_samples,
)
from weft.data.media.media_kinds import PICTURE, SOUND
from weft.data.media.mixed.sample_parts import MixedColumns, SamplePart, UnusableSample
from weft.errors import DataError

_MOST_TEXT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FoundMedia:
    """One picture or recording. name: as people find it. kind, offset, length: how it is reached, and where.

    number: among the media of its record. path: of a file of its own. encoded: its bytes.
    """

    is_sound: bool
    name: str
    kind: int
    offset: int
    length: int
    number: int
    encoded: Encoded
    path: str = ""


@dataclass(frozen=True, slots=True)
class FoundSample:
    """One record. parts: its pieces. media: of those that are no text, in order. reason: why it is left out."""

    name: str
    offset: int = 0
    parts: tuple[SamplePart, ...] = ()
    media: tuple[FoundMedia, ...] = ()
    reason: str = ""
    missing: str = ""


def mixed_in(path: Path, columns: MixedColumns) -> Iterator[FoundSample]:
    """Yield the samples of a file, in its order.

    Args:
        path: of the file, whose suffix says how it is read.
        columns: of text and media.

    Raises:
        DataError: where the file is damaged or cut off.
    """
    try:
        if path.suffix == ".tar":
            yield from _tar_mixed(path, columns)
        elif path.suffix == ".parquet":
            for number, record in _parquet_rows(path):
                if record is None:
                    yield FoundSample(f"{path}, row {number}", number, reason="its values cannot be read")
                    continue
                yield _sample(path, f"row {number}", record, (ROW, number, -1), columns)
        else:
            yield from _line_mixed(path, columns)
    except OSError as error:
        raise DataError(
            f"{path}: it cannot be read ({error.strerror or error}). Repair it, or leave it out."
        ) from error


def mixed_at(path: Path, name: str, kind: int, offset: int, length: int, number: int, columns: MixedColumns) -> Encoded:
    """Return a picture or a recording whose place is known.

    Args:
        path: of the file of records.
        name: as `FoundMedia` has it.
        kind: how it is reached.
        offset: in the file, or the number of the row.
        length: of the stretch.
        number: among the media of its record.
        columns: of text and media.

    Raises:
        DataError: where it is not there any more.
    """
    if kind == FILE:
        return Encoded(name, str(inside(path.parent, name)))
    if kind == STRETCH:
        return Encoded(f"{path}, {name}", str(path), offset, length)
    record = line_object(Encoded(name, str(path), offset, length).whole()) if kind == LINE else \
        _parquet_row(path, offset)  # fmt: skip
    try:
        parts = columns.parts(record or {})
    except UnusableSample:
        parts = []
    media = [part for part in parts if part.what in ("picture", "recording")]
    held = held_bytes(media[number].media) if number < len(media) else None
    if held is None:
        raise DataError(f"{path}, {name}: it holds no media any more. Start a new run for changed data.")
    return Encoded(f"{path}, {name}", held=held)


def _line_mixed(path: Path, columns: MixedColumns) -> Iterator[FoundSample]:
    for number, offset, line in lines_of(path):
        yield _line_sample(path, number, line, offset, columns)


def _line_sample(path: Path, number: int, line: bytes | None, offset: int, columns: MixedColumns) -> FoundSample:
    record = line_object(line)
    if line is None or record is None:
        reason = "it is not an object of JSON" if line is not None else "the line is too long"
        return FoundSample(f"{path}, line {number}", offset, reason=reason)
    return _sample(path, f"line {number}", record, (LINE, offset, len(line)), columns)


def _sample(
    path: Path, name: str, record: Mapping[str, Any], place: tuple[int, int, int], columns: MixedColumns
) -> FoundSample:
    where = f"{path}, {name}"
    try:
        parts = columns.parts(record)
    except UnusableSample as error:
        return FoundSample(where, place[1], reason=str(error))
    media: list[FoundMedia] = []
    for part in parts:
        if part.what not in ("picture", "recording"):
            continue
        is_sound, number = part.what == "recording", len(media)
        held = held_bytes(part.media)
        if held is not None:
            encoded = Encoded(f"{where}, {part.what} {number + 1}", held=held)
            media.append(FoundMedia(is_sound, name, *place, number, encoded))
            continue
        file = part.media.get("path") if isinstance(part.media, Mapping) else part.media
        if not isinstance(file, str) or not file:
            reason = f"{part.what} {number + 1} has neither a path nor bytes"
            return FoundSample(where, place[1], reason=reason)
        file = file.removeprefix("file://")
        if "\n" in file:
            return FoundSample(where, place[1], reason=f"the file name {file[:200]!r} has a line break")
        try:
            found = inside(path.parent, file)
        except DataError as error:
            return FoundSample(where, place[1], reason=str(error))
        if not found.is_file():
            return FoundSample(where, place[1], reason=f"there is no file {file[:200]!r} beside it", missing=str(found))
        media.append(FoundMedia(is_sound, file, FILE, 0, -1, number, Encoded.of_file(found), str(found)))
    return FoundSample(where, place[1], tuple(parts), tuple(media))


def _tar_mixed(path: Path, columns: MixedColumns) -> Iterator[FoundSample]:
    """Files that share all before the first dot of their names: pictures and sounds by their suffixes, then the text.

    A `.json` may hold the text, or a chat whose marks stand for the files in their order.
    """
    for _, stem, members in tar_samples(path):
        record: dict[str, Any] = {"images": [], "audios": []}
        for suffix, member in members.items():
            last = f".{suffix.rpartition('.')[2]}"
            is_sound = last in SOUND.suffixes
            if last in PICTURE.suffixes or is_sound:
                encoded = Encoded(f"{path}, {member.name}", str(path), member.offset_data, member.size)
                name = member.name.replace("\n", " ")
                one = FoundMedia(is_sound, name, STRETCH, member.offset_data, member.size, 0, encoded)
                record["audios" if is_sound else "images"].append(one)
            elif suffix in ("txt", "cls", "json") and member.size <= _MOST_TEXT_BYTES:
                held = Encoded(member.name, str(path), member.offset_data, member.size).whole()
                record |= _tar_text(suffix, held.decode("utf-8", "replace"), columns)
        where = f"{path}, {stem}"
        try:
            parts = columns.parts(record)
        except UnusableSample as error:
            yield FoundSample(where, reason=str(error))
            continue
        media = [part.media for part in parts if part.what in ("picture", "recording")]
        if not all(isinstance(one, FoundMedia) for one in media):
            yield FoundSample(where, reason="its chat names media that do not lie in the archive beside it")
            continue
        yield FoundSample(where, media[0].offset if media else 0, tuple(parts), tuple(media))


def _tar_text(suffix: str, text: str, columns: MixedColumns) -> dict[str, Any]:
    if suffix != "json":
        return {columns.text or "text": text}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {name: value for name, value in found.items() if name not in ("images", "audios")} \
        if isinstance(found, dict) else {}  # fmt: skip


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as parquet:
            for batch in parquet.iter_batches(batch_size=64, use_threads=False):
                for record in rows_of(batch):
                    yield number, record
                    number += 1
    except (pa.ArrowException, MemoryError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"{path}: it is damaged or cut off ({first}). Copy it again, or leave it out.") from error


def _parquet_row(path: Path, number: int) -> dict[str, Any] | None:
    import pyarrow as pa

    try:
        starts = _group_starts(str(path))
        group = max(index for index, start in enumerate(starts) if start <= number)
        return rows_of(_group(str(path), group).slice(number - starts[group], 1))[0]
    except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"{path}: row {number} cannot be read ({first}). Start a new run for changed data.") from error


@lru_cache(maxsize=256)
def _group_starts(path: str) -> list[int]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        sizes = [parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups)]
    return [sum(sizes[:index]) for index in range(len(sizes))]


@lru_cache(maxsize=4)
def _group(path: str, group: int) -> Any:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        return parquet.read_row_group(group, use_threads=False)
