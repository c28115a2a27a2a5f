"""Malicious images, audio and record files: each is refused in one line, and only DataError is raised."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import zstandard
from PIL import Image

from weft.data.media import audio as sound_file
from weft.data.media.audio import AudioTransform, apply_transform, sound_size
from weft.data.media.files import FoundRecord, RecordColumns, media_at, records_in
from weft.data.media.images import Encoded, Look, picture_size, read_picture
from weft.data.media.media_records import find_records
from weft.data.media.mixed_records import mixed_in
from weft.data.media.mixed_samples import MixedColumns
from weft.data.media.records import SOUND
from weft.data.text.records import Broken, RecordReader
from weft.data.text.source import find_files
from weft.errors import DataError

LOOK = Look(side=8)


def encoded_picture(form: str = "PNG", size: tuple[int, int] = (24, 16), **options: object) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(out, form, **options)  # pyright: ignore[reportArgumentType]
    return out.getvalue()


def in_memory(data: bytes) -> Encoded:
    return Encoded("x", held=data)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("data", [EPS, b"\xc5\xd0\xd3\xc6" + bytes(40) + EPS, b"P6 4294967295 4294967295 255 "])
def test_formats_that_start_programs_and_absurd_sizes_are_not_opened(tmp_path: Path, monkeypatch, data: bytes) -> None:
    script = tmp_path / "gs"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "cat.jpg").write_bytes(data)
    for read in (picture_size, lambda file: read_picture(file, LOOK)):
        with pytest.raises(DataError, match=r"cat\.jpg: it (cannot be read as an image|has )"):
            read(tmp_path / "cat.jpg")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_common_image_formats_are_read(form: str) -> None:
    assert picture_size(in_memory(encoded_picture(form))) == (24, 16)
    assert read_picture(in_memory(encoded_picture(form)), LOOK).shape == (3, 8, 8)


def test_jpeg_of_many_scans_is_refused_by_header_and_decoder() -> None:
    data = encoded_picture("JPEG", (2000, 2000), progressive=True, quality=5)
    start = data.rindex(b"\xff\xda")
    many = data[:start] + data[start:-2] * 600 + b"\xff\xd9"
    for read in (picture_size, lambda one: read_picture(one, LOOK)):
        with pytest.raises(DataError, match="scans"):
            read(in_memory(many))
    assert picture_size(in_memory(data)) == (2000, 2000)


def test_pipe_instead_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cat.png")
    for read in (picture_size, lambda file: read_picture(file, LOOK), sound_size):
        with pytest.raises(DataError, match="not a regular file"):
            read(tmp_path / "cat.png")


def test_clip_of_hours_of_silence_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_file, "_MAX_SILENCE", 2**16)
    out = io.BytesIO()
    soundfile.write(out, np.concatenate([np.zeros((2**17, 2)), np.ones((9, 2))]), 48000, format="FLAC")
    with pytest.raises(DataError, match="it is silent, each of the first"):
        sound_size(in_memory(out.getvalue()))


def test_unlisted_audio_formats_are_not_opened() -> None:
    out = io.BytesIO()
    soundfile.write(out, np.ones(100), 16000, format="MAT5")
    with pytest.raises(DataError, match="no known format"):
        sound_size(in_memory(out.getvalue()))


# --- records ---


def good_lines(folder: Path, count: int) -> list[str]:
    for label in (0, 1):
        (folder / f"{label}.png").write_bytes(encoded_picture())
    return [json.dumps({"image": f"{index % 2}.png", "label": index % 2}) for index in range(count)]


BAD_LINES = [
    '{"image": "a\\u0000b", "label": 0}',
    '{"image": "\\ud800.png", "label": 0}',
    '{"image": "\\udc80.png", "label": 0}',
    json.dumps({"image": "x" * 5000, "label": 0}),
    json.dumps({"image": "/".join(["x" * 200] * 40), "label": 0}),
    json.dumps({"image": "../../../etc/passwd", "label": 0}),
    json.dumps({"image": "loop", "label": 0}),
    json.dumps({"image": "pipe.png", "label": 0}),
    '{"image": "0.png", "label": true}',
    '{"image": "0.png", "label": "\\ud800"}',
    '{"image": "0.png", "label": 1e400}',
    '{"image": "0.png", "label": ' + "9" * 4000 + "}",
    '{"image": {"bytes": [1, 2], "path": 7}, "label": 0}',
    '{"image": "data:;base64,\\ud800", "label": 0}',
    '{"label": 0}', '{"image": "0.png"}', "[1, 2]", "7", "null", '"text"', "{", '{"a":' * 100_000, "\x00\x01",
]  # fmt: skip


def test_each_bad_line_is_one_unreadable_record(tmp_path: Path) -> None:
    os.symlink("loop", tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "x.jsonl").write_text("\n".join([*good_lines(tmp_path, 3000), *BAD_LINES]), "utf-8")
    found = find_records("x", [tmp_path / "x.jsonl"], RecordColumns(), tmp_path / "cache", None)
    assert len(found) == 3000
    assert len(found.unreadable) == len(BAD_LINES)
    for reason in found.unreadable:
        reason.encode()


def test_bad_lines_of_mixed_samples_are_left_out(tmp_path: Path) -> None:
    good_lines(tmp_path, 0)
    bad = [*BAD_LINES[:8], *BAD_LINES[16:], '{"image": "0.png", "text": "\\ud800"}',
           '{"image": "a\\nb.png", "text": "t"}',
           '{"messages": [{"role": "user", "content": [{"type": ["image"]}]}]}',
           '{"messages": [{"role": {}, "content": 1}, 2]}']  # fmt: skip
    (tmp_path / "x.jsonl").write_text("\n".join(['{"image": "1.png", "text": "a text"}', *bad]), "utf-8")
    first, *others = mixed_in(tmp_path / "x.jsonl", MixedColumns())
    assert not first.reason
    assert len(others) == len(bad)
    assert [line for line, one in zip(bad, others, strict=True) if not one.reason] == []


def test_wrong_column_is_reported_at_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"picture_file": "0.png", "label": 0}\n' * 3)
    with pytest.raises(DataError, match="a column with the picture was not found; its columns are picture_file"):
        list(records_in(tmp_path / "x.jsonl", RecordColumns()))


def tar_of(entries: list[tuple[tarfile.TarInfo, bytes]], **options: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def good_tar(name: str = "a") -> bytes:
    return tar_of([(tarfile.TarInfo(f"{name}.png"), encoded_picture()), (tarfile.TarInfo(f"{name}.cls"), b"1")])


def with_size(data: bytes, field: bytes) -> bytes:
    """Return the archive with another size of its first member, and a valid checksum."""
    head = bytearray(data[:512])
    head[124:136] = field.ljust(12, b"\0")
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return bytes(head) + data[512:]


def pax_tar(**headers: str) -> bytes:
    info = tarfile.TarInfo("a.png")
    info.pax_headers = headers
    return tar_of([(info, encoded_picture())], format=tarfile.PAX_FORMAT)


BAD_TARS: dict[str, Callable[[], bytes]] = {
    "2^88 - 1": lambda: with_size(good_tar(), b"\x80" + b"\xff" * 11),
    "negative": lambda: with_size(good_tar(), b"\xff" * 10 + b"\xfe\x00"),
    "negative, small": lambda: with_size(good_tar(), b"\xff" * 12),
    "beyond the end": lambda: with_size(good_tar(), b"00077777777"),
    "no digits": lambda: with_size(good_tar(), b"hello"),
    "pax size below 0": lambda: pax_tar(size="-1024"),
    "pax size of 10^30": lambda: pax_tar(size="1" + "0" * 30),
    "pax size of words": lambda: pax_tar(size="many"),
    "pax sparse": lambda: pax_tar(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 9}),
    "pax sparse map": lambda: pax_tar(**{"GNU.sparse.map": "1,2,x"}),
}


@pytest.mark.parametrize("what", BAD_TARS)
def test_tar_with_invalid_header_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    (tmp_path / "x.tar").write_bytes(BAD_TARS[what]())
    with pytest.raises(DataError, match=r"x\.tar: "):
        list(records_in(tmp_path / "x.tar", RecordColumns()))
    with pytest.raises(DataError, match=r"x\.tar: "):
        list(mixed_in(tmp_path / "x.tar", MixedColumns()))


def test_non_utf8_names_can_be_read_and_reported(tmp_path: Path) -> None:
    entries = []
    for label in range(2):
        for number in range(3):
            entries += [(tarfile.TarInfo(f"caf\udce9{label}{number}.png"), encoded_picture()),
                        (tarfile.TarInfo(f"caf\udce9{label}{number}.cls"), str(label).encode())]  # fmt: skip
    (tmp_path / "x.tar").write_bytes(tar_of(entries, format=tarfile.GNU_FORMAT))
    found = find_records("x", [tmp_path / "x.tar"], RecordColumns(), tmp_path / "cache", None)
    assert len(found) == 6
    assert picture_size(found.encoded(5)) == (24, 16)
    found.file(5).encode()


# --- random damage ---


def damaged(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 2, 8])):
        place = min(int(rng.expovariate(8 / len(out))), len(out) - 1)
        kind = rng.random()
        if kind < 0.5:
            out[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif kind < 0.7:
            out[place : place + 4] = struct.pack("<I", rng.choice([0, 2**31 - 1, 2**32 - 1, 2**31]))
        elif kind < 0.85:
            del out[place : place + rng.choice([1, 4, 100])]
        else:
            out[place:place] = out[max(0, place - 16) : place] * rng.choice([1, 3])
        out = out or bytearray(b"x")
    return bytes(out)


def seeds() -> Iterator[tuple[str, bytes]]:
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        yield form, encoded_picture(form)
    yield "progressive", encoded_picture("JPEG", progressive=True)
    wave = np.sin(np.arange(2000) / 9)
    for form in ("WAV", "FLAC", "OGG", "AIFF", "AU", "CAF", "W64", "MP3"):
        out = io.BytesIO()
        soundfile.write(out, wave, 16000, format=form)
        yield form, out.getvalue()
    yield ".tar", good_tar("b/c")
    yield ".jsonl", (json.dumps({"image": "data:;base64,AAAA", "label": 1}) + "\n").encode() * 3
    table = pa.table({"image": [{"bytes": encoded_picture(), "path": "x"}] * 4, "label": ["a", "b", "c", "d"]})
    out = io.BytesIO()
    pq.write_table(table, out)
    yield ".parquet", out.getvalue()


def read_all(form: str, data: bytes, folder: Path) -> None:
    """Read a file by its header and in full, as records and as mixed samples."""
    if form in ("WAV", "FLAC", "OGG", "AIFF", "AU", "CAF", "W64", "MP3"):
        apply_transform(in_memory(data), sound_size(in_memory(data)), AudioTransform(16000, 1.0))
    elif not form.startswith("."):
        picture_size(in_memory(data))
        read_picture(in_memory(data), LOOK)
    else:
        path = folder / f"x{form}"
        path.write_bytes(data)
        for columns in (RecordColumns(), RecordColumns(kind=SOUND, is_text=True)):
            with contextlib.suppress(DataError):
                for record in records_in(path, columns):
                    read_record(path, record, columns)
        list(mixed_in(path, MixedColumns()))


def read_record(path: Path, record: FoundRecord, columns: RecordColumns) -> None:
    if record.encoded is not None and not record.reason:
        with contextlib.suppress(DataError):
            picture_size(media_at(path, record.name, record.kind, record.offset, record.length, columns))


@pytest.mark.parametrize("rounds", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_random_damage_raises_only_data_errors(tmp_path: Path, rounds: int) -> None:
    rng = random.Random(7)
    for form, data in seeds():
        read_all(form, data, tmp_path)
        for _ in range(rounds):
            bad = damaged(data, rng)
            try:
                read_all(form, bad, tmp_path)
            except DataError:
                pass
            except Exception as error:
                raise AssertionError(f"{form}: {bad!r}") from error


def text_seeds() -> Iterator[tuple[str, bytes]]:
    lines = b"".join(json.dumps({"text": f"line {one} \u00e9"}).encode() + b"\n" for one in range(5))
    plain = {
        ".jsonl": lines,
        ".json": b'[{"text": "a"}, {"text": "b", "n": [1, {"c": null}]}]',
        ".csv": b'id,text\n1,"a, b"\n2,"c ""q"" d"\n3,x\n',
        ".txt": "some text \u00e9\n".encode() * 20,
    }
    for suffix, data in plain.items():
        yield suffix, data
        yield f"{suffix}.gz", gzip.compress(data)
        yield f"{suffix}.zst", zstandard.compress(data)
    out = io.BytesIO()
    pq.write_table(pa.table({"text": ["a b", "d\u00e9j\u00e0"], "day": pa.array([1, 2], pa.date32())}), out)
    yield ".parquet", out.getvalue()


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.full)])
def test_random_damage_of_text_files_raises_only_data_errors(tmp_path: Path, rounds: int) -> None:
    rng = random.Random(8)
    for suffix, data in text_seeds():
        path = tmp_path / f"x{suffix}"
        for bad in (data, *(damaged(data, rng) for _ in range(rounds))):
            path.write_bytes(bad)
            try:
                for file in find_files(str(path), "data.train.0").files:
                    list(RecordReader(file, max_record_bytes=1000))
            except DataError:
                pass
            except Exception as error:
                raise AssertionError(f"{suffix}: {bad!r}") from error


def test_row_that_python_cannot_represent_is_one_broken_record(tmp_path: Path) -> None:
    days = pa.array([1, 2**31 - 1, 2], pa.date32())
    pq.write_table(pa.table({"text": ["a", "b", "c"], "day": days}), tmp_path / "x.parquet")
    (file,) = find_files(str(tmp_path / "x.parquet"), "data.train.0").files
    found = list(RecordReader(file, max_record_bytes=1000))
    assert [isinstance(one, Broken) for one in found] == [False, True, False]
