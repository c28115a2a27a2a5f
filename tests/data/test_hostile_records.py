# ruff: noqa: E501
"""A broken record ends no run, and the records after it are read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.data.text.documents import read_document
from weft.data.text.records import Broken, RecordReader
from weft.data.text.schema import detect_schema
from weft.data.text.source import find_files
from weft.errors import DataError

GOOD = {
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "text": {"text": "abc"},
    "ids": {"input_ids": [1, 2, 3], "labels": [1, 2, 3]},
    "completion": {"prompt": "p", "completion": "c"},
    "instruction": {"instruction": "i", "input": "x", "output": "o"},
    "preference": {"prompt": "p", "chosen": "c", "rejected": "r"},
    "feedback": {"prompt": "p", "completion": "c", "label": True},
}
DEEP_LIST, DEEP_OBJECT = "[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900
VERY_DEEP = "[" * 100_000 + "]" * 100_000
ASKED = '{"role": "user", "content": "x"}'


def chat(answer: str) -> str:
    return f'[{ASKED}, {{"role": "assistant", {answer}}}]'


VALUES = [
    "null", "true", "17", "1.5", "1e400", "NaN", "1" + "0" * 400, "1" + "0" * 5000, '""', '"\\u0000"', '"\\ud800"',
    "[]", "{}", "[null]", "[true, false]", "[1.5]", "[1e999]", "[[1]]", f"[{10**30}]", f"[{2**63 - 1}, {2**64 - 1}]",
    '["a"]', DEEP_LIST, DEEP_OBJECT, VERY_DEEP, '"[1, 2"', '[{"role": {"a": 1}, "content": "x"}]',
    chat('"content": "a", "weight": 1' + "0" * 400), chat('"content": "a", "weight": NaN'),
    chat(f'"content": "", "tool_calls": {DEEP_OBJECT}'), chat('"content": "", "tool_calls": {"a": NaN}'),
    chat('"content": "", "tool_calls": "x"'), chat(f'"content": {DEEP_LIST}'), chat('"content": "a", "name": "\\ud800"'),
    chat('"content": "a", "reasoning_content": {"x": [1]}'), '"[{\\"role\\": \\"user\\"}]"',
]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "json"])
@pytest.mark.parametrize("kind", GOOD)
def test_odd_values_break_only_their_record(tmp_path, kind, form):
    good, path = GOOD[kind], tmp_path / f"d.{form}"
    for key in (*good, "tools"):
        for value in VALUES:
            odd = "{" + ", ".join(
                [f'"{key}": {value}', *(f'"{k}": {json.dumps(v)}' for k, v in good.items() if k != key)]
            )
            lines = [json.dumps(good), odd + "}", json.dumps(good)]
            path.write_text("\n".join(lines) if form == "jsonl" else "[" + ",\n".join(lines) + "]")
            files = find_files(str(path), "data.train.0")
            schema = detect_schema(files, "auto", {}, 10**6, preferences=kind in ("preference", "feedback"))
            schema = replace(schema, tools="tools") if kind == "messages" else schema
            found = [
                one if isinstance(one, Broken) else read_document(one, schema, 1000)
                for one in RecordReader(files.files[0], max_record_bytes=10**6)
            ]
            assert [isinstance(one, Broken) for one in (found[0], found[2])] == [False, False]


def test_booleans_are_no_token_ids(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [true, false]}\n{"input_ids": [1, true]}\n')
    files = find_files(str(path), "data.train.0")
    schema = detect_schema(files, "auto", {}, 1000)
    found = [read_document(one, schema, 9) for one in RecordReader(files.files[0], max_record_bytes=1000)]
    assert [getattr(one, "reason", "") for one in found] == ["", "ids are not integers", "ids are not integers"]


def test_truncated_array_is_broken_at_its_end(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('[{"text": "a"}, {"text": "b",}, {"text": "c\\\\"}, {"text": "d')
    files = find_files(str(path), "data.train.0")
    found = list(RecordReader(files.files[0], max_record_bytes=1000))
    assert [isinstance(one, Broken) for one in found] == [False, True, False, True]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("zero.jsonl", b"", "zero.jsonl is empty"),
        ("zero.txt", b"", "zero.txt is empty"),
        ("wide.jsonl", '{"text": "a"}\n'.encode("utf-16"), "is UTF-16, and Weft reads UTF-8. Convert it with iconv"),
        ("wide.csv", "text,b\na,b\n".encode("utf-16-le"), "iconv -f UTF-16 -t UTF-8"),
        ("wide.txt", "some words".encode("utf-16-be"), "iconv -f UTF-16 -t UTF-8"),
        ("wide.json", '[{"text": "a"}]'.encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
    ],
)
def test_empty_files_and_other_encodings_are_named(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=text):
        detect_schema(find_files(str(tmp_path / name), "data.train.0"), "auto", {}, 1000)
