"""What the records of a source are: text, messages or token ids, and which columns hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from weft.data.records import Record, RecordReader
from weft.data.source import FileSet
from weft.errors import DataError, did_you_mean

_TEXT_COLUMNS = ("text", "content", "body", "document", "article", "passage", "story", "raw_content", "code")
_MESSAGES_COLUMNS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
_IDS_COLUMNS = ("input_ids", "token_ids", "ids", "tokens")
_MASK_COLUMNS = ("loss_mask", "labels", "assistant_masks", "assistant_mask", "completion_mask", "mask")
_ROLE_KEYS = ("role", "from", "speaker", "author")
_CONTENT_KEYS = ("content", "value", "text", "message")
#: Keys of `columns` for each schema; the first is the one that must exist.
_PARTS = {"text": ("text",), "messages": ("messages", "role", "content"), "ids": ("ids", "mask")}
_LOOK_AT = 50


@dataclass(frozen=True, slots=True)
class Schema:
    """kind: text, messages or ids. file_text: each file is one text document, and there are no columns."""

    kind: str
    file_text: bool = False
    text: str = ""
    messages: str = ""
    role: str = ""
    content: str = ""
    ids: str = ""
    mask: str = ""

    def __str__(self) -> str:
        if self.file_text:
            return "text, one document per file"
        if self.kind == "messages":
            return f"messages, column '{self.messages}' (role='{self.role}', content='{self.content}')"
        if self.kind == "ids":
            return f"token ids, column '{self.ids}'" + (f" (mask='{self.mask}')" if self.mask else "")
        return f"text, column '{self.text}'"

    @property
    def columns(self) -> list[str]:
        """The columns that must be read."""
        return [name for name in (self.text, self.messages, self.ids, self.mask) if name]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def detect_schema(files: FileSet, wanted: str, columns: Mapping[str, str], max_record_bytes: int) -> Schema:
    """Look at the first records of `files`. wanted: "auto" or a kind. columns: names given by the user.

    Raises DataError when the wanted columns are not there, or nothing known is.
    """
    field = files.field
    _check_column_keys(field, wanted, columns)
    if files.format == "text":
        if wanted not in ("auto", "text") or columns:
            raise DataError(
                f"{field}.schema={wanted}: {files.path} holds text files, one document each, without columns. "
                'Use schema = "text" and no columns.'
            )
        return Schema("text", file_text=True)
    first = _first_records(files, max_record_bytes)
    names = list(dict.fromkeys(name for record in first for name in record))
    for part, name in columns.items():
        if part in ("text", "messages", "ids", "mask") and name not in names:
            raise DataError(
                f"{field}.columns.{part}={name}: {files.path} has no such column.{did_you_mean(name, names)} "
                f"Its columns are {', '.join(names)}."
            )
    kinds = [wanted] if wanted != "auto" else [kind for kind, parts in _PARTS.items() if set(columns) & set(parts)]
    for kind in kinds or ("messages", "ids", "text"):
        found = _DETECTORS[kind](first, names, columns, bool(kinds))
        if found is not None:
            return found
    raise DataError(_nothing_found(files, wanted, names, first))


def _check_column_keys(field: str, wanted: str, columns: Mapping[str, str]) -> None:
    known = _PARTS[wanted] if wanted in _PARTS else tuple(part for parts in _PARTS.values() for part in parts)
    for part in columns:
        if part not in known:
            raise DataError(
                f"{field}.columns.{part}: not a part of this schema.{did_you_mean(part, known)} Use {', '.join(known)}."
            )
    if wanted == "auto" and len([kind for kind, parts in _PARTS.items() if set(columns) & set(parts)]) > 1:
        raise DataError(
            f"{field}.columns={', '.join(columns)}: these belong to different schemas. "
            "Use text alone, or messages with role and content, or ids with mask."
        )


def _first_records(files: FileSet, max_record_bytes: int) -> list[dict[str, Any]]:
    for file in files.files:
        reader = RecordReader(file, max_record_bytes=max_record_bytes)
        records = [item.value for item in islice(reader, _LOOK_AT) if isinstance(item, Record)]
        if records:
            return records
    raise DataError(
        f"{files.field}.path={files.path}: none of the first {_LOOK_AT} records of any file can be read. "
        f"Look at {files.files[0].name}; one JSON object a line, or a header and rows, is needed."
    )


def _pick(names: Sequence[str], known: Sequence[str]) -> str:
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in known if name in lower), "")


def _values(first: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in first if record.get(name) is not None]


def _detect_text(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    name = columns.get("text") or _pick(names, _TEXT_COLUMNS)
    if not name:
        strings = [name for name in names if any(isinstance(value, str) for value in _values(first, name))]
        name = strings[0] if len(strings) == 1 else ""
    if not name or (not asked and not any(isinstance(value, str) for value in _values(first, name))):
        return None
    return Schema("text", text=name)


def _detect_messages(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    name = columns.get("messages") or _pick(names, _MESSAGES_COLUMNS)
    turns = [
        turn for value in _values(first, name) if isinstance(value, list) for turn in value if isinstance(turn, dict)
    ]
    keys = list(dict.fromkeys(key for turn in turns for key in turn))
    role = columns.get("role") or _pick(keys, _ROLE_KEYS)
    content = columns.get("content") or _pick(keys, _CONTENT_KEYS)
    if name and role in keys and content in keys:
        return Schema("messages", messages=name, role=role, content=content)
    return None


def _detect_ids(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    name = columns.get("ids") or _pick(names, _IDS_COLUMNS)
    lists = [value for value in _values(first, name) if isinstance(value, list)] if name else []
    if not name or not any(value and isinstance(value[0], int) for value in lists):
        return None
    return Schema("ids", ids=name, mask=columns.get("mask") or _pick(names, _MASK_COLUMNS))


_DETECTORS = {"text": _detect_text, "messages": _detect_messages, "ids": _detect_ids}


def _nothing_found(files: FileSet, wanted: str, names: list[str], first: list[dict[str, Any]]) -> str:
    what = {
        "text": "a column of text", "messages": "a column of messages (lists of role and content)",
        "ids": "a column of token ids (lists of integers)", "auto": "text, messages or token ids",
    }[wanted]  # fmt: skip
    columns = ", ".join(f"{name} ({_type_of(first, name)})" for name in names[:20]) or "none"
    return (
        f"{files.field}.schema={wanted}: {what} was not found in {files.path}, whose columns are {columns}. "
        f'Name it, such as columns = {{text = "{names[0] if names else "text"}"}}.'
    )


def _type_of(first: list[dict[str, Any]], name: str) -> str:
    values = _values(first, name)
    return type(values[0]).__name__ if values else "empty"
