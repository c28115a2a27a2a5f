"""Nulls that tables add to tool calls and schemas are dropped; explicit nulls are preserved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.data.text.documents import read_document
from weft.data.text.records import Broken, RecordReader
from weft.data.text.schema import detect_schema
from weft.data.text.source import find_files


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    [tool("get", {"city": {"type": "string", "enum": ["Rome", "Oslo"]}})],
    [tool("sum", {"a": {"type": "number"}, "of": {"type": "object", "properties": {"x": {"type": "string"}}}})],
]
ARGUMENTS = [{"city": "Rome", "at": {"hour": 3, "days": [{"n": 1}]}}, {"a": 1, "at": {"days": [{"m": "x"}, {"n": 2}]}}]


def row(number: int, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": ("get", "sum")[number], "arguments": ARGUMENTS[number]}}
    return {
        "tools": TOOLS[number],
        "messages": [
            {"role": "user", "content": "w?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "17"},
            {"role": "assistant", "content": "17"},
        ],
    }


def read(path: Path) -> list[Any]:
    files = find_files(str(path), "data.train.0")
    schema = detect_schema(files, "auto", {}, 10_000)
    return [
        one if isinstance(one, Broken) else read_document(one, schema, 1000)
        for one in RecordReader(files.files[0], max_record_bytes=10_000)
    ]


def calls_and_tools(document: Any) -> tuple[Any, Any]:
    return json.loads(document.turns[1].more)["tool_calls"][0]["function"]["arguments"], json.loads(document.tools)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl without nulls in messages"])
def test_table_nulls_change_neither_calls_nor_schemas(tmp_path, form):
    table = pa.Table.from_pylist([row(0), row(1)])
    if form == "parquet":
        path = tmp_path / "d.parquet"
        pq.write_table(table, path)
    else:
        path = tmp_path / "d.jsonl"
        rows = table.to_pylist()
        if "without" in form:
            for one in rows:
                one["messages"] = [{k: v for k, v in turn.items() if v is not None} for turn in one["messages"]]
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    for number, document in enumerate(read(path)):
        assert calls_and_tools(document) == (ARGUMENTS[number], TOOLS[number])


def test_explicit_nulls_are_preserved(tmp_path):
    schema = [tool("get", {"city": {"type": "string"}, "unit": {"type": ["string", "null"], "default": None}})]
    arguments = {"city": "Rome", "unit": None}
    path = tmp_path / "d.jsonl"
    rows = []
    for given in (arguments, json.dumps(arguments)):
        one = row(0)
        one["tools"] = schema
        one["messages"][1]["tool_calls"][0]["function"]["arguments"] = given
        rows.append(one)
    # In a table, or in a row with a table's nulls, only JSON text is certain to be unchanged.
    filled = json.loads(json.dumps(rows))
    for one in filled:
        one["messages"][0]["tool_calls"] = None
    path.write_text("".join(json.dumps(one) + "\n" for one in rows + filled))
    found = [calls_and_tools(document)[0] for document in read(path)]
    assert found[0] == arguments
    assert [json.loads(found[place]) for place in (1, 3)] == [arguments, arguments]
    assert found[2] == {"city": "Rome"}
    assert calls_and_tools(read(path)[0])[1] == schema


def test_null_for_an_undeclared_parameter_is_dropped(tmp_path):
    one = row(0)
    one["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"city": None, "a": None}
    (tmp_path / "d.jsonl").write_text(json.dumps(one) + "\n")
    assert calls_and_tools(read(tmp_path / "d.jsonl")[0])[0] == {"city": None}


def test_messages_and_calls_may_be_json_text(tmp_path):
    one = row(0)
    one["messages"][1]["tool_calls"] = json.dumps(one["messages"][1]["tool_calls"])
    one["messages"][1]["role"] = "ai"
    text = {**one, "messages": json.dumps(one["messages"])}
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (text, {**text, "messages": "[{"})))
    good, bad = read(path)
    assert calls_and_tools(good)[0] == ARGUMENTS[0]
    assert [turn.role for turn in good.turns] == ["user", "assistant", "tool", "assistant"]
    assert bad.reason == "messages are not a list"
