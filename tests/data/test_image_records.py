"""Images in tars, jsonl and parquet: indexed by headers only, read from their files, and faulty ones named."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.image_folders import COLOURS
from tests.data.image_records import FORMS, add, as_lines_with_paths, as_tars, labelled, write_lines, write_tar
from tests.data.test_media import bomb
from weft.data.media.files import RecordColumns
from weft.data.media.image_source import Pictures, parse_source
from weft.data.media.images import Look
from weft.data.media.media_records import MediaRecords, find_records, record_files, with_classes
from weft.data.store.row_table import RowTable
from weft.errors import DataError


def found(path: Path, cache: Path, columns: RecordColumns | None = None) -> MediaRecords:
    return find_records(str(path), record_files(str(path)), columns or RecordColumns(), cache, None)


@pytest.mark.parametrize("form", FORMS)
def test_every_format_has_the_same_images(tmp_path: Path, form: str) -> None:
    samples = labelled(12)
    (tmp_path / "data").mkdir()
    path = FORMS[form](tmp_path / "data", samples)
    records = found(path, tmp_path / "cache")
    assert records.classes == ("blue", "green", "red")
    assert [records.classes[records.label(i)] for i in range(12)] == [label for _, label in samples]
    assert [records.encoded(i).read_all() for i in range(12)] == [data for data, _ in samples]
    assert records.size(0) == (20, 16)
    stored = sum(file.stat().st_size for file in Path(records.folder).iterdir())
    assert stored < 12 * 120 + 1500  # offsets, and no pixels
    again = parse_source(records.format())
    assert again == records
    train, held = again.split(0.25)
    assert (len(train), len(held)) == (9, 3)
    assert {train.file(i) for i in range(9)} | {held.file(i) for i in range(3)} == {records.file(i) for i in range(12)}
    assert parse_source(held.format()) == held
    pictures = Pictures(train, Look(16, crops=True, mirrors=True, colour=0.3, noise=4.0), 7)
    assert np.array_equal(pictures.in_epoch(1, 2)[0], pictures.in_epoch(1, 2)[0])
    assert not np.array_equal(pictures.in_epoch(1, 2)[0], pictures.in_epoch(2, 2)[0])


def test_index_is_made_once_and_again_for_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    as_tars(tmp_path / "data", labelled(12))
    first = found(tmp_path / "data", tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("weft.data.media.media_records.picture_size", None)  # it would fail
        assert found(tmp_path / "data", tmp_path / "cache").digest == first.digest
    write_tar(tmp_path / "data" / "2.tar", labelled(3))
    assert len(found(tmp_path / "data", tmp_path / "cache")) == 15


def test_labels_may_be_numbers_in_json_or_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "x.tar", "w") as tar:
        for index, (data, _) in enumerate(labelled(4)):
            add(tar, f"{index}.seg.jpg", data)
            add(tar, f"{index}.json", b'{"kind": %d}' % (index * 5))
    records = found(tmp_path / "data", tmp_path / "cache", RecordColumns("seg.jpg", "kind"))
    assert records.classes == ("0", "5", "10", "15")
    narrow = found(as_lines(tmp_path, [0, 5]), tmp_path / "cache")
    assert [with_classes(narrow, records.classes, "eval").label(i) for i in range(2)] == [0, 1]
    with pytest.raises(DataError, match=r"class '10' is not among those of the training data\."):
        with_classes(records, narrow.classes, "task.options.eval")


def as_lines(folder: Path, labels: list[int]) -> Path:
    (folder / "p.png").write_bytes(labelled(1)[0][0])
    return write_lines(folder / "x.jsonl", [{"image": "p.png", "label": label} for label in labels])


def test_unreadable_images_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    good = labelled(900)
    cmyk = io.BytesIO()
    Image.new("CMYK", (9, 9)).save(cmyk, "JPEG")
    bomb(tmp_path / "bomb.png", 20_000, 20_000)
    with tarfile.open(tmp_path / "data" / "x.tar", "w") as tar:
        for index, (data, label) in enumerate(good):
            add(tar, f"{index}.png", data)
            add(tar, f"{index}.cls", label.encode())
        for name, data in {
            "cut.png": good[0][0][:-40],
            "bomb.png": (tmp_path / "bomb.png").read_bytes(),
            "empty.png": b"",
            "cmyk.gif": cmyk.getvalue(),  # the suffix is wrong, and the image is valid
            "text.jpg": b"no picture",
        }.items():
            add(tar, name, data)
            add(tar, f"{name[:-4]}.cls", b"red")
        add(tar, "only.png", good[0][0])
        add(tar, "word.cls", b"red")
    records = found(tmp_path / "data", tmp_path / "cache")
    assert len(records) == 901
    shard = tmp_path / "data" / "x.tar"
    reasons = "\n".join(records.unreadable)
    for text in (
        "cut.png: its pixels cannot be decoded (",
        "bomb.png: it has more than 100,000,000 pixels. Make it smaller, or delete it.",
        "empty.png: it cannot be read as an image (it is empty). Repair it, or delete it.",
        "text.jpg: it cannot be read as an image (no known format). Repair it, or delete it.",
        "only.png: it has no label; a file only.cls holds it",
        "word: it has no picture",
    ):
        assert f"{shard}, {text}" in reasons
    assert len(records.unreadable) == 6
    assert Pictures(records, Look(8), 0)[900][0].shape == (3, 8, 8)


def test_paths_stay_within_the_folder_and_restored_files_are_found(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    path = as_lines_with_paths(root, labelled(600))
    (tmp_path / "out.png").write_bytes(labelled(1)[0][0])
    with path.open("a") as lines:
        lines.write(
            '{"file_name": "../out.png", "label": "red"}\n{"file_name": "lost.png", "label": "red"}\nnonsense\n'
        )
    records = found(path, tmp_path / "cache")
    assert len(records) == 600
    assert records.unreadable == (
        f"{path}, line 601: '../out.png' lies outside {root}, the folder of the records",
        f"{path}, line 602: there is no file 'lost.png' beside it",
        f"{path}, line 603: it is not an object of JSON",
    )
    (root / "lost.png").write_bytes(labelled(1)[0][0])
    assert len(found(path, tmp_path / "cache")) == 601
    (root / "5.png").unlink()
    with pytest.raises(DataError, match=r"5\.png: it cannot be read \(No such file or directory\)\. Bring it back"):
        Pictures(records, Look(8), 0)[5]


def short_tar(path: Path) -> None:
    data = write_tar(path, labelled(6)).read_bytes()
    path.write_bytes(data[:3300])


def tar_without_end(path: Path) -> None:
    data = write_tar(path, labelled(6)).read_bytes()
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    path.write_bytes(data[: last.offset_data + 512])


def two_tars(path: Path) -> None:
    data = write_tar(path, labelled(6)).read_bytes()
    path.write_bytes(data + data)


def one_class(path: Path) -> None:
    write_tar(path, labelled(1))


def many_bad(path: Path) -> None:
    write_tar(path, [(b"", "red"), *labelled(6)])


def no_label(path: Path) -> None:
    write_lines(path.with_suffix(".jsonl"), [{"image": "x.png", "kind": 1}])


def short_parquet(path: Path) -> None:
    from tests.data.image_records import as_parquet

    made = as_parquet(path.parent, labelled(6))
    made.write_bytes(made.read_bytes()[:900])


def packed_tar(path: Path) -> None:
    path.with_suffix(".tar.gz").write_bytes(b"")


REFUSED = {
    "x.tar: the archive is damaged or truncated (unexpected end of data). Copy it again, or leave it out.": short_tar,
    "x.tar: the archive is damaged or truncated (its end is missing). Copy it again, or leave it out.": tar_without_end,
    "x.tar: another archive follows its end. Use separate archive files.": two_tars,
    "its records have 1 class. Give records of 2 or more.": one_class,
    "1 of 7 pictures cannot be used, more than 1%. The first: ": many_bad,
    "x.jsonl: a column with the label was not found; its columns are image, kind. Name it with task.options.label=NAME."
    "": no_label,
    "x.parquet: it is damaged or truncated (": short_parquet,
    "x.tar.gz is compressed, so that no picture in it can be read alone. Unpack it to a .tar": packed_tar,
}


@pytest.mark.parametrize("text", REFUSED)
def test_unusable_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "data").mkdir()
    REFUSED[text](tmp_path / "data" / "x.tar")
    with pytest.raises(DataError) as caught:
        found(tmp_path / "data", tmp_path / "cache")
    assert text in str(caught.value)


def test_table_has_the_sizes_of_the_headers(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    sizes = [(3 + index, 40 - index) for index in range(4)]
    with tarfile.open(tmp_path / "data" / "x.tar", "w") as tar:
        for index, size in enumerate(sizes):
            buffer = io.BytesIO()
            Image.new("RGB", size, COLOURS["red"]).save(buffer, "WEBP")
            add(tar, f"{index}.webp", buffer.getvalue())
            add(tar, f"{index}.cls", b"%d" % (index % 2))
    records = found(tmp_path / "data", tmp_path / "cache")
    assert [records.size(index) for index in range(4)] == sizes
    assert not RowTable(Path(records.folder)).problems()
