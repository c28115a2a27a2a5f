"""Samples of text, pictures and sound by index: tokens, places and sizes, made from headers once, kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.encoded import Encoded
from weft.data.media.file_forms import FILE, RecordColumns, name_bytes, name_text, printable
from weft.data.media.media_kinds import SAMPLE
from weft.data.media.media_records import MediaRecords, Told, file_state, records_table, refuse_unusable
from weft.data.media.mixed.record_forms import FoundSample, mixed_at, mixed_in
from weft.data.media.mixed.sample_parts import MixedColumns
from weft.data.media.mixed.sample_tokens import TextCodec, sample_tokens
from weft.data.media.pixels import picture_size
from weft.data.media.sound import sound_size
from weft.data.prepared import RowWriter
from weft.errors import DataError

_VERSION = 1
_MOST_REASONS = 1000
_TOLD_EVERY = 512
#: Numbers that are kept of each picture or recording: whether it is a sound, its place, its size.
_NUMBERS = 9


@dataclass(frozen=True)
class MixedRecords(MediaRecords):
    """Samples of records, in the order of their files."""

    def mixed_columns(self) -> MixedColumns:
        """Return the columns of text and media."""
        picture, _, audio = self.columns.media.partition("\n")
        return MixedColumns(self.columns.label, picture, audio)

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Return the tokens of a sample, with a mark for each picture and recording."""
        return self._row(index)["tokens"]

    def learnt(self, index: int) -> NDArray[np.uint8]:
        """Return which tokens count in the loss."""
        return self._row(index)["learnt"]

    def num_media(self) -> NDArray[np.int64]:
        """Return how many pictures and recordings each sample has."""
        return self._lengths("places") // _NUMBERS

    def media_sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which sample each picture and recording belongs to, (media,), and what it is, int64 (media, 3).

        That is whether it is a sound, and two numbers of its size as `sizes` gives them.
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
        """Return for each picture or recording whether it is a sound, and its size as headers say it."""
        places = self._row(index)["places"].reshape(-1, _NUMBERS)
        return [(bool(row[0]), tuple(map(int, row[6:]))) for row in places]

    def medium(self, index: int, number: int) -> Encoded:
        """Return where a picture or a recording of a sample lies. number: among those of the sample."""
        row = self._row(index)
        _, kind, file, offset, length, own = map(int, row["places"].reshape(-1, _NUMBERS)[number][:6])
        name = name_text(row["names"]).split("\n")[number]
        return mixed_at(Path(self.files[file]), name, kind, offset, length, own, self.mixed_columns())

    def origin(self, index: int, number: int) -> list[Any]:
        """Return JSON values that change when a picture or a recording of a sample does: its file, and its place there.

        Args:
            index: of the sample.
            number: among its media.
        """
        row = self._row(index)
        _, kind, file, *place = map(int, row["places"].reshape(-1, _NUMBERS)[number][:6])
        path = Path(self.files[file])
        if kind == FILE:
            path = path.parent / name_text(row["names"]).split("\n")[number]
        return [str(path), *file_state(str(path)), *place]

    def file(self, index: int) -> str:
        """Say where a sample is found."""
        row = self._row(index)
        return printable(name_text(row["name"]))


#: Of a sample's tokens and (whether it is a sound, size) of its media: why it is left out; "": it is not.
Refuse = Callable[[NDArray[np.int32], list[tuple[bool, tuple[int, ...]]]], str]


@dataclass(frozen=True, slots=True)
class MixedSurvey:
    """What is asked of each record. columns: of text and media. codec: of texts. refuse: why a sample is left out.

    key: JSON values that decide what `refuse` answers.
    """

    columns: MixedColumns
    codec: TextCodec
    refuse: Refuse
    key: tuple[Any, ...] = ()


def find_mixed(path: str, files: Sequence[Path], survey: MixedSurvey, cache: Path, told: Told | None) -> MixedRecords:
    """Find the samples of records, and leave out what cannot be used.

    Args:
        path: what the user named.
        files: of records.
        survey: what is asked of each record.
        cache: folder that keeps the table.
        told: of (bytes read, all of them).

    Raises:
        DataError: where a file is damaged, or more than 1 % of the records cannot be used.
    """
    columns = survey.columns
    asked = RecordColumns(f"{columns.picture}\n{columns.audio}", columns.text, SAMPLE, is_text=True)
    key = ["mixed", _VERSION, [columns.text, columns.picture, columns.audio, survey.codec.digest, *survey.key]]
    table = records_table(cache, key, files, SAMPLE, _Writer(path, files, survey, told).write)
    return MixedRecords(
        path, str(table.folder), table.digest, (), (), tuple(str(file.absolute()) for file in files), asked,
        tuple(table.notes["reasons"]), _table=[table],
    )  # fmt: skip


class _Writer:
    """Looks at every record once, and writes a row for each that can be used."""

    def __init__(self, path: str, files: Sequence[Path], survey: MixedSurvey, told: Told | None):
        self._path, self._files, self._survey, self._told = path, files, survey, told

    def write(self, writer: RowWriter) -> dict[str, Any]:
        reasons: list[str] = []
        missing: list[tuple[str, list[int]]] = []
        num_bad = done = count = 0
        sizes = [file.stat().st_size for file in self._files]
        for number, file in enumerate(self._files):
            for sample in mixed_in(file, self._survey.columns):
                count += 1
                row, reason = self._row(number, sample)
                if row is not None:
                    writer.add(row)
                else:
                    num_bad += 1
                    reasons += [printable(reason)] if len(reasons) < _MOST_REASONS else []
                    if sample.missing and len(missing) < _MOST_REASONS:
                        missing.append((sample.missing, file_state(sample.missing)))
                if self._told is not None and not count % _TOLD_EVERY:
                    self._told(done + sample.offset, sum(sizes))
            done += sizes[number]
        refuse_unusable(self._path, SAMPLE, count, num_bad, reasons)
        return {"reasons": reasons, "num_bad": num_bad, "missing": missing}

    def _row(self, file: int, sample: FoundSample) -> tuple[dict[str, np.ndarray] | None, str]:
        """The row of a sample, or why it has none."""
        if sample.reason:
            return None, f"{sample.name}: {sample.reason}"
        places: list[int] = []
        sizes: list[tuple[bool, tuple[int, ...]]] = []
        try:
            for one in sample.media:
                size = (sound_size if one.is_sound else picture_size)(one.encoded)
                sizes.append((one.is_sound, size))
                places += [one.is_sound, one.kind, file, one.offset, one.length, one.number, *(*size, 0)[:3]]
        except DataError as error:
            return None, str(error)
        made = sample_tokens(sample.parts, self._survey.codec)
        if reason := self._survey.refuse(made.tokens, sizes):
            return None, f"{sample.name}: {reason}"
        names = "\n".join(one.name for one in sample.media)
        return {
            "places": np.array(places, np.int64),
            "name": name_bytes(sample.name),
            "names": name_bytes(names),
            "tokens": made.tokens,
            "learnt": made.learnt,
        }, ""
