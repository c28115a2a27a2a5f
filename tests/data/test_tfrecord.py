"""TFRecord files of tf.train.Example, made by hand: values, checksums, and damage that breaks only its record."""

from __future__ import annotations

import contextlib
import gzip
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.text.documents import read_document
from weft.data.text.records import Broken, Record, RecordReader
from weft.data.text.schema import detect_schema
from weft.data.text.source import find_files
from weft.data.text.tfrecord import BadExample, crc32c, masked, parse_example
from weft.errors import DataError


def varint(value: int) -> bytes:
    value, out = value & (2**64 - 1), bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def feature(values: list) -> bytes:
    if values and isinstance(values[0], float):
        return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
    if values and isinstance(values[0], int):
        return field(3, field(1, b"".join(map(varint, values))))
    return field(1, b"".join(field(1, one if isinstance(one, bytes) else one.encode()) for one in values))


def example(**features: list) -> bytes:
    entries = (field(1, field(1, name.encode()) + field(2, feature(each))) for name, each in features.items())
    return field(1, b"".join(entries))


def frame(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    sums = (struct.pack("<I", masked(crc32c(part))) for part in (length, message))
    return length + next(sums) + message + next(sums)


def read(path, content: bytes, max_record_bytes: int = 10**6, columns=None):
    path.write_bytes(content)
    return list(RecordReader(find_files(str(path), "d").files[0], max_record_bytes=max_record_bytes, columns=columns))


def test_checksums_are_those_of_the_standard():
    # RFC 3720, appendix B.4.
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


def bitwise(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ 0x82F63B78 if state & 1 else state >> 1
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1023, 1024, 1025, 1027, 1028, 3000])
def test_checksums_of_all_lengths_equal_those_bit_by_bit(size):
    data = random.Random(size).randbytes(size)
    assert crc32c(data) == bitwise(data)


def test_values_of_all_kinds_are_read(tmp_path):
    rows = [
        example(
            text=["a ☕"], ids=[1, -2, 2**62], score=[0.5], label=[3], raw=[b"\xff\xfe"], words=["x", "y"], none=[]
        ),
        example(text=["b"], ids=[7], score=[1.5], label=[-1], raw=[b"\x80"], words=["z"], none=[]),
    ]
    found = read(tmp_path / "d.tfrecord", b"".join(map(frame, rows)))
    assert [one.value for one in found] == [
        {
            "text": "a ☕",
            "ids": [1, -2, 2**62],
            "score": 0.5,
            "label": 3,
            "raw": b"\xff\xfe",
            "words": ["x", "y"],
            "none": [],
        },
        {"text": "b", "ids": [7], "score": 1.5, "label": -1, "raw": b"\x80", "words": ["z"], "none": []},
    ]
    only = read(tmp_path / "d.tfrecord", b"".join(map(frame, rows)), columns=["label"])
    assert [one.value for one in only] == [{"label": 3}, {"label": -1}]


def test_lists_that_are_not_packed_are_read():
    numbers = b"".join(varint(1 << 3) + varint(one) for one in (5, -1))
    floats = b"".join(varint(1 << 3 | 5) + struct.pack("<f", one) for one in (0.5, 2.0))
    entries = {"n": field(3, numbers), "f": field(2, floats)}
    message = field(1, b"".join(field(1, field(1, k.encode()) + field(2, v)) for k, v in entries.items()))
    assert parse_example(message) == {"n": [5, -1], "f": [0.5, 2.0]}


@pytest.mark.parametrize("name", ["d.tfrecord.gz", "d.tfrecords", "d.tfrecord-00000-of-00002"])
def test_gzip_is_found_by_name_and_by_content(tmp_path, name):
    content = gzip.compress(frame(example(text=["a"])) + frame(example(text=["b"])))
    assert [one.value["text"] for one in read(tmp_path / name, content)] == ["a", "b"]


def test_documents_come_from_text_and_from_token_ids(tmp_path):
    for column, value in (("text", ["some text"]), ("input_ids", [3, 4, 5])):
        path = tmp_path / f"{column}.tfrecord"
        path.write_bytes(b"".join(frame(example(**{column: value})) for _ in range(3)))
        files = find_files(str(path), "data.train.0")
        schema = detect_schema(files, "auto", {}, 10**6)
        records = RecordReader(files.files[0], max_record_bytes=10**6, columns=schema.columns)
        found = [read_document(one, schema, vocab_size=100) for one in records]
        assert len(found) == 3
        assert not any(isinstance(one, Broken) for one in found)


def test_damaged_records_are_skipped_and_the_rest_is_read(tmp_path):
    good = frame(example(text=["good"]))
    flipped = bytearray(good)
    flipped[-6] ^= 1
    other = frame(b"\xff\xff\xff")
    long = frame(example(text=["x" * 5000]))
    found = read(tmp_path / "d.tfrecord", good + flipped + good + other + long + good, max_record_bytes=1000)
    reasons = [one.reason if isinstance(one, Broken) else one.value["text"] for one in found]
    assert reasons == ["good", "wrong checksum", "good", "not a tf.train.Example", "too long", "good"]
    assert [one.number for one in found] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_length_and_a_truncated_file_end_with_one_sentence(tmp_path):
    good = frame(example(text=["good"]))
    broken = bytearray(good + good)
    broken[len(good)] ^= 1
    message = r"d.tfrecord: the file is damaged or truncated \(the length of record 2 is damaged\)"
    with pytest.raises(DataError, match=message):
        read(tmp_path / "d.tfrecord", bytes(broken))
    with pytest.raises(DataError, match=r"it ends within record 2"):
        read(tmp_path / "d.tfrecord", good + good[:-3])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_no_flipped_byte_or_cut_yields_other_values(tmp_path_factory, place, change, cuts):
    rows = [example(text=[f"row {index}"], ids=[index, 300]) for index in range(3)]
    content = bytearray(b"".join(map(frame, rows)))
    place %= len(content)
    if cuts:
        del content[place:]
    else:
        content[place] ^= change
    path = tmp_path_factory.getbasetemp() / "flipped.tfrecord"
    path.write_bytes(bytes(content))
    expected = {f"row {index}": [index, 300] for index in range(3)}
    with contextlib.suppress(DataError):
        for one in RecordReader(find_files(str(path), "d").files[0], max_record_bytes=10**6):
            if isinstance(one, Record):
                assert one.value["ids"] == expected[one.value["text"]]


def one_feature(listed: bytes) -> bytes:
    return field(1, field(1, field(1, b"x") + field(2, listed)))


def test_values_of_another_wire_type_are_refused():
    single = struct.pack("<f", 1.5)
    assert parse_example(one_feature(field(2, b"\x0d" + single))) == {"x": [1.5]}  # one float that is not packed
    assert parse_example(one_feature(field(3, b"\x08\x05\x08\x06"))) == {"x": [5, 6]}
    others = [
        field(2, b"\x09" + bytes(8)),  # 8 bytes in a list of floats
        field(2, b"\x08\x05"),  # an integer in a list of floats
        field(3, b"\x0d" + single),  # a float in a list of integers
        field(1, b"\x0d" + single),  # a float in a list of bytes
    ]
    for listed in others:
        with pytest.raises(BadExample):
            parse_example(one_feature(listed))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_example_or_refused(message):
    try:
        found = parse_example(message)
    except BadExample:
        return
    assert isinstance(found, dict)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_integers_are_read_as_written(numbers):
    assert parse_example(example(n=numbers)) == {"n": numbers}
    assert np.asarray(numbers).dtype == np.int64
