"""Records of text, images and audio in tar, JSON Lines and parquet files, with the locations of their media."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.media.audio import sound_size
from weft.data.media.class_folder import MOST_BAD
from weft.data.media.files import (
    FILE,
    LINE,
    ROW,
    STRETCH,
    RecordColumns,
    embedded_bytes,
    inside,
    line_object,
    lines_of,
    name_bytes,
    name_text,
    parquet_row,
    parquet_rows,
    printable,
    tar_samples,
)
from weft.data.media.images import Encoded, picture_size
from weft.data.media.media_records import MediaRecords, Told, add_rows, file_state, records_table
from weft.data.media.mixed_samples import MixedColumns, SamplePart, TextCodec, UnusableSample, sample_tokens
from weft.data.media.records import PICTURE, SAMPLE, SOUND, MediaKind
from weft.data.store.row_table import RowWriter
from weft.errors import DataError

_MOST_TEXT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FoundMedia:
    """An image or audio clip of a record, and its location.

    Attributes:
        is_sound: whether it is an audio clip, not an image.
        name: name for messages.
        kind: how the media is stored, as in `FoundRecord`.
        offset: byte offset in the file, or row index.
        length: number of bytes, as in `FoundRecord`.
        number: index among the media of its record.
        path: path of a separate file.
        encoded: its bytes.
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
    """A record with its parts and its media in order, or the reason why it is skipped.

    `path` is set if that reason is a missing file. `offset` is the byte offset or the row index of the record in its
    file, or of its first media in a tar.
    """

    name: str
    offset: int = 0
    parts: tuple[SamplePart, ...] = ()
    media: tuple[FoundMedia, ...] = ()
    reason: str = ""
    path: str = ""


def mixed_in(path: Path, columns: MixedColumns) -> Iterator[FoundSample]:
    """Yield the samples of a file, in order.

    path: the file. Its suffix gives the format. columns: columns of text and media.

    Raises:
        DataError: if the file is damaged or truncated.
    """
    try:
        if path.suffix == ".tar":
            yield from _tar_mixed(path, columns)
        elif path.suffix == ".parquet":
            for number, record in parquet_rows(path):
                if record is None:
                    yield FoundSample(f"{path}, row {number}", number, reason="its values cannot be read")
                    continue
                yield _sample(path, f"row {number}", record, (ROW, number, -1), columns)
        else:
            for number, offset, line in lines_of(path):
                record = line_object(line)
                if line is None or record is None:
                    reason = "it is not an object of JSON" if line is not None else "the line is too long"
                    yield FoundSample(f"{path}, line {number}", offset, reason=reason)
                else:
                    yield _sample(path, f"line {number}", record, (LINE, offset, len(line)), columns)
    except OSError as error:
        raise DataError(
            f"{path}: it cannot be read ({error.strerror or error}). Repair it, or leave it out."
        ) from error


def mixed_at(path: Path, name: str, kind: int, offset: int, length: int, number: int, columns: MixedColumns) -> Encoded:
    """Return the encoded image or audio clip at a location.

    Args:
        path: the file of records.
        name: name in `FoundMedia`.
        kind: how the media is stored, as in `FoundRecord`.
        offset: byte offset in the file, or row index.
        length: number of bytes, as in `FoundRecord`.
        number: index among the media of its record.
        columns: columns of text and media.

    Raises:
        DataError: if the record no longer contains the media, or its path leaves the folder. A separate file is not
            read here.
    """
    if kind == FILE:
        return Encoded(name, str(inside(path.parent, name)))
    if kind == STRETCH:
        return Encoded(f"{path}, {name}", str(path), offset, length)
    record = line_object(Encoded(name, str(path), offset, length).read_all()) if kind == LINE else \
        parquet_row(path, offset)  # fmt: skip
    try:
        parts = columns.parts(record or {})
    except UnusableSample:
        parts = []
    media = [part for part in parts if part.what in ("picture", "recording")]
    held = embedded_bytes(media[number].media) if number < len(media) else None
    if held is None:
        raise DataError(f"{path}, {name}: it holds no media any more. Start a new run for changed data.")
    return Encoded(f"{path}, {name}", held=held)


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
        held = embedded_bytes(part.media)
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
            return FoundSample(where, place[1], reason=f"there is no file {file[:200]!r} beside it", path=str(found))
        media.append(FoundMedia(is_sound, file, FILE, 0, -1, number, Encoded.of_file(found), str(found)))
    return FoundSample(where, place[1], tuple(parts), tuple(media))


def _tar_mixed(path: Path, columns: MixedColumns) -> Iterator[FoundSample]:
    """Yield samples of consecutive files whose names are equal up to the first dot: media by suffix, then the text.

    A `.json` file may contain the text, or a chat whose markers refer to the files in order.
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
                held = Encoded(member.name, str(path), member.offset_data, member.size).read_all()
                record |= _tar_text(suffix, held.decode("utf-8", "replace"), columns)
        where = f"{path}, {stem}"
        try:
            parts = columns.parts(record)
        except UnusableSample as error:
            yield FoundSample(where, reason=str(error))
            continue
        media = [part.media for part in parts if part.what in ("picture", "recording")]
        if not all(isinstance(one, FoundMedia) for one in media):
            yield FoundSample(where, reason="its chat names media that are not in the same archive")
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


# Samples of text, images and audio by index. A table of tokens, locations and sizes is built once from headers and
# cached.

_VERSION = 1
_MOST_REASONS = 1000
_TOLD_EVERY = 512
#: Numbers stored for each image or audio clip: audio flag, location, size.
_NUMBERS = 9


@dataclass(frozen=True)
class MixedRecords(MediaRecords):
    """Samples of text, images and audio in records, in the order of their files."""

    kind: ClassVar[MediaKind] = SAMPLE

    def mixed_columns(self) -> MixedColumns:
        """Return the columns of text and media."""
        picture, _, audio = self.columns.media.partition("\n")
        return MixedColumns(self.columns.label, picture, audio)

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Return the tokens of a sample, with a marker for each image and audio clip."""
        return self._row(index)["tokens"]

    def learnt(self, index: int) -> NDArray[np.uint8]:
        """Return a uint8 mask of the tokens that count in the loss."""
        return self._row(index)["learnt"]

    def num_media(self) -> NDArray[np.int64]:
        """Return the number of images and audio clips of each sample."""
        return self._lengths("places") // _NUMBERS

    def media_sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sample index of each image and audio clip, int64 (media,), and its size, int64 (media, 3).

        The three numbers are the audio flag and the first two numbers of the size in `sizes`.
        """
        rows = self.table.column("places").reshape(-1, _NUMBERS)
        owners = np.repeat(np.arange(len(self.table)), self.table.lengths("places") // _NUMBERS)
        if self._chosen is not None:
            place = np.full(len(self.table), -1)
            place[self._chosen] = np.arange(len(self._chosen))
            rows, owners = rows[place[owners] >= 0], place[owners]
            owners = owners[owners >= 0]
        return owners, np.asarray(rows[:, [0, 6, 7]], np.int64)

    def sizes(self, index: int) -> list[tuple[bool, tuple[int, ...]]]:
        """Return (whether it is audio, size from the header) for each image or audio clip of a sample."""
        places = self._row(index)["places"].reshape(-1, _NUMBERS)
        return [(bool(row[0]), tuple(map(int, row[6:]))) for row in places]

    def medium(self, index: int, number: int) -> Encoded:
        """Return the encoded image or audio clip with index `number` in a sample."""
        row = self._row(index)
        _, kind, file, offset, length, own = map(int, row["places"].reshape(-1, _NUMBERS)[number][:6])
        name = name_text(row["names"]).split("\n")[number]
        return mixed_at(Path(self.files[file]), name, kind, offset, length, own, self.mixed_columns())

    def origin(self, index: int, number: int) -> list[Any]:
        """Return JSON values that change when an image or an audio clip changes: its file, and its location there.

        number: index among the sample's media.
        """
        row = self._row(index)
        _, kind, file, *place = map(int, row["places"].reshape(-1, _NUMBERS)[number][:6])
        path = Path(self.files[file])
        if kind == FILE:
            path = path.parent / name_text(row["names"]).split("\n")[number]
        return [str(path), *file_state(str(path)), *place]

    def file(self, index: int) -> str:
        """Return the location of a sample, for messages."""
        row = self._row(index)
        return printable(name_text(row["name"]))


#: Whether each image or audio clip of a sample is audio, and its size.
Sizes = Sequence[tuple[bool, tuple[int, ...]]]
#: Function from a sample's tokens and its media to the reason to skip it, or "".
Refuse = Callable[[NDArray[np.int32], Sizes], str]


class RowSurvey(Protocol):
    """Interface of `MixedSurvey` and `ChatSurvey`, which convert the parts of records to rows of the table."""

    @property
    def columns(self) -> MixedColumns: ...
    @property
    def most_bad(self) -> float: ...
    @property
    def upright(self) -> bool: ...
    def digest(self) -> list[Any]: ...
    def row(self, parts: Sequence[SamplePart], sizes: Sizes) -> dict[str, np.ndarray] | str: ...


@dataclass(frozen=True, slots=True)
class MixedSurvey:
    """Columns, text codec and checks of records.

    Attributes:
        columns: columns of text and media.
        codec: codec of texts.
        refuse: returns the reason to skip a sample, or "".
        key: JSON values that determine the results of `refuse`.
        most_bad: maximum share of records that cannot be used.
        upright: whether images are rotated as their EXIF data asks.
    """

    columns: MixedColumns
    codec: TextCodec
    refuse: Refuse
    key: tuple[Any, ...] = ()
    most_bad: float = MOST_BAD
    upright: bool = False

    def digest(self) -> list[Any]:
        """Return the JSON values that determine the rows of the table."""
        return [self.codec.digest, *self.key]

    def row(self, parts: Sequence[SamplePart], sizes: Sizes) -> dict[str, np.ndarray] | str:
        """Return a sample's row of the table (`tokens` and `learnt`), or the reason to skip it."""
        made = sample_tokens(parts, self.codec)
        return self.refuse(made.tokens, sizes) or {"tokens": made.tokens, "learnt": made.learnt}


def find_mixed(
    path: str,
    files: Sequence[Path],
    survey: RowSurvey,
    cache: Path,
    told: Told | None,
    made: type[MixedRecords] = MixedRecords,
) -> MixedRecords:
    """Find the samples of records. Unusable records are skipped.

    Args:
        path: path or pattern that the user gave.
        files: files of records.
        survey: columns, codec and checks.
        cache: folder that stores the table.
        told: called with (bytes read, total bytes).
        made: class of the result.

    Raises:
        DataError: if a file is damaged, or too many of the records cannot be used.
    """
    columns, kind = survey.columns, made.kind
    asked = RecordColumns(f"{columns.picture}\n{columns.audio}", columns.text, kind, is_text=True)
    key = ["mixed", _VERSION, [columns.text, columns.picture, columns.audio, *survey.digest()]]

    def write(writer: RowWriter) -> dict[str, Any]:
        row_of = partial(_row, survey)
        found = partial(mixed_in, columns=columns)
        return add_rows(writer, path, files, kind, told, found, row_of, survey.most_bad)

    table = records_table(cache, key, files, kind, write)
    return made(
        path, str(table.folder), table.digest, (), (), tuple(str(file.absolute()) for file in files), asked,
        tuple(table.notes["reasons"]), _table=[table],
    )  # fmt: skip


def _row(survey: RowSurvey, file: int, sample: FoundSample) -> tuple[dict[str, np.ndarray] | None, str]:
    if sample.reason:
        return None, f"{sample.name}: {sample.reason}"
    places: list[int] = []
    sizes: list[tuple[bool, tuple[int, ...]]] = []
    try:
        for one in sample.media:
            size = sound_size(one.encoded) if one.is_sound else picture_size(one.encoded, upright=survey.upright)
            sizes.append((one.is_sound, size))
            places += [one.is_sound, one.kind, file, one.offset, one.length, one.number, *(*size, 0)[:3]]
    except DataError as error:
        return None, str(error)
    made = survey.row(sample.parts, sizes)
    if isinstance(made, str):
        return None, f"{sample.name}: {made}"
    names = "\n".join(one.name for one in sample.media)
    return {
        "places": np.array(places, np.int64), "name": name_bytes(sample.name), "names": name_bytes(names), **made
    }, ""  # fmt: skip


# Features that a frozen encoder computed from images or audio clips. They are stored in safetensors shards, and read by
# number.

#: Number of items per shard, and of shards that a process keeps open.
_ITEMS, _OPEN = 256, 64


class FeatureShards:
    """Stored encoder features of all items (images or audio clips) of one kind: (R rows, D features) for each item.

    The features are in shards of 256 items. `len` is the number of shards.

    Args:
        folder: folder of the shards.
        key: JSON values that identify the encoder and the transform of the items.
        records: the samples.
        is_sound: whether the items are audio clips instead of images.
        blank: substitute features for a batch without items, (R, D).
    """

    def __init__(self, folder: Path, key: Sequence[Any], records: MixedRecords, *, is_sound: bool, blank: NDArray[Any]):
        self.folder, self.is_sound, self.blank = folder, is_sound, blank
        self._places: dict[int, int] = {}
        origins: list[str] = []
        item = 0
        for index, count in enumerate(records.num_media()):
            for number in range(int(count)):
                if records.sizes(index)[number][0] == is_sound:
                    self._places[item] = len(origins)
                    origins.append(json.dumps(records.origin(index, number)))
                item += 1
        #: Indices of these items among all media of the samples.
        self.items = list(self._places)
        head = json.dumps([_VERSION, *key])
        self._names = [
            hashlib.blake2b("\n".join([head, *origins[first : first + _ITEMS]]).encode(), digest_size=16).hexdigest()
            for first in range(0, len(origins), _ITEMS)
        ]
        self._open: OrderedDict[int, tuple[NDArray[Any], NDArray[np.int64]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def items_of(self, shard: int) -> list[int]:
        """Return the item indices of a shard, in order."""
        return self.items[shard * _ITEMS : (shard + 1) * _ITEMS]

    def path(self, shard: int) -> Path:
        """Return the path of a shard, which may not exist yet."""
        return self.folder / f"{self._names[shard]}.safetensors"

    def has(self, shard: int) -> bool:
        """Return True if a shard exists and is complete."""
        return self._header(shard) is not None

    def write(self, shard: int, rows: Sequence[NDArray[Any]]) -> None:
        """Write the encoder features of a shard's items.

        rows: features of each item, (R, D).

        Raises:
            DataError: if the folder cannot be written to.
        """
        from safetensors.numpy import save

        values = np.ascontiguousarray(np.concatenate(rows))
        counts = np.array([len(one) for one in rows], np.int64)
        data = save({"values": values, "counts": counts}, {"digest": _digest(values, counts)})
        path = self.path(shard)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with open(draft, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(
                f"data.cache_features=true: {path} cannot be written ({error.strerror or error}). Make room, or name "
                "another folder with data.cache_dir."
            ) from error

    def __getitem__(self, item: int) -> NDArray[Any]:
        """Return the features of an item by item index, (R, D).

        Raises:
            DataError: if its shard is missing or damaged.
        """
        shard, number = divmod(self._places[item], _ITEMS)
        found = self._open.get(shard)
        if found is None:
            found = self._open[shard] = self._read(shard)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(shard)
        values, ends = found
        return values[ends[number] : ends[number + 1]]

    def _read(self, shard: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Check a shard's digest, and return its memory-mapped values and the first row of each item.

        The total number of rows follows the last item's first row. Raises DataError if the shard is missing or damaged.
        """
        path, header = self.path(shard), self._header(shard)
        if header is None:
            raise self._damaged(path)
        fields, first = header
        arrays = {}
        for name in ("values", "counts"):
            begin, _ = fields[name]["data_offsets"]
            shape = tuple(fields[name]["shape"])
            arrays[name] = np.memmap(path, _DTYPES[fields[name]["dtype"]], "r", first + begin, shape)
        values, counts = arrays["values"], np.array(arrays["counts"])
        if fields["__metadata__"].get("digest") != _digest(values, counts):
            raise self._damaged(path)
        return values, np.concatenate(([0], np.cumsum(counts)))

    def _header(self, shard: int) -> tuple[dict[str, Any], int] | None:
        """Return the file's header and the offset of its values, or None if the file is missing or truncated."""
        try:
            with open(self.path(shard), "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                fields = json.loads(file.read(size))
                whole = 8 + size + max(fields[name]["data_offsets"][1] for name in ("values", "counts"))
                return (fields, 8 + size) if os.fstat(file.fileno()).st_size == whole else None
        except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError, RecursionError):
            return None

    def _damaged(self, path: Path) -> DataError:
        return DataError(f"{path}: the kept features are gone or damaged. Delete the file: the next start makes it.")


_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U16": "<u2", "I64": "<i8"}


def _digest(values: NDArray[Any], counts: NDArray[np.int64]) -> str:
    hasher = hashlib.blake2b(counts.tobytes(), digest_size=16)
    if values.size:
        hasher.update(values.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
