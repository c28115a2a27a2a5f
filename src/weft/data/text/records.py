"""Readers of record files: text, jsonl, json, csv, parquet and tfrecord.

The delimiter of a csv file is detected in its first rows.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from weft.data.text.source import SourceFile, unique_columns
from weft.data.text.tfrecord import BadFile, read_examples
from weft.errors import DataError
from weft.units import format_bytes

DELIMITERS = ",;\t|"
_MAX_ROWS = 50


def sniff_delimiter(head: bytes, usual: str) -> str:
    """Return the delimiter for which the largest share of rows has as many columns as the header.

    Delimiters that do not occur in the header are ignored.

    head: the first bytes of the file. usual: the default, which is chosen in a tie and if no delimiter is found.
    """
    lines = head.decode("utf-8-sig", "replace").splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        lines.pop()  # the last row is incomplete
    shares = {delimiter: _share(lines, delimiter) for delimiter in (usual, *DELIMITERS)}
    return max(shares, key=lambda delimiter: (shares[delimiter], delimiter == usual))


def _share(lines: list[str], delimiter: str) -> float:
    """Return the share of the rows with as many columns as the header.

    Return 0 if the header is one column, or the rows are not valid csv.
    """
    rows: list[list[str]] = []
    try:
        for row in csv.reader(lines, delimiter=delimiter):
            if row:
                rows.append(row)
            if len(rows) > _MAX_ROWS:
                break
    except csv.Error:
        return 0.0
    if not rows or len(rows[0]) < 2:
        return 0.0
    return sum(len(row) == len(rows[0]) for row in rows) / len(rows)


# Elements of a JSON array, one by one, without the full file in memory.

_READ_BYTES = 2**20
#: Escapes and ends of strings, and structural characters outside strings.
_IN_STRING, _OUTSIDE = re.compile(r'(?s)\\.|"'), re.compile(r'[][{},"]')
_SPACE = " \t\r\n"


class BadArray(Exception):
    """Raised if a JSON array cannot be read further. `excerpt` is the text at which reading failed."""

    def __init__(self, reason: str, excerpt: str):
        super().__init__(reason)
        self.reason, self.excerpt = reason, excerpt


class _Text:
    """Text buffer of a UTF-8 stream: text is appended as it is read, and removed from the start once it is consumed.

    `position` is the index of the next character.
    """

    def __init__(self, stream: BinaryIO, max_chars: int):
        self._stream, self._max_chars = stream, max_chars
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer, self.position, self.ended = "", 0, False

    def grow(self) -> bool:
        """Drop the consumed text and read more. Return False at the end of the file.

        Block sizes double, so that the total work is linear. Raises BadArray if more than `max_chars` are not consumed
        yet, or the text is not valid UTF-8.
        """
        if len(self.buffer) - self.position > self._max_chars:
            raise BadArray("too long", self.buffer[self.position : self.position + 200])
        if self.ended:
            return False
        block = self._stream.read(max(_READ_BYTES, len(self.buffer) - self.position))
        self.ended = not block
        try:
            more = self._decoder.decode(block, final=self.ended)
        except UnicodeDecodeError as error:
            raise BadArray("invalid UTF-8", repr(error.object[error.start : error.start + 80])) from error
        self.buffer, self.position = self.buffer[self.position :] + more, 0
        return not self.ended

    def next_sign(self) -> str:
        """Return the next character that is not white space, or "" at the end of the file.

        Only the white space before it is consumed.
        """
        while True:
            while self.position < len(self.buffer) and self.buffer[self.position] in _SPACE:
                self.position += 1
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self.grow():
                return ""


def read_array(stream: BinaryIO, max_chars: int) -> Iterator[Any]:
    """Yield the elements of the array in `stream`. An element that cannot be read is yielded as a BadArray.

    max_chars: maximum length of one element.

    Raises:
        BadArray: if the text is not an array or is truncated, or reading cannot continue after an element.
    """
    text, decoder = _Text(stream, max_chars), json.JSONDecoder()
    if text.next_sign() != "[":
        raise BadArray("not an array", text.buffer[:200])
    text.position += 1
    if text.next_sign() == "]":
        return
    while True:
        try:
            yield _element(text, decoder)
        except BadArray as error:
            _skip_element(text, error)
            yield error
        sign = text.next_sign()
        text.position += 1
        if sign == "]":
            return
        if sign != ",":
            raise BadArray("invalid JSON", text.buffer[max(0, text.position - 1) :][:200])


def _element(text: _Text, decoder: json.JSONDecoder) -> Any:
    text.next_sign()
    while True:
        try:
            value, end = decoder.raw_decode(text.buffer, text.position)
        except (ValueError, RecursionError) as error:
            if not _may_be_incomplete(error, len(text.buffer)) or not text.grow():
                raise BadArray("invalid JSON", text.buffer[text.position : text.position + 200]) from error
            continue
        size = end - text.position
        # A number at the end of the buffer may be incomplete.
        if end < len(text.buffer) or not text.grow():
            text.position += size
            return value


def _skip_element(text: _Text, error: BadArray) -> None:
    """Move to the character after an element, by counting brackets. Raise `error` if the file ends before that."""
    depth, in_string = 0, False
    while True:
        found = (_IN_STRING if in_string else _OUTSIDE).search(text.buffer, text.position)
        if found is None:
            # A backslash at the end of the buffer escapes the next character, which has not been read yet.
            text.position = len(text.buffer) - text.buffer.endswith("\\")
            if not text.grow():
                raise error
            continue
        sign = found[0]
        if depth == 0 and sign in (",", "]", "}"):
            text.position = found.start()
            return
        text.position = found.end()
        if sign == '"':
            in_string = not in_string
        elif sign in ("[", "{", "]", "}"):
            depth += 1 if sign in ("[", "{") else -1


def _may_be_incomplete(error: Exception, size: int) -> bool:
    """Return True if the parse error may be due to text that has not been read yet.

    The position of an error for an unterminated string is the start of the string. Other errors are where parsing
    stopped.

    size: number of characters read so far.
    """
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos > size - 64


# Record streams of files, in bounded memory for any file size. Unreadable records are `Broken`.

_EXCERPT_CHARS = 200
#: Reason for rejecting a chunk of a text file that has NUL bytes.
BINARY = "binary, not text (NUL bytes)"
#: Maximum bytes of a record that is skipped because it is too long.
_MOST_SKIPPED_BYTES = 2**34
_SNIFF_BYTES = 65536
_ENCODING_BYTES = 256


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a file: a dict of columns, or a chunk of a text file.

    Attributes:
        file: name of the file.
        number: number of the line, row or chunk, from 1.
        value: the columns, or the text.
        part: index of a chunk in its file. 0 for other records.
        last: whether it is the last chunk of its file. True for other records.
        filled: whether it is a row of a table, whose objects have the keys of all rows, with null for missing values.
    """

    file: str
    number: int
    value: Any
    part: int = 0
    last: bool = True
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """An unusable record. `reason` is one of a few texts, so that records can be counted by reason."""

    file: str
    number: int
    reason: str
    excerpt: str

    @classmethod
    def of(cls, file: str, number: int, reason: str, value: object) -> Broken:
        """Return an invalid record with an excerpt of its value.

        Args:
            file: name of the file.
            number: number of the record in the file.
            reason: why it cannot be used.
            value: the record. Bytes are decoded with replacement characters.
        """
        try:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)
        except (RecursionError, ValueError):  # objects nested too deeply, numbers with too many digits
            text = ""
        return cls(file, number, reason, text[:_EXCERPT_CHARS])


class RecordReader:
    """Iterator over the records of one file.

    `delimiter` is set while a csv file is read, if its delimiter differs from the default of its suffix.

    Args:
        file: a file of any format of FORMATS, compressed or not.
        max_record_bytes: longer lines of jsonl, array elements of json, and rows of csv and parquet are yielded as
            Broken. Only rows of parquet are read into memory first.
        piece_bytes: approximate size of the chunks of text files, which end at line ends if possible.
        columns: columns of a parquet or tfrecord file to read, or None for all.
        on_progress: called with `position()` at intervals while a line of jsonl that is too long is skipped.

    Raises:
        DataError: during iteration, if the file is damaged or cannot be read, or has a line of more than 16 GiB.
    """

    def __init__(
        self,
        file: SourceFile,
        *,
        max_record_bytes: int,
        piece_bytes: int = _READ_BYTES,
        columns: Sequence[str] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ):
        self._file = file
        self._max_record_bytes = max_record_bytes
        # A chunk must have room for one character.
        self._piece_bytes = max(8, piece_bytes)
        self._columns = list(columns) if columns is not None else None
        self._on_progress = on_progress
        self._position: Callable[[], int] = lambda: 0
        self.delimiter = ""

    def position(self) -> int:
        """Return the number of bytes read so far, for progress reports. It is approximate for parquet."""
        return min(self._position(), self._file.size_bytes)

    def __iter__(self) -> Iterator[Record | Broken]:
        if self._file.format == "parquet":
            yield from self._parquet()
            return
        readers = {"text": self._text, "jsonl": self._jsonl, "json": self._json, "csv": self._csv}
        readers["tfrecord"] = self._tfrecord
        try:
            with self._file.path.open("rb") as raw:
                self._position = raw.tell
                yield from readers[self._file.format](_decompressed(raw, self._file.compression))
                self._position = lambda: self._file.size_bytes
        except (EOFError, zlib.error, gzip.BadGzipFile, BadFile) as error:
            raise self._damaged(error) from error
        except OSError as error:
            if error.errno is None:  # from pyarrow, for compressed data
                raise self._damaged(error) from error
            raise DataError(
                f"{self._file.name}: cannot be read ({error.strerror or error}). Repair it or leave it out."
            ) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self._file.name}: the file is damaged or truncated ({error}). Repair it or leave it out.")

    def _text(self, stream: BinaryIO) -> Iterator[Record | Broken]:
        name, part = self._file.name, 0
        previous: bytes | None = None
        for piece in _chunks(stream, self._piece_bytes):
            if previous is not None:
                yield self._text_record(name, part, previous, last=False)
                part += 1
            previous = piece.removeprefix(b"\xef\xbb\xbf") if part == 0 and previous is None else piece
        if previous:
            yield self._text_record(name, part, previous, last=True)

    @staticmethod
    def _text_record(name: str, part: int, piece: bytes, *, last: bool) -> Record | Broken:
        if b"\0" in piece:
            return Broken.of(name, part + 1, BINARY, piece)
        try:
            return Record(name, part + 1, piece.decode("utf-8"), part, last)
        except UnicodeDecodeError as error:
            return Broken.of(name, part + 1, "invalid UTF-8", piece[max(0, error.start - 80) :])

    def _jsonl(self, stream: BinaryIO) -> Iterator[Record | Broken]:
        name, limit = self._file.name, self._max_record_bytes
        number = 0
        while line := stream.readline(limit + 1):
            number += 1
            if len(line) > limit and not line.endswith(b"\n"):
                self._skip_line(stream, number)
                yield Broken.of(name, number, "too long", line[: 4 * _EXCERPT_CHARS])
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.isspace():
                continue
            yield _json_record(name, number, line)

    def _skip_line(self, stream: BinaryIO, number: int) -> None:
        skipped = 0
        while (rest := stream.readline(_READ_BYTES)) and not rest.endswith(b"\n"):
            skipped += len(rest)
            if skipped > _MOST_SKIPPED_BYTES:
                raise DataError(
                    f"{self._file.name}: line {number} has more than {format_bytes(_MOST_SKIPPED_BYTES)}. "
                    "Write one record per line, or leave the file out."
                )
            if self._on_progress is not None:
                self._on_progress(self.position())

    def _json(self, stream: BinaryIO) -> Iterator[Record | Broken]:
        """Yield the elements of an array of objects. A file that does not start with an array is read as JSON lines."""
        head = stream.read(64)
        joined = io.BufferedReader(_Joined(head, stream), _READ_BYTES)
        if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
            yield from self._jsonl(joined)
            return
        name, number = self._file.name, 0
        try:
            for value in read_array(joined, self._max_record_bytes):
                number += 1
                if isinstance(value, BadArray):
                    yield Broken.of(name, number, value.reason, value.excerpt)
                    continue
                yield (
                    Record(name, number, value)
                    if isinstance(value, dict)
                    else Broken.of(name, number, "not an object", value)
                )
        except BadArray as error:
            yield Broken.of(name, number + 1, error.reason, error.excerpt)

    def _tfrecord(self, stream: BinaryIO) -> Iterator[Record | Broken]:
        examples = read_examples(cast("io.BufferedReader", stream), self._max_record_bytes, self._columns)
        for number, (value, reason) in enumerate(examples, start=1):
            if isinstance(value, bytes):
                yield Broken.of(self._file.name, number, reason, value[: 4 * _EXCERPT_CHARS])
            else:
                yield Record(self._file.name, number, value)

    def _csv(self, stream: BinaryIO) -> Iterator[Record | Broken]:
        name = self._file.name
        usual = "\t" if self._file.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(".tsv") else ","
        head = stream.read(_SNIFF_BYTES)
        delimiter = sniff_delimiter(head, usual)
        self.delimiter = delimiter if delimiter != usual else ""
        text = io.TextIOWrapper(
            io.BufferedReader(_Joined(head, stream), _READ_BYTES),
            encoding="utf-8-sig",
            errors="surrogateescape",
            newline="",
        )
        rows = csv.reader(text, delimiter=delimiter)
        header: list[str] | None = None
        number = 0
        while True:
            number += 1
            try:
                row = self._next_row(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Broken.of(name, rows.line_num, "too long" if "limit" in str(error) else "invalid CSV", error)
                continue
            if header is None:
                header = unique_columns(name, row)
            elif row:
                yield self._csv_record(rows.line_num, header, row)

    def _next_row(self, rows: Iterator[list[str]]) -> list[str]:
        """Return the next row. A field without a closing quote ends at the csv reader's size limit."""
        before = csv.field_size_limit(self._max_record_bytes)  # global to the process, so it is restored
        try:
            return next(rows)
        finally:
            csv.field_size_limit(before)

    def _csv_record(self, number: int, header: list[str], row: list[str]) -> Record | Broken:
        name = self._file.name
        if len(row) != len(header):
            return Broken.of(name, number, "wrong number of columns", row)
        if any(not field.isascii() and not is_valid_text(field) for field in row):
            return Broken.of(name, number, "invalid UTF-8", ",".join(row).encode("utf-8", "surrogateescape"))
        if sum(map(len, row)) > self._max_record_bytes:
            return Broken.of(name, number, "too long", ",".join(field[:_EXCERPT_CHARS] for field in row))
        return Record(name, number, dict(zip(header, row, strict=True)))

    def _parquet(self) -> Iterator[Record | Broken]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        name, size_bytes, number = self._file.name, self._file.size_bytes, 0
        limit = self._max_record_bytes
        try:
            # Columns are read through a buffer and not as full chunks, since one row group may be larger than memory.
            with pq.ParquetFile(self._file.path, buffer_size=_READ_BYTES, pre_buffer=False) as parquet:
                num_rows = max(1, parquet.metadata.num_rows)
                self._position = lambda: size_bytes * number // num_rows
                known = set(parquet.schema_arrow.names)
                columns = [column for column in self._columns if column in known] if self._columns is not None else None
                for batch in parquet.iter_batches(batch_size=128, columns=columns, use_threads=False):
                    may_exceed = batch.nbytes > limit
                    for row in _rows(batch):
                        number += 1
                        if isinstance(row, _BadRow):
                            yield Broken.of(name, number, row.reason, row.excerpt)
                        elif may_exceed and _num_bytes(row) > limit:
                            excerpt = ",".join(str(value)[:_EXCERPT_CHARS] for value in row.values())
                            yield Broken.of(name, number, "too long", excerpt)
                        else:
                            yield Record(name, number, row, filled=True)
        except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error


def _num_bytes(value: Any) -> int:
    """Return the bytes of a row's texts, with 8 for each other value. Names of columns and keys are not counted."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict):
        value = list(cast("dict[Any, Any]", value).values())
    return sum(map(_num_bytes, cast("list[Any]", value))) if isinstance(value, list | tuple) else 8


@dataclass(frozen=True, slots=True)
class _BadRow:
    """A row that cannot be converted to Python values. `excerpt` is the bytes or the error message."""

    reason: str
    excerpt: object


def _rows(batch: Any) -> Iterator[dict[str, Any] | _BadRow]:
    try:
        rows: list[dict[str, Any] | _BadRow] = batch.to_pylist()
    except (ValueError, OverflowError, TypeError, KeyError, ImportError):
        rows = [_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
    yield from rows


def _row(batch: Any) -> dict[str, Any] | _BadRow:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _BadRow("invalid UTF-8", bytes(error.object))
    except (ValueError, OverflowError, TypeError, KeyError, ImportError) as error:  # such as a date in the year 300,000
        return _BadRow("invalid value", error)


def _json_record(name: str, number: int, line: bytes) -> Record | Broken:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Broken.of(name, number, "invalid UTF-8", line)
    except (ValueError, RecursionError):
        return Broken.of(name, number, "invalid JSON", line)
    if not isinstance(value, dict):
        return Broken.of(name, number, "not an object", line)
    return Record(name, number, value)


def wide_encoding(file: SourceFile) -> str:
    """Return "UTF-16" or "UTF-32" if the first bytes of a file show that encoding, else ""."""
    if file.format in ("parquet", "tfrecord"):
        return ""
    try:
        with file.path.open("rb") as raw:
            head = _decompressed(raw, file.compression).read(_ENCODING_BYTES)
    except (OSError, EOFError, zlib.error):
        return ""  # reading it reports the damage
    if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "UTF-32"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    # Without a byte order mark: every other byte of plain letters is zero.
    halves = head[0::2], head[1::2]
    zeros = [half.count(0) / max(1, len(half)) for half in halves]
    return "UTF-16" if len(head) >= 8 and max(zeros) > 0.9 and min(zeros) < 0.1 else ""


def is_valid_text(text: str) -> bool:
    """Return False for text with an unpaired surrogate, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    if compression == "gz":
        file = gzip.GzipFile(fileobj=raw)
        return io.BufferedReader(file, _READ_BYTES)  # pyright: ignore[reportArgumentType] - the stub of its mode is narrower
    if compression == "zst":
        import pyarrow as pa

        # Unlike the stream reader of the zstandard package, it raises an error for a truncated file.
        stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(stream, _READ_BYTES)
    return raw


class _Joined(io.RawIOBase):
    """A stream that returns bytes that were already read, then the rest of another stream."""

    def __init__(self, head: bytes, rest: BinaryIO):
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        taken = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


def _chunks(stream: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
    """Yield chunks of about 1 to 2 times `piece_bytes`, split after a newline if possible, else between characters.

    The last chunk may be shorter.
    """
    buffer = bytearray()
    while block := stream.read(_READ_BYTES):
        buffer += block
        start = 0
        while len(buffer) - start > 2 * piece_bytes:
            cut = buffer.find(b"\n", start + piece_bytes - 1, start + 2 * piece_bytes) + 1
            cut = cut or _character_border(buffer, start + piece_bytes)
            yield bytes(buffer[start:cut])
            start = cut
        del buffer[:start]
    if buffer:
        yield bytes(buffer)


def _character_border(buffer: bytearray, cut: int) -> int:
    for back in range(4):
        if buffer[cut - back] & 0xC0 != 0x80:
            return cut - back
    return cut
