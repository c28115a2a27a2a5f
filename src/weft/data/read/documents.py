"""From a record to a document that can be tokenised, or to a `Broken` that says why not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from weft.data.read.one_document import Document, column_of, draw_of, draw_of_bytes, nulls_of, tools_of
from weft.data.read.preferences import read_pair, read_verdict
from weft.data.read.records import Broken, Record
from weft.data.read.schema import Schema
from weft.data.read.turns import Turn, Unusable, content_of_turns, read_turns, taken_for_assistant

#: The note of a document with an answer of nothing: its end alone is trained.
EMPTY_ANSWER = "with an empty answer"


def read_document(record: Record, schema: Schema, vocab_size: int) -> Document | Broken:
    """Make a document of a record, or say why it cannot be one.

    Args:
        record: as a reader gives it.
        schema: which columns hold what.
        vocab_size: ids at or above it are refused.
    """
    try:
        if schema.is_preference:
            return (read_pair if schema.kind == "preference" else read_verdict)(record, schema)
        if schema.kind == "messages":
            return _messages(record, schema)
        if schema.kind == "ids":
            return _ids(record, schema, vocab_size)
        if schema.kind == "instruction":
            return _instruction(record, schema)
        if schema.kind == "completion":
            return _completion(record, schema)
        return _text(record, schema)
    except Unusable as reason:
        return Broken.of(record.file, record.number, str(reason), record.value)
    except RecursionError:
        return Broken.of(record.file, record.number, "nested too deeply", "")


def _text(record: Record, schema: Schema) -> Document:
    text = record.value if schema.file_text else column_of(record, schema.text)
    if not isinstance(text, str):
        raise Unusable("not a string")
    # A blank piece in the middle of a file is still part of its document.
    if not text or (record.last and record.part == 0 and text.isspace()):
        raise Unusable("empty")
    return Document(record.file, draw_of(text), text=text, part=record.part, last=record.last)


def _messages(record: Record, schema: Schema) -> Document:
    messages = column_of(record, schema.messages)
    tools = tools_of(record, schema)
    filled = nulls_of(record, schema, tools, schema.messages)
    turns = read_turns(messages, schema.role, schema.content, filled)
    if not any(turn.role == "assistant" for turn in turns):
        raise Unusable("no assistant turn")
    return _conversation(record, turns, taken_for_assistant(messages, schema.role), tools)


def _conversation(record: Record, turns: tuple[Turn, ...], note: str = "", tools: str = "") -> Document:
    if any(turn.is_empty for turn in turns if turn.role == "assistant"):
        note = EMPTY_ANSWER
    content = content_of_turns(turns)
    draw = draw_of(json.dumps([*content, tools] if tools else content, ensure_ascii=False))
    return Document(record.file, draw, turns=turns, note=note, tools=tools, number=record.number)


def _instruction(record: Record, schema: Schema) -> Document:
    """Alpaca's columns as a chat: the input stands below the instruction, in the user's turn."""
    system, asked, more = (_optional_text(record, name) for name in (schema.system, schema.instruction, schema.input))
    answer = column_of(record, schema.output)
    if not isinstance(answer, str):
        raise Unusable("not a string")
    question = "\n\n".join(part for part in (asked, more) if part.strip())
    if not question:
        raise Unusable("empty")
    turns = (Turn("user", question), Turn("assistant", answer))
    return _conversation(record, (Turn("system", system), *turns) if system.strip() else turns)


def _completion(record: Record, schema: Schema) -> Document:
    prompt, completion = (column_of(record, name) for name in (schema.prompt, schema.completion))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise Unusable("not a string")
    if not prompt and not completion:
        raise Unusable("empty")
    draw = draw_of(json.dumps([prompt, completion], ensure_ascii=False))
    note = "" if completion.strip() else EMPTY_ANSWER
    return Document(record.file, draw, text=completion, prompt=prompt, note=note)


def _optional_text(record: Record, name: str) -> str:
    value = record.value.get(name) if name else ""
    if value is not None and not isinstance(value, str):
        raise Unusable("not a string")
    return value or ""


def _ids(record: Record, schema: Schema, vocab_size: int) -> Document:
    ids = _integers(column_of(record, schema.ids), "ids are not integers")
    if ids.size == 0:
        raise Unusable("empty")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise Unusable("id out of vocabulary")
    trained = None
    if schema.mask:
        given = column_of(record, schema.mask)
        if isinstance(given, list):
            given = [int(value) if isinstance(value, bool) else value for value in given]
        mask = _integers(given, "mask values are not integers")
        if mask.size != ids.size:
            raise Unusable("mask has another length than ids")
        trained = mask != -100 if "label" in schema.mask.lower() else mask == 1
        if "label" in schema.mask.lower():
            if (mask[trained] != ids[trained]).any():
                raise Unusable("labels differ from ids")
        elif ((mask != 0) & (mask != 1)).any():
            raise Unusable("mask values are not 0 or 1")
    return Document(record.file, draw_of_bytes(ids.astype("<i8").tobytes()), ids=ids, trained=trained)


def _integers(values: Any, reason: str) -> np.ndarray:
    if not isinstance(values, list):
        raise Unusable(reason)
    if not values:
        return np.zeros(0, np.int64)
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        raise Unusable(reason) from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or any(isinstance(value, bool) for value in values):
        raise Unusable(reason)
    return array.astype(np.int64)
