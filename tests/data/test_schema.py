from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.data.schema import Schema, detect_schema
from weft.data.source import find_files
from weft.errors import DataError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def detect(tmp_path: Path, *records: Any, wanted: str = "auto", **columns: str) -> Schema:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return detect_schema(find_files(str(path), "data.train.0"), wanted, columns, 10_000)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"id": "1", "text": "x"}, "text, column 'text'"),
        ({"Content": "x", "title": "y"}, "text, column 'Content'"),
        ({"id": 3, "review": "x"}, "text, column 'review'"),
        ({"messages": CHAT, "text": "x"}, "messages, column 'messages' (role='role', content='content')"),
        ({"conversations": SHARED}, "messages, column 'conversations' (role='from', content='value')"),
        ({"input_ids": [1, 2]}, "token ids, column 'input_ids'"),
        ({"tokens": [1, 2], "labels": [-100, 2]}, "token ids, column 'tokens' (mask='labels')"),
        ({"messages": "not a list", "text": "x"}, "text, column 'text'"),
    ],
)
def test_what_is_found(tmp_path: Path, record: dict[str, Any], text: str) -> None:
    assert str(detect(tmp_path, record)) == text


def test_broken_first_records_do_not_matter(tmp_path: Path) -> None:
    assert str(detect(tmp_path, "oops", {"n": 1}, {"text": "x"})) == "text, column 'text'"


def test_columns_override(tmp_path: Path) -> None:
    record = {
        "a": "x",
        "b": "y",
        "chat": [{"who": "user", "says": "hi", "role": "?", "content": "?"}],
        "t": [1],
        "m": [1],
    }
    assert str(detect(tmp_path, record, text="b")) == "text, column 'b'"
    found = detect(tmp_path, record, messages="chat", role="who", content="says")
    assert str(found) == "messages, column 'chat' (role='who', content='says')"
    assert str(detect(tmp_path, record, ids="t", mask="m")) == "token ids, column 't' (mask='m')"
    assert str(detect(tmp_path, {"text": "x", "messages": CHAT}, wanted="text")) == "text, column 'text'"


def test_text_files_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    files = find_files(str(tmp_path / "a.txt"), "data.train.0")
    assert str(detect_schema(files, "auto", {}, 100)) == "text, one document per file"
    with pytest.raises(DataError, match="one document each, without columns"):
        detect_schema(files, "messages", {}, 100)


@pytest.mark.parametrize(
    ("columns", "wanted", "text"),
    [
        (
            {"text": "bod"}, "auto",
            "data.train.0.columns.text=bod: {0} has no such column. Did you mean 'body'? "
            "Its columns are id, body, title.",
        ),
        ({"txt": "body"}, "auto", "data.train.0.columns.txt: not a part of this schema. Did you mean 'text'?"),
        ({"text": "body", "ids": "id"}, "auto", "data.train.0.columns=text, ids: these belong to different schemas."),
        (
            {}, "messages",
            "data.train.0.schema=messages: a column of messages (lists of role and content) was not found in {0}, "
            "whose columns are id (str), body (str), title (str).",
        ),
        ({}, "ids", "data.train.0.schema=ids: a column of token ids (lists of integers) was not found in {0}"),
    ],
)  # fmt: skip
def test_wrong_columns_are_said(tmp_path: Path, columns: dict[str, str], wanted: str, text: str) -> None:
    with pytest.raises(DataError) as caught:
        detect(tmp_path, {"id": "7", "body": "x", "title": "y"}, wanted=wanted, **columns)
    assert str(caught.value).startswith(text.format(tmp_path / "a.jsonl"))


def test_no_guess_among_several_unknown_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"whose columns are q \(str\), a \(str\)\. Name it, such as columns"):
        detect(tmp_path, {"q": "x", "a": "y"})


def test_nothing_readable(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of the first 50 records"):
        detect(tmp_path, "oops", "oops")
