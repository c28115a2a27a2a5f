from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.data.text.documents import Document, read_document
from weft.data.text.records import Broken, Record
from weft.data.text.schema import Schema
from weft.data.text.turns import Turn

TEXT = Schema("text", text="text")
CHAT = Schema("messages", messages="m", role="from", content="value")
IDS = Schema("ids", ids="ids", mask="loss_mask")
LABELS = Schema("ids", ids="ids", mask="labels")


def make(value: Any, schema: Schema) -> Document | str:
    found = read_document(Record("f", 3, value), schema, 100)
    if isinstance(found, Broken):
        assert (found.file, found.number) == ("f", 3)
        return found.reason
    return found


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"m": [{"from": role, "value": content} for role, content in pairs]}


@pytest.mark.parametrize(
    ("value", "schema", "reason"),
    [
        ({"other": "x"}, TEXT, "missing column"),
        ({"text": 3}, TEXT, "not a string"),
        ({"text": None}, TEXT, "not a string"),
        ({"text": ""}, TEXT, "empty"),
        ({"text": " \n "}, TEXT, "empty"),
        ({"text": "\ud800"}, TEXT, "invalid UTF-8"),
        ({"m": "x"}, CHAT, "messages are not a list"),
        ({"m": []}, CHAT, "empty"),
        ({"m": ["x"]}, CHAT, "a message lacks its role or content"),
        ({"m": [{"from": "human"}]}, CHAT, "a message lacks its role or content"),
        (turns(("human", "a")), CHAT, "no assistant turn"),
        (turns(("ai", "a")), CHAT, "no turn before the answer"),
        (turns(("wizard", "a"), ("gpt", "b")), CHAT, "unknown role"),
        (turns(("human", None), ("gpt", "b")), CHAT, "content is not text"),
        (turns(("human", [{"type": "image"}]), ("gpt", "b")), CHAT, "content is not text"),
        (turns(("human", "a"), ("gpt", "\ud800")), CHAT, "invalid UTF-8"),
        ({"ids": "1 2", "loss_mask": [1]}, IDS, "ids are not integers"),
        ({"ids": [1.5], "loss_mask": [1]}, IDS, "ids are not integers"),
        ({"ids": [[1]], "loss_mask": [1]}, IDS, "ids are not integers"),
        ({"ids": [1, [2]], "loss_mask": [1]}, IDS, "ids are not integers"),
        ({"ids": [2**70], "loss_mask": [1]}, IDS, "ids are not integers"),
        ({"ids": [], "loss_mask": []}, IDS, "empty"),
        ({"ids": [5, 100], "loss_mask": [1, 1]}, IDS, "id out of vocabulary"),
        ({"ids": [5, -1], "loss_mask": [1, 1]}, IDS, "id out of vocabulary"),
        ({"ids": [5, 6], "loss_mask": [1]}, IDS, "mask has another length than ids"),
        ({"ids": [5, 6], "loss_mask": [1, 2]}, IDS, "mask values are not 0 or 1"),
        ({"ids": [5, 6]}, IDS, "missing column"),
        ({"ids": [5, 6], "labels": [6, -100]}, LABELS, "labels differ from ids"),
    ],
)
def test_reasons_of_broken_records(value: Any, schema: Schema, reason: str) -> None:
    assert make(value, schema) == reason


def test_valid_records() -> None:
    text = make({"text": " x\n"}, TEXT)
    assert isinstance(text, Document)
    assert text.text == " x\n"
    chat = make(turns(("System", "s"), ("human", [{"type": "text", "text": "a"}, "b"]), ("GPT", "")), CHAT)
    assert isinstance(chat, Document)
    assert chat.turns == (Turn("system", "s"), Turn("user", "ab"), Turn("assistant", ""))
    for schema, mask in ((IDS, [0, 1, True]), (LABELS, [-100, 6, 7])):
        ids = make({"ids": [5, 6, 7], schema.mask: mask}, schema)
        assert isinstance(ids, Document)
        assert ids.ids is not None
        assert ids.trained is not None
        assert ids.ids.tolist() == [5, 6, 7]
        assert ids.trained.tolist() == [False, True, True]


def test_draw_depends_only_on_content() -> None:
    one = read_document(Record("a", 1, {"text": "x"}), TEXT, 10)
    same = read_document(Record("b", 9, {"text": "x", "id": 4}), TEXT, 10)
    other = read_document(Record("a", 1, {"text": "y"}), TEXT, 10)
    assert isinstance(one, Document)
    assert isinstance(same, Document)
    assert isinstance(other, Document)
    assert one.draw == same.draw != other.draw


def test_answers_of_only_reasoning_and_chats_without_it_are_reported():
    def one(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    pair = {"p": "?", "c": [one("<think>a</think>b")], "r": [one("<think>a</think>")]}
    columns = Schema("preference", prompt="p", chosen="c", rejected="r")
    assert isinstance(make(pair, columns), Document)
    assert isinstance(make(pair, replace(columns, reasoning="mask")), Document)
    assert make(pair, replace(columns, reasoning="drop")) == "an answer of only reasoning, which data.reasoning drops"
    for text, reasoning, note in [
        ("b", "mask", "without reasoning that data.reasoning finds"),
        ("b", "keep", ""),
        ("<think>a</think>b", "drop", ""),
    ]:
        found = make(turns(("user", "?"), ("gpt", text)), replace(CHAT, reasoning=reasoning))
        assert isinstance(found, Document)
        assert found.note == note


def test_answers_of_a_pair_are_both_texts_or_both_chats():
    pair = {"p": "?", "c": [{"role": "assistant", "content": "b"}], "r": "a"}
    assert make(pair, Schema("preference", prompt="p", chosen="c", rejected="r")) == (
        "chosen and rejected are of different kinds"
    )
    asked = [{"role": "user", "content": "?"}]
    assert isinstance(make({**pair, "p": asked}, Schema("preference", prompt="p", chosen="c", rejected="r")), Document)
