from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.data.text.schema import Schema, detect_schema
from weft.data.text.source import find_files
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
        (
            {"instruction": "q", "input": "", "output": "a", "text": "q a"},
            "instructions as ChatML turns, columns 'instruction' + 'input' -> 'output' (loss on 'output' only)",
        ),
        (
            {"system": "s", "question": "q", "answer": "a"},
            "instructions as ChatML turns, columns 'system' + 'question' -> 'answer' (loss on 'answer' only)",
        ),
        (
            {"prompt": "q", "completion": "a"},
            "completions as they are, columns 'prompt' -> 'completion' (loss on 'completion' only)",
        ),
        ({"text": "x", "question": "q", "answer": "a"}, "text, column 'text'"),
    ],
)
def test_schema_is_detected(tmp_path: Path, record: dict[str, Any], text: str) -> None:
    assert str(detect(tmp_path, record)) == text


def test_broken_first_records_are_ignored(tmp_path: Path) -> None:
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
def test_wrong_columns_are_reported(tmp_path: Path, columns: dict[str, str], wanted: str, text: str) -> None:
    with pytest.raises(DataError) as caught:
        detect(tmp_path, {"id": "7", "body": "x", "title": "y"}, wanted=wanted, **columns)
    assert str(caught.value).startswith(text.format(tmp_path / "a.jsonl"))


def test_several_unknown_columns_are_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"whose columns are q \(str\), a \(str\)\. Name them: data.train.0.columns.text="
    ):
        detect(tmp_path, {"q": "x", "a": "y"})


def test_unreadable_first_records_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of the first 50 records"):
        detect(tmp_path, "oops", "oops")


def test_preferences_are_refused_with_working_settings(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    with pytest.raises(DataError, match=r"this task learns answers. Set task.name=prefer") as caught:
        detect(tmp_path, pair)
    words = str(caught.value).split(" with ")[1].removesuffix(".").split()
    columns = {word.split("=")[0].rpartition(".")[2]: word.split("=")[1] for word in words}
    assert str(detect(tmp_path, pair, **columns)).startswith("completions as they are, columns 'prompt' -> 'chosen'")
    with pytest.raises(DataError, match="preference pairs"):
        detect(tmp_path, {"chosen": CHAT, "rejected": CHAT})


def test_csv_delimiter_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;text\n65;while, and\n66;so, it, goes\n")
    schema = detect_schema(find_files(str(tmp_path / "a.csv"), "f"), "auto", {}, 1000)
    assert str(schema) == "text, column 'text', columns separated by semicolons"


def test_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "nul.txt").write_bytes(bytes(1000))
    with pytest.raises(DataError, match=r"nul\.txt: the file is binary, not text \(NUL bytes\)\. Give a text file"):
        detect_schema(find_files(str(tmp_path / "nul.txt"), "f"), "auto", {}, 1000)
