from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.config.run_config import STDLIB_SOURCE
from weft.data.text.source import find_files
from weft.errors import DataError


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n")


def names(folder: Path, path: str) -> list[str]:
    return [file.path.relative_to(folder.resolve()).as_posix() for file in find_files(path, "data.train.0").files]


def test_folder_is_read_sorted_without_hidden_and_unknown_files(tmp_path: Path) -> None:
    make(tmp_path, "b.txt", "a/z.md", "a/a.txt.gz", ".git/x.txt", "a/.hidden.txt", "picture.png", "c.log.zst")
    found = find_files(str(tmp_path), "data.train.0")
    assert names(tmp_path, str(tmp_path)) == ["a/a.txt.gz", "a/z.md", "b.txt", "c.log.zst"]
    assert [(file.format, file.compression) for file in found.files] == [
        ("text", "gz"), ("text", ""), ("text", ""), ("text", "zst"),
    ]  # fmt: skip
    assert found.num_skipped == 1
    assert found.size_bytes == 8


def test_globs(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl.gz", "sub/c.jsonl", "sub/d.txt", "we[i]rd.txt")
    assert names(tmp_path, f"{tmp_path}/*.jsonl*") == ["a.jsonl", "b.jsonl.gz"]
    assert names(tmp_path, f"{tmp_path}/**/*.jsonl") == ["a.jsonl", "sub/c.jsonl"]
    # An existing name is that file, even if it looks like a glob.
    assert names(tmp_path, f"{tmp_path}/we[i]rd.txt") == ["we[i]rd.txt"]


def test_standard_library_source_excludes_its_tests() -> None:
    found = find_files(STDLIB_SOURCE, "data.train.0")
    parts = {part for file in found.files for part in file.path.parts}
    assert len(found.files) > 200
    assert {file.path.suffix for file in found.files} == {".py"}
    assert not parts & {"site-packages", "idlelib", "__pycache__", "tests", "encodings"}
    assert any(file.path.name == "textwrap.py" for file in found.files)
    assert found == find_files(STDLIB_SOURCE, "data.train.0")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("{0}/loop", "data.train.0.path={0}/loop: no file matches. It is a link without a target. Use a file"),
        ("{0}/queue", "data.train.0.path={0}/queue: no file matches. It is not a regular file. Use a file"),
        (
            "{0}/dat.txt",
            "data.train.0.path={0}/dat.txt: no file matches. Did you mean 'data.txt'? Use a file, a folder",
        ),
        ("{0}/none/x.txt", "data.train.0.path={0}/none/x.txt: no file matches. The folder {0}/none does not exist."),
        ("{0}/*.parquet", "data.train.0.path={0}/*.parquet: no file matches. Use a file"),
        ("{0}/a.docx", "data.train.0.path={0}/a.docx: .docx is not a known format. Use one of .jsonl,"),
        ("{0}/only", "data.train.0.path={0}/only: no file of a known format (.png found)."),
        ("{0}", "data.train.0.path={0}: all files of a source have one format, but these are 1 jsonl, 1 text."),
        (
            "builtin:python-stdlb",
            "data.train.0.path=builtin:python-stdlb: no such built-in source. Did you mean 'builtin:python-stdlib'?",
        ),
    ],
)
def test_missing_files_are_reported(tmp_path: Path, path: str, text: str) -> None:
    make(tmp_path, "data.txt", "a.docx", "only/x.png", "b.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "queue")
    with pytest.raises(DataError) as caught:
        find_files(path.format(tmp_path), "data.train.0")
    assert str(caught.value).startswith(text.format(tmp_path))


@pytest.mark.parametrize("path", ["", "/*.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_unreadable_files_of_a_folder_are_refused(tmp_path: Path, path: str, kind: str) -> None:
    make(tmp_path, "a.jsonl")
    if kind == "link":
        (tmp_path / "b.jsonl").symlink_to("nowhere")
    else:
        os.mkfifo(tmp_path / "b.jsonl")
    what = "a link without a target" if kind == "link" else "not a regular file"
    with pytest.raises(DataError) as caught:
        find_files(f"{tmp_path}{path}", "data.train.0")
    assert str(caught.value).endswith(f": {tmp_path}/b.jsonl is {what}. Repair or remove it.")


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("https://host/a.jsonl", "curl -LO https://host/a.jsonl"),
        ("s3://bucket/data/", "aws s3 sync s3://bucket/data/ data"),
        ("ftp://host/a.txt", "with the tool of that storage"),
    ],
)
def test_remote_data_is_refused_with_a_download_command(address: str, command: str) -> None:
    with pytest.raises(DataError) as caught:
        find_files(address, "f")
    assert f"Download the data first ({command}) and give its path." in str(caught.value)


def test_json_file_next_to_the_data_is_its_description(tmp_path: Path) -> None:
    for name in ("a.jsonl", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    files = find_files(str(tmp_path), "f")
    assert ([file.path.name for file in files.files], files.num_skipped) == (["a.jsonl"], 1)
    (tmp_path / "a.jsonl").unlink()
    assert find_files(str(tmp_path), "f").format == "json"
