from __future__ import annotations

import csv
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.text.records import Broken, Record, RecordReader
from weft.data.text.source import find_files
from weft.errors import DataError

ROWS = [{"text": "first\nline"}, {"text": 'quoted "x", é 漢字 🎉'}, {"text": ""}]


def read(path: Path, max_record_bytes: int = 10_000, **options: Any) -> list[Record | Broken]:
    files = find_files(str(path), "data.train.0").files
    return [item for file in files for item in RecordReader(file, max_record_bytes=max_record_bytes, **options)]


def values(path: Path, **options: Any) -> list[Any]:
    return [item.value if isinstance(item, Record) else (item.number, item.reason) for item in read(path, **options)]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("compression", COMPRESS)
def test_jsonl(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    lines = (
        "\ufeff" + "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS[:2]) + "\n\n  \n" + json.dumps(ROWS[2])
    )
    path.write_bytes(COMPRESS[compression](lines.encode()))
    assert values(path) == ROWS
    assert [item.number for item in read(path)] == [1, 2, 5]


@pytest.mark.parametrize("compression", COMPRESS)
def test_csv(tmp_path: Path, compression: str) -> None:
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        plain = tmp_path / "plain"
        with plain.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerows([["id", "text"], *([str(n), row["text"]] for n, row in enumerate(ROWS))])
        path = tmp_path / f"a{suffix}{compression}"
        path.write_bytes(COMPRESS[compression](plain.read_bytes()))
        assert values(path) == [{"id": str(n), **row} for n, row in enumerate(ROWS)]


@pytest.mark.parametrize("delimiter", ",;\t|")
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_delimiter_is_detected_for_any_suffix(tmp_path: Path, delimiter: str, suffix: str) -> None:
    rows = [["id", "text"], ["1", "one, two; three|four\tfive"], ["2", 'a "quoted"\nline, and'], ["3", ""]]
    path = tmp_path / f"a{suffix}"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    assert values(path) == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_csv_columns_with_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,user\n1,2,3\n")
    with pytest.raises(DataError, match=r"two columns have the name 'user'\. Rename one of them"):
        values(tmp_path / "a.csv")


def test_single_column_with_commas_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n"one, two"\nthree\n')
    assert values(tmp_path / "a.csv") == [{"text": "one, two"}, {"text": "three"}]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_array(tmp_path: Path, compression: str, indent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.data.text.records._READ_BYTES", 7)
    path = tmp_path / f"a.json{compression}"
    rows = [*ROWS, {"text": "x" * 300, "n": [1, {"a": None}]}]
    path.write_bytes(
        COMPRESS[compression](b"\xef\xbb\xbf " + json.dumps(rows, indent=indent, ensure_ascii=False).encode())
    )
    assert values(path) == rows
    path.write_bytes(COMPRESS[compression]("\n".join(json.dumps(row) for row in rows).encode()))
    assert values(path) == rows


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"[]", []),
        (b"", []),
        (b'[{"a": 1}, 2, {"a": 3}', [{"a": 1}, (2, "not an object"), {"a": 3}, (4, "invalid JSON")]),
        (b'[{"a": 1} {"a": 2}]', [{"a": 1}, (2, "invalid JSON")]),
        (b'[{"a": oops' + b" " * 100 + b"}]", [(1, "invalid JSON")]),
        (b'[{"a": "\xff"}]', [(1, "invalid UTF-8")]),
        (b'[{"a": "' + b"x" * 3000 + b'"}]', [(1, "too long")]),
    ],
)
def test_broken_json_array_has_position_and_reason(
    tmp_path: Path, content: bytes, found: list[Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr("weft.data.text.records._READ_BYTES", 64)
    (tmp_path / "a.json").write_bytes(content)
    assert values(tmp_path / "a.json", max_record_bytes=1000) == found


def test_binary_text_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text" + bytes(30))
    assert values(tmp_path / "a.txt") == [(1, "binary, not text (NUL bytes)")]


def test_parquet_reads_only_the_required_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [row["text"] for row in ROWS], "n": [1, 2, 3]}), path, row_group_size=2)
    assert values(path) == [{**row, "n": n} for n, row in enumerate(ROWS, 1)]
    assert values(path, columns=["text", "not there"]) == ROWS


def test_long_parquet_rows_are_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    turns = [[{"role": "user", "content": "é" * count}] for count in (10, 200, 80)]
    columns = {"text": ["x" * count for count in (10, 10, 500)], "turns": turns, "n": [1, 2, 3]}
    words = pa.array(["w" * 250, "b", "c"]).dictionary_encode()  # each row refers to all words
    pq.write_table(pa.table({**columns, "word": words}), path)
    found = read(path, max_record_bytes=300)
    assert [(item.number, getattr(item, "reason", "")) for item in found] == [(1, ""), (2, "too long"), (3, "too long")]
    assert found[1].excerpt.startswith("x" * 10)
    assert len(read(path, max_record_bytes=1000)) == 3
    assert values(path, max_record_bytes=1000, columns=["n"]) == [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.mark.parametrize("compression", COMPRESS)
@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=400),
    piece_bytes=st.integers(8, 64),
)
def test_text_chunks_concatenate_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, compression: str, text: str, piece_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("t") / f"a.txt{compression}"
    path.write_bytes(COMPRESS[compression](text.encode()))
    pieces = read(path, piece_bytes=piece_bytes)
    assert all(isinstance(piece, Record) for piece in pieces)
    assert "".join(piece.value for piece in pieces if isinstance(piece, Record)) == text.removeprefix("\ufeff")
    assert [piece.part for piece in pieces if isinstance(piece, Record)] == list(range(len(pieces)))
    assert [piece.last for piece in pieces if isinstance(piece, Record)] == [False] * (len(pieces) - 1) + [True] * bool(
        pieces
    )
    assert all(len(piece.value.encode()) <= 2 * piece_bytes for piece in pieces if isinstance(piece, Record))


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabcdefgh\n\xef\xbb\xbfabcdefgh\n")
    assert values(tmp_path / "a.txt", piece_bytes=1) == ["abcdefgh\n", "\ufeffabcdefgh\n"]


def test_text_is_split_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n}\n" for n in range(100)))
    assert all(piece.endswith("\n") for piece in values(path, piece_bytes=50))
    assert len(values(path, piece_bytes=50)) > 10


def test_broken_lines_have_number_reason_and_excerpt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(
        b'{"text": "ok"}\n{"text": oops}\n[1, 2]\n{"text": "\xff"}\n{"text": "' + b"x" * 500 + b'"}\n'
        b'{"text": "fine"}\n' + b'{"a": ' + deep + b"\n"
    )
    found = read(path, max_record_bytes=300)
    assert [(item.number, item.reason) for item in found if isinstance(item, Broken)] == [
        (2, "invalid JSON"), (3, "not an object"), (4, "invalid UTF-8"), (5, "too long"), (7, "too long"),
    ]  # fmt: skip
    assert [item.value for item in found if isinstance(item, Record)] == [{"text": "ok"}, {"text": "fine"}]
    assert next(item for item in found if isinstance(item, Broken)).excerpt == '{"text": oops}\n'
    assert all(len(item.excerpt) <= 200 for item in found if isinstance(item, Broken))
    assert values(path, max_record_bytes=10**6)[-1] == (7, "invalid JSON")


def test_csv_field_size_limit_of_other_readers_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,ok\n2," + "y" * 400 + "\n")
    before = csv.field_size_limit()
    for _ in read(path, max_record_bytes=300):
        assert csv.field_size_limit() == before


def test_broken_csv_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,ok\n2\n3,\xff\n4,a,b\n5," + b"y" * 400 + b'\n6,fine\n7,"never closed\n8,z\n')
    assert values(path, max_record_bytes=300) == [
        {"id": "1", "text": "ok"}, (3, "wrong number of columns"), (4, "invalid UTF-8"), (5, "wrong number of columns"),
        (6, "too long"), {"id": "6", "text": "fine"}, {"id": "7", "text": "never closed\n8,z\n"},
    ]  # fmt: skip


def test_text_that_is_not_utf8_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1") * 10)
    assert values(tmp_path / "a.txt") == [(1, "invalid UTF-8")]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    complete = COMPRESS[suffix]("\n".join(json.dumps({"text": f"line {n * 7919}"}) for n in range(2000)).encode())
    path = tmp_path / f"a.jsonl{suffix}"
    for content in (complete[: len(complete) // 2], complete[:-1], b"not compressed at all, but long enough"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl\.\w+: .*Repair it or leave it out\."):
            read(path)
    path.write_bytes(complete + complete)
    assert len(read(path)) == 3999


def test_damaged_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match=r"a\.parquet: the file is damaged or truncated"):
        read(path)


def test_position_grows_to_the_size_of_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 50] * 1000}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 1000)
    for name in ("a.parquet", "a.jsonl"):
        file = find_files(str(tmp_path / name), "f").files[0]
        reader = RecordReader(file, max_record_bytes=1000)
        positions = [reader.position() for _ in reader]
        assert positions == sorted(positions)
        assert reader.position() == file.size_bytes


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_decompression_bomb_is_one_long_record_in_linear_time(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(COMPRESS[compression](b"a" * 2**27 + b'\n{"text": "next"}\n'))
    positions: list[int] = []
    began = time.process_time()
    assert values(path, on_progress=positions.append) == [(1, "too long"), {"text": "next"}]
    assert time.process_time() - began < 20  # a quadratic search took minutes
    assert len(positions) > 50


def test_zstd_frames_are_concatenated_and_damaged_ones_refused(tmp_path: Path) -> None:
    path, compress = tmp_path / "a.jsonl.zst", COMPRESS[".zst"]
    data = compress(b'{"text": "one"}\n') + compress(b"") + compress(b'{"text": "two"}\n')
    path.write_bytes(data)
    assert values(path) == [{"text": "one"}, {"text": "two"}]
    far = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=31)).compressobj()
    for bad in (data[:-1], data[:10], data + b"more", b"no zstd", far.compress(b"x" * 99) + far.flush()):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"a\.jsonl\.zst: the file is damaged or truncated"):
            values(path)
