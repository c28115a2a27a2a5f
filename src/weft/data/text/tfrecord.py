"""TFRecord files of tf.train.Example messages, read without TensorFlow.

A record is a length, the length's checksum, the message and its checksum. Checksums are masked CRC-32C. An Example maps
names of features to lists of bytes, floats or integers, in the wire format of protocol buffers.
"""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import struct
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

_POLYNOMIAL, _MASK_DELTA = 0x82F63B78, 0xA282EAD8
_BLOCK_BYTES = 1024
_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_SKIP_BYTES = 2**20
#: Records that show which features are lists.
_FIRST_EXAMPLES = 32
_GZIP = b"\x1f\x8b"


class BadFile(Exception):
    """Raised for a damaged or truncated file, after which no record can be found."""


class BadExample(Exception):
    """Raised for bytes that are not a tf.train.Example."""


@functools.cache
def _tables() -> np.ndarray:
    """Return the state after each byte and k zero bytes, from state 0. (block bytes, 256), by k."""
    states = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        states = np.where(states & 1, states >> 1 ^ _POLYNOMIAL, states >> 1).astype(np.uint32)
    tables = np.empty((_BLOCK_BYTES, 256), np.uint32)
    tables[0] = states
    for k in range(1, _BLOCK_BYTES):
        tables[k] = states[tables[k - 1] & 255] ^ tables[k - 1] >> 8
    return tables


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    tables, state = _tables(), 0xFFFFFFFF
    values = np.frombuffer(data, np.uint8)
    places = np.arange(_BLOCK_BYTES - 1, -1, -1)
    for start in range(0, len(values), _BLOCK_BYTES):
        block = values[start : start + _BLOCK_BYTES].copy()
        if len(block) < 4:
            for byte in block.tolist():
                state = int(tables[0][(state ^ byte) & 255]) ^ state >> 8
            break
        # The checksum is linear: the state so far acts like a change of the next four bytes.
        block[:4] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)
        state = int(np.bitwise_xor.reduce(tables[places[_BLOCK_BYTES - len(block) :], block]))
    return state ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """Return the masked form of a checksum that TFRecord files store."""
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


def read_examples(
    stream: io.BufferedReader, max_bytes: int, columns: Collection[str] | None = None
) -> Iterator[tuple[dict[str, Any] | bytes, str]]:
    """Yield the features of each record with "", or its message and the reason why it is unusable.

    A feature with one value in each of the first records is a single value, and else a list.

    max_bytes, columns: see `read_frames` and `parse_example`. Raises BadFile as `read_frames`.
    """

    def parsed(message: bytes, reason: str) -> tuple[dict[str, list[Any]] | bytes, str]:
        try:
            return (message, reason) if reason else (parse_example(message, columns), "")
        except BadExample:
            return message, "not a tf.train.Example"

    frames = read_frames(stream, max_bytes)
    first: list[tuple[dict[str, list[Any]] | bytes, str]] = []
    damage: BadFile | None = None
    try:
        first.extend(parsed(*frame) for frame in itertools.islice(frames, _FIRST_EXAMPLES))
    except BadFile as error:
        damage = error
    found = [one for one, _ in first if not isinstance(one, bytes)]
    lists = {key for one in found for key, values in one.items() if len(values) != 1}
    for one, reason in itertools.chain(first, (parsed(*frame) for frame in frames)):
        if isinstance(one, bytes):
            yield one, reason
        else:
            yield {key: each[0] if len(each) == 1 and key not in lists else each for key, each in one.items()}, ""
    if damage is not None:
        raise damage


def read_frames(stream: io.BufferedReader, max_bytes: int) -> Iterator[tuple[bytes, str]]:
    """Yield the message of each record, and the reason why it is unusable, or "".

    A file that is compressed with gzip is recognized by its first bytes. Of a message of more than `max_bytes`, only
    the first bytes are yielded.

    Raises:
        BadFile: if a length is damaged, or the file ends within a record.
    """
    start = stream.peek(_HEADER.size)[: _HEADER.size]
    if start.startswith(_GZIP) and _length_of(start) is None:
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream))  # pyright: ignore[reportArgumentType] - as in records
    header = stream.read(_HEADER.size)
    number = 0
    while header:
        number += 1
        length = _length_of(header)
        if length is None:
            raise BadFile(f"the length of record {number} is damaged")
        message = stream.read(min(length, max_bytes))
        rest = length - len(message)
        while rest and (skipped := stream.read(min(rest, _SKIP_BYTES))):
            rest -= len(skipped)
        checksum = stream.read(_CHECKSUM.size)
        if rest or len(checksum) < _CHECKSUM.size:
            raise BadFile(f"it ends within record {number}")
        if length > max_bytes:
            yield message, "too long"
        else:
            yield message, "" if _CHECKSUM.unpack(checksum)[0] == masked(crc32c(message)) else "wrong checksum"
        header = stream.read(_HEADER.size)


def _length_of(header: bytes) -> int | None:
    """Return the length in a record's header, or None if the header is damaged."""
    if len(header) < _HEADER.size:
        return None
    length, checksum = _HEADER.unpack(header)
    return length if checksum == masked(crc32c(header[:8])) else None


def parse_example(message: bytes, columns: Collection[str] | None = None) -> dict[str, list[Any]]:
    """Return the features of a tf.train.Example: lists of text, bytes that are not UTF-8, floats or integers.

    columns: names of the features to return, or None for all.

    Raises:
        BadExample: if the bytes are not an Example. A SequenceExample is not one.
    """
    features: dict[str, list[Any]] = {}
    for number, part in _fields(memoryview(message)):
        if number != 1:
            raise BadExample
        for inner, entry in _fields(_message(part)):
            if inner != 1:
                raise BadExample
            pair = dict(_fields(_message(entry)))
            try:
                name = str(_message(pair.get(1, memoryview(b""))), "utf-8")
            except UnicodeDecodeError:
                raise BadExample from None
            if columns is None or name in columns:
                features[name] = _values(_message(pair.get(2, memoryview(b""))))
    return features


def _message(value: float | memoryview) -> memoryview:
    if not isinstance(value, memoryview):
        raise BadExample
    return value


def _values(feature: memoryview) -> list[Any]:
    """Return the values of a tf.train.Feature, from its last bytes_list, float_list or int64_list."""
    kinds = [(number, _message(part)) for number, part in _fields(feature)]
    if not kinds:
        return []
    number, listed = kinds[-1]
    values: list[Any] = []
    for inner, part in _fields(listed):
        if inner != 1 or number not in (1, 2, 3):
            raise BadExample
        if number == 1:
            values.append(_text(bytes(_message(part))))
        elif number == 2:
            if not isinstance(part, memoryview | float) or (isinstance(part, memoryview) and len(part) % 4):
                raise BadExample
            values += [part] if isinstance(part, float) else np.frombuffer(part, "<f4").tolist()
        elif isinstance(part, int):
            values.append(_signed(part))
        else:
            values += _packed(_message(part))
    return values


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _packed(part: memoryview) -> list[int]:
    """Return the integers of a packed list: seven bits per byte, lowest first; the last byte of each is below 128."""
    digits = np.frombuffer(part, np.uint8)
    if not len(digits):
        return []
    ends = np.flatnonzero(digits < 128)
    if not len(ends) or ends[-1] != len(digits) - 1:
        raise BadExample
    starts = np.concatenate([[0], ends[:-1] + 1])
    counts = ends + 1 - starts
    if counts.max() > 10:
        raise BadExample
    places = np.arange(len(digits)) - np.repeat(starts, counts)
    bits = (digits & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64).tolist()


def _fields(message: memoryview) -> Iterator[tuple[int, float | memoryview]]:
    """Yield the number and value of each field: an integer, a float of 4 bytes, or bytes of a string, message or list.

    Raises BadExample for other kinds of fields, which an Example does not have.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind == 5:
            size = 4
        else:
            raise BadExample
        if place + size > len(message):
            raise BadExample
        part = message[place : place + size]
        yield key >> 3, part if kind == 2 else float(np.frombuffer(part, "<f4")[0])
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Return the integer at an index, and the index after it."""
    value = 0
    for count in range(10):
        if place + count >= len(message):
            raise BadExample
        byte = message[place + count]
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value & (2**64 - 1), place + count + 1
    raise BadExample
