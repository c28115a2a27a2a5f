"""From a record to a document that can be tokenised, or to a `Broken` that says why not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.read.records import Broken, Record
from weft.data.read.schema import Schema

#: Names of roles as data sets spell them -> the role in the template. Only "assistant" is trained on.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatbot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
#: Of these, the ones that may as well be meant as something else: they are told.
_RARE_ASSISTANTS = ("bot", "model", "chatbot")
#: The note of a document with an answer of nothing: its end alone is trained.
EMPTY_ANSWER = "with an empty answer"


class _Unusable(Exception):
    """Carries the reason why a record is broken; never leaves this file."""


@dataclass(frozen=True, slots=True)
class Document:
    """Exactly one of text, turns and ids is set. draw: 32 bits of the content's digest, which decide the split.

    turns: (role, content) pairs. trained: one bool per id, or None where all are trained.
    prompt: what stands before the text without being trained. note: what people should know of it, countable.
    file, part, last: place of a text piece in its file.
    """

    file: str
    draw: int
    text: str | None = None
    turns: tuple[tuple[str, str], ...] | None = None
    ids: np.ndarray | None = None
    trained: np.ndarray | None = None
    part: int = 0
    last: bool = True
    prompt: str | None = None
    note: str = ""


def read_document(record: Record, schema: Schema, vocab_size: int) -> Document | Broken:
    """Make a document of a record, or say why it cannot be one.

    Args:
        record: as a reader gives it.
        schema: which columns hold what.
        vocab_size: ids at or above it are refused.
    """
    try:
        if schema.kind == "messages":
            return _messages(record, schema)
        if schema.kind == "ids":
            return _ids(record, schema, vocab_size)
        if schema.kind == "instruction":
            return _instruction(record, schema)
        if schema.kind == "completion":
            return _completion(record, schema)
        return _text(record, schema)
    except _Unusable as reason:
        return Broken.of(record.file, record.number, str(reason), record.value)


def _text(record: Record, schema: Schema) -> Document:
    text = record.value if schema.file_text else _column(record, schema.text)
    if not isinstance(text, str):
        raise _Unusable("not a string")
    # A blank piece in the middle of a file is still part of its document.
    if not text or (record.last and record.part == 0 and text.isspace()):
        raise _Unusable("empty")
    return Document(record.file, _draw(_utf8(text)), text=text, part=record.part, last=record.last)


def _messages(record: Record, schema: Schema) -> Document:
    messages = _column(record, schema.messages)
    if not isinstance(messages, list):
        raise _Unusable("messages are not a list")
    if not messages:
        raise _Unusable("empty")
    turns = tuple(_turn(message, schema) for message in messages)
    if not any(role == "assistant" for role, _ in turns):
        raise _Unusable("no assistant turn")
    return _conversation(record, turns, _taken_for_assistant(messages, schema))


def _conversation(record: Record, turns: tuple[tuple[str, str], ...], note: str = "") -> Document:
    if not all(content.strip() for role, content in turns if role == "assistant"):
        note = EMPTY_ANSWER
    return Document(record.file, _draw(_utf8(json.dumps(turns, ensure_ascii=False))), turns=turns, note=note)


def _taken_for_assistant(messages: list[Any], schema: Schema) -> str:
    """Says of a role that only some data sets use for the answers that it is trained on."""
    roles = (str(message[schema.role]).strip().lower() for message in messages)
    return next((f"with role '{role}' read as assistant" for role in roles if role in _RARE_ASSISTANTS), "")


def _instruction(record: Record, schema: Schema) -> Document:
    """Alpaca's columns as a chat: the input stands below the instruction, in the user's turn."""
    system, asked, more = (_optional_text(record, name) for name in (schema.system, schema.instruction, schema.input))
    answer = _column(record, schema.output)
    if not isinstance(answer, str):
        raise _Unusable("not a string")
    question = "\n\n".join(part for part in (asked, more) if part.strip())
    if not question:
        raise _Unusable("empty")
    turns = (("user", question), ("assistant", answer))
    return _conversation(record, (("system", system), *turns) if system.strip() else turns)


def _completion(record: Record, schema: Schema) -> Document:
    prompt, completion = (_column(record, name) for name in (schema.prompt, schema.completion))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise _Unusable("not a string")
    if not prompt and not completion:
        raise _Unusable("empty")
    draw = _draw(_utf8(json.dumps([prompt, completion], ensure_ascii=False)))
    note = "" if completion.strip() else EMPTY_ANSWER
    return Document(record.file, draw, text=completion, prompt=prompt, note=note)


def _optional_text(record: Record, name: str) -> str:
    value = record.value.get(name) if name else ""
    if value is not None and not isinstance(value, str):
        raise _Unusable("not a string")
    return value or ""


def _turn(message: Any, schema: Schema) -> tuple[str, str]:
    if not isinstance(message, dict) or schema.role not in message or schema.content not in message:
        raise _Unusable("a message lacks its role or content")
    role = ROLES.get(str(message[schema.role]).strip().lower())
    if role is None:
        raise _Unusable("unknown role")
    content = message[schema.content]
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise _Unusable("content is not text")
    return role, content


def _ids(record: Record, schema: Schema, vocab_size: int) -> Document:
    ids = _integers(_column(record, schema.ids), "ids are not integers")
    if ids.size == 0:
        raise _Unusable("empty")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise _Unusable("id out of vocabulary")
    trained = None
    if schema.mask:
        mask = _integers(_column(record, schema.mask), "mask values are not integers")
        if mask.size != ids.size:
            raise _Unusable("mask has another length than ids")
        trained = mask != -100 if "label" in schema.mask.lower() else mask == 1
        if "label" in schema.mask.lower():
            if (mask[trained] != ids[trained]).any():
                raise _Unusable("labels differ from ids")
        elif ((mask != 0) & (mask != 1)).any():
            raise _Unusable("mask values are not 0 or 1")
    return Document(record.file, _draw(ids.astype("<i8").tobytes()), ids=ids, trained=trained)


def _integers(values: Any, reason: str) -> np.ndarray:
    if not isinstance(values, list):
        raise _Unusable(reason)
    if not values:
        return np.zeros(0, np.int64)
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        raise _Unusable(reason) from None
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise _Unusable(reason)
    return array.astype(np.int64)


def _column(record: Record, name: str) -> Any:
    if name not in record.value:
        raise _Unusable("missing column")
    return record.value[name]


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Unusable("invalid UTF-8") from None


def _draw(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")
