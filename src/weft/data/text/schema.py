"""Schemas of records: their kind (text, messages, pairs or token ids), and their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from weft.data.text.records import BINARY, Broken, Record, RecordReader, wide_encoding
from weft.data.text.source import FileSet
from weft.data.text.turns import list_of_messages
from weft.errors import DataError, did_you_mean

_TEXT_COLUMNS = ("text", "content", "body", "document", "article", "passage", "story", "raw_content", "code")
_MESSAGES_COLUMNS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns")
_IDS_COLUMNS = ("input_ids", "token_ids", "ids", "tokens")
_MASK_COLUMNS = ("loss_mask", "labels", "assistant_masks", "assistant_mask", "completion_mask", "mask")
_ROLE_KEYS = ("role", "from", "speaker", "author")
_CONTENT_KEYS = ("content", "value", "text", "message")
_TOOLS_COLUMNS = ("tools", "functions")
_ANSWER_COLUMNS = ("output", "response", "answer")
_QUESTION_COLUMNS = ("instruction", "question", "query", "prompt")
_INPUT_COLUMNS = ("input", "context")
#: Keys of `columns` for each schema.
_PARTS = {
    "text": ("text",),
    "messages": ("messages", "role", "content", "tools"),
    "ids": ("ids", "mask"),
    "instruction": ("instruction", "input", "output", "system"),
    "completion": ("prompt", "completion"),
}
#: Keys of `columns` for each schema of preference tasks.
_PREFERENCE_PARTS = {
    "preference": ("prompt", "chosen", "rejected", "role", "content", "tools"),
    "feedback": ("prompt", "completion", "label", "role", "content", "tools"),
}  # fmt: skip
_LOOK_AT = 50
_DELIMITER_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "'|'"}


@dataclass(frozen=True, slots=True)
class Schema:
    """Kind of records and the columns of their parts.

    Fields that are not listed here are names of columns, or "" for columns that the records do not have.

    Attributes:
        kind: text, messages, instruction, completion, ids, preference or feedback.
        file_text: whether each file is one text document without columns.
        delimiter: delimiter of a csv file, if it is not the default of the suffix.
        role: key of a message's role, or "".
        content: key of a message's content, or "".
        reasoning: value of data.reasoning.
    """

    kind: str
    file_text: bool = False
    text: str = ""
    messages: str = ""
    role: str = ""
    content: str = ""
    ids: str = ""
    mask: str = ""
    instruction: str = ""
    input: str = ""
    output: str = ""
    system: str = ""
    prompt: str = ""
    completion: str = ""
    delimiter: str = ""
    tools: str = ""
    chosen: str = ""
    rejected: str = ""
    label: str = ""
    reasoning: str = "keep"

    def __str__(self) -> str:
        separated = f", columns separated by {_DELIMITER_NAMES[self.delimiter]}" if self.delimiter else ""
        reasoning = {"mask": ", reasoning without loss", "drop": ", without reasoning"}.get(self.reasoning, "")
        return self._described() + separated + reasoning

    def _described(self) -> str:
        if self.file_text:
            return "text, one document per file"
        if self.kind == "messages":
            tools = f", tools='{self.tools}'" if self.tools else ""
            return f"messages, column '{self.messages}' (role='{self.role}', content='{self.content}'{tools})"
        if self.kind == "ids":
            return f"token ids, column '{self.ids}'" + (f" (mask='{self.mask}')" if self.mask else "")
        if self.kind == "instruction":
            asked = " + ".join(f"'{name}'" for name in (self.system, self.instruction, self.input) if name)
            return f"instructions as ChatML turns, columns {asked} -> '{self.output}' (loss on '{self.output}' only)"
        if self.kind == "completion":
            return (
                f"completions as they are, columns '{self.prompt}' -> '{self.completion}' "
                f"(loss on '{self.completion}' only)"
            )
        if self.is_preference:
            answers = f"'{self.chosen}' over '{self.rejected}'" if self.chosen else f"'{self.completion}'"
            asked = f"'{self.prompt}' -> " if self.prompt else ""
            return f"preferences, columns {asked}{answers}" + (f", liked where '{self.label}'" if self.label else "")
        return f"text, column '{self.text}'"

    @property
    def is_preference(self) -> bool:
        """True if records are preferences."""
        return self.kind in _PREFERENCE_PARTS

    @property
    def columns(self) -> list[str]:
        """Names of the columns that must be read."""
        names = (
            self.text, self.messages, self.ids, self.mask, self.instruction, self.input, self.output, self.system,
            self.prompt, self.completion, self.tools, self.chosen, self.rejected, self.label,
        )  # fmt: skip
        return [name for name in names if name]

    @property
    def is_chat(self) -> bool:
        """True if all documents are conversations, which need the tokenizer's chat tokens."""
        return self.kind in ("messages", "instruction")

    @property
    def packing(self) -> str:
        """Default of data.packing: "pad" for preferences, "fit" for other answers, "concat" for text and token ids."""
        if self.is_preference:
            return "pad"
        return "fit" if self.is_chat or self.kind == "completion" else "concat"

    @property
    def has_mask(self) -> bool:
        """True if some tokens may be excluded from the loss."""
        return self.is_chat or self.is_preference or self.kind == "completion" or bool(self.mask)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def detect_schema(
    files: FileSet, wanted: str, columns: Mapping[str, str], max_record_bytes: int, *, preferences: bool = False
) -> Schema:
    """Read the first records of `files` and return their schema.

    Args:
        files: files of one source.
        wanted: "auto" or a kind.
        columns: column names that the user gave, by part.
        max_record_bytes: longer records are skipped.
        preferences: whether the task trains on preferences only.

    Raises:
        DataError: if the files cannot be read, the wanted columns are missing, no kind is detected, or the task cannot
            train on the kind.
    """
    field = files.field
    _refuse_unreadable(files)
    if wanted != "auto" and (wanted in _PREFERENCE_PARTS) != preferences:
        reason = "it is for preference training. Set task.name=prefer, or use another schema."
        if preferences:
            reason = "task.name=prefer learns from preferences. Use schema=preference or feedback."
        raise DataError(f"{field}.schema={wanted}: {reason}")
    parts_of = _PREFERENCE_PARTS if preferences else _PARTS
    _check_column_keys(field, wanted, columns, parts_of)
    if files.format == "text":
        if preferences:
            raise DataError(_nothing_found(files, "preference", [], []))
        if wanted not in ("auto", "text") or columns:
            raise DataError(
                f"{field}.schema={wanted}: {files.path} holds text files, one document each, without columns. "
                'Use schema = "text" and no columns.'
            )
        _refuse_binary(files)
        return Schema("text", file_text=True)
    first, delimiter = _first_records(files, max_record_bytes)
    names = list(dict.fromkeys(name for record in first for name in record))
    for part, name in columns.items():
        if part not in ("role", "content") and name not in names:
            raise DataError(
                f"{field}.columns.{part}={name}: {files.path} has no such column.{did_you_mean(name, names)} "
                f"Its columns are {', '.join(names)}."
            )
    kinds = [wanted] if wanted != "auto" else _kinds_with(columns, parts_of)
    if not kinds and not preferences:
        _refuse_preferences(files, names)
    for kind in kinds or tuple(_PREFERENCE_PARTS if preferences else _IN_ORDER):
        found = _DETECTORS[kind](first, names, columns, bool(kinds))
        if found is not None:
            return replace(found, delimiter=delimiter)
    asked = "preference" if preferences and wanted == "auto" else wanted
    raise DataError(_nothing_found(files, asked, names, first))


def _refuse_unreadable(files: FileSet) -> None:
    """Raise DataError if all files are empty, or if one of the first 50 is in UTF-16 or UTF-32."""
    if files.size_bytes == 0:
        names = f"{files.files[0].path.name} is empty" if len(files.files) == 1 else "all its files are empty"
        raise DataError(f"{files.field}.path={files.path}: {names}. Give a file with data in it.")
    for file in files.files[:_LOOK_AT]:
        if encoding := wide_encoding(file):
            raise DataError(
                f"{files.field}.path={files.path}: {file.name} is {encoding}, and Weft reads UTF-8. Convert it with "
                f"iconv -f {encoding} -t UTF-8."
            )


def _kinds_with(columns: Mapping[str, str], parts_of: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [kind for kind, parts in parts_of.items() if set(columns) & set(parts)]


def _refuse_binary(files: FileSet) -> None:
    """Raise DataError if the source is a single binary file. Among other files, it counts as an invalid record."""
    if len(files.files) == 1:
        first = next(iter(RecordReader(files.files[0], max_record_bytes=_LOOK_AT)), None)
        if isinstance(first, Broken) and first.reason == BINARY:
            raise DataError(
                f"{files.field}.path={files.path}: the file is {BINARY}. Give a text file in UTF-8, "
                "or rename it to the suffix of its format."
            )


def _refuse_preferences(files: FileSet, names: Sequence[str]) -> None:
    lower = {name.lower(): name for name in reversed(names)}
    chosen = lower.get("chosen")
    if chosen and "rejected" in lower:
        prompt = lower.get("prompt")
        # Settings that train on the chosen answers only. Without a prompt column, the answers contain the prompt.
        alone = f"{files.field}.columns.prompt={prompt} {files.field}.columns.completion={chosen}"
        remedy = f"train on the preferred answers alone with {alone}" if prompt else "give messages or instructions"
        raise DataError(
            f"{files.field}.path={files.path}: '{chosen}' and '{lower['rejected']}' are preference pairs, and this "
            f"task learns answers. Set task.name=prefer to learn from both, or {remedy}."
        )


def _check_column_keys(
    field: str, wanted: str, columns: Mapping[str, str], parts_of: Mapping[str, tuple[str, ...]]
) -> None:
    every = tuple(dict.fromkeys(part for parts in parts_of.values() for part in parts))
    known = parts_of.get(wanted, every)
    for part in columns:
        if part not in known:
            raise DataError(
                f"{field}.columns.{part}: not a part of this schema.{did_you_mean(part, known)} Use {', '.join(known)}."
            )
    if parts_of is _PARTS and wanted == "auto" and len(_kinds_with(columns, parts_of)) > 1:
        raise DataError(
            f"{field}.columns={', '.join(columns)}: these belong to different schemas. "
            "Use text alone, messages with role and content, instruction with input, output and system, "
            "prompt with completion, or ids with mask."
        )


def _first_records(files: FileSet, max_record_bytes: int) -> tuple[list[dict[str, Any]], str]:
    for file in files.files:
        reader = RecordReader(file, max_record_bytes=max_record_bytes)
        records = [item.value for item in islice(reader, _LOOK_AT) if isinstance(item, Record)]
        if records:
            return records, reader.delimiter
    raise DataError(
        f"{files.field}.path={files.path}: none of the first {_LOOK_AT} records of any file can be read. "
        f"Look at {files.files[0].name}; one JSON object a line, an array of objects, or a header and rows, is needed."
    )


def _pick(names: Sequence[str], known: Sequence[str]) -> str:
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in known if name in lower), "")


def _values(first: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in first if record.get(name) is not None]


def _detect_text(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    name = columns.get("text") or _pick(names, _TEXT_COLUMNS)
    if not name:
        strings = _text_columns(first, names)
        name = strings[0] if len(strings) == 1 else ""
    if not name or (not asked and not any(isinstance(value, str) for value in _values(first, name))):
        return None
    return Schema("text", text=name)


def _detect_messages(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    name = columns.get("messages") or _pick(names, _MESSAGES_COLUMNS)
    turns = [
        turn
        for value in map(list_of_messages, _values(first, name))
        if isinstance(value, list)
        for turn in value
        if isinstance(turn, dict)
    ]
    keys = list(dict.fromkeys(key for turn in turns for key in turn))
    role = columns.get("role") or _pick(keys, _ROLE_KEYS)
    content = columns.get("content") or _pick(keys, _CONTENT_KEYS)
    if name and role in keys and content in keys:
        tools = columns.get("tools") or _pick(names, _TOOLS_COLUMNS)
        return Schema("messages", messages=name, role=role, content=content, tools=tools)
    return None


def _detect_instruction(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    """Return the schema of instructions and answers, or None.

    If the records have a text column, only Alpaca's names match, unless the user asked for this kind.
    """
    texts = _text_columns(first, names)
    plain = not asked and bool(_pick(texts, _TEXT_COLUMNS))
    instruction = columns.get("instruction") or _pick(texts, _QUESTION_COLUMNS[: 1 if plain else None])
    output = columns.get("output") or _pick(texts, _ANSWER_COLUMNS[: 1 if plain else None])
    if not instruction or not output:
        return None
    system = columns.get("system") or _pick(texts, ("system", "system_prompt"))
    extra = columns.get("input") or _pick(texts, _INPUT_COLUMNS)
    return Schema("instruction", instruction=instruction, input=extra, output=output, system=system)


def _detect_completion(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    texts = _text_columns(first, names)
    prompt = columns.get("prompt") or _pick(texts, ("prompt",))
    completion = columns.get("completion") or _pick(texts, ("completion",))
    return Schema("completion", prompt=prompt, completion=completion) if prompt and completion else None


def _text_columns(first: Any, names: list[str]) -> list[str]:
    return [name for name in names if any(isinstance(value, str) for value in _values(first, name))]


def _detect_ids(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    name = columns.get("ids") or _pick(names, _IDS_COLUMNS)
    lists = [value for value in _values(first, name) if isinstance(value, list)] if name else []
    if not name or not any(value and isinstance(value[0], int) for value in lists):
        return None
    return Schema("ids", ids=name, mask=columns.get("mask") or _pick(names, _MASK_COLUMNS))


def _detect_preference(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    chosen = columns.get("chosen") or _pick(names, ("chosen",))
    rejected = columns.get("rejected") or _pick(names, ("rejected",))
    if not chosen or not rejected:
        return None
    return Schema("preference", chosen=chosen, rejected=rejected, **_prompt_columns(first, names, columns, [chosen]))


def _detect_feedback(first: Any, names: list[str], columns: Mapping[str, str], asked: bool) -> Schema | None:
    completion = columns.get("completion") or _pick(names, ("completion",))
    label = columns.get("label") or _pick(names, ("label",))
    beside = _prompt_columns(first, names, columns, [completion])
    if not completion or not label or not beside["prompt"]:
        return None
    return Schema("feedback", completion=completion, label=label, **beside)


def _prompt_columns(first: Any, names: list[str], columns: Mapping[str, str], answers: list[str]) -> dict[str, Any]:
    """Return the columns of prompt and tools, and the keys of messages if the prompt or an answer is a list of them."""
    prompt = columns.get("prompt") or _pick(names, (*_QUESTION_COLUMNS, "messages"))
    lists = [value for name in (prompt, *answers) for value in _values(first, name) if isinstance(value, list)]
    keys = list(dict.fromkeys(key for value in lists for turn in value if isinstance(turn, dict) for key in turn))
    return {
        "prompt": prompt,
        "tools": columns.get("tools") or _pick(names, _TOOLS_COLUMNS),
        "role": columns.get("role") or _pick(keys, _ROLE_KEYS),
        "content": columns.get("content") or _pick(keys, _CONTENT_KEYS),
    }


#: Kinds in order of detection. The first match counts.
_IN_ORDER = ("messages", "ids", "instruction", "completion", "text")
_DETECTORS = {
    "text": _detect_text, "messages": _detect_messages, "ids": _detect_ids, "instruction": _detect_instruction,
    "completion": _detect_completion, "preference": _detect_preference, "feedback": _detect_feedback,
}  # fmt: skip


def _nothing_found(files: FileSet, wanted: str, names: list[str], first: list[dict[str, Any]]) -> str:
    what = {
        "text": "a column of text", "messages": "a column of messages (lists of role and content)",
        "ids": "a column of token ids (lists of integers)", "instruction": "a pair of instruction and output",
        "completion": "a pair of prompt and completion", "preference": "a pair of columns chosen and rejected",
        "feedback": "columns prompt, completion and label", "auto": "text, messages, instructions or token ids",
    }[wanted]  # fmt: skip
    columns = ", ".join(f"{name} ({_type_of(first, name)})" for name in names[:20]) or "none"
    key = f"{files.field}.columns"
    example = {
        "messages": f"{key}.messages=NAME", "ids": f"{key}.ids=NAME", "text": f"{key}.text=NAME",
        "instruction": f"{key}.instruction=NAME {key}.output=NAME",
        "completion": f"{key}.prompt=NAME {key}.completion=NAME",
        "preference": f"{key}.chosen=NAME {key}.rejected=NAME for pairs, or {key}.completion=NAME {key}.label=NAME "
        "for answers with a verdict", "feedback": f"{key}.prompt=NAME {key}.completion=NAME {key}.label=NAME",
        "auto": f"{key}.text=NAME for text, {key}.instruction=NAME {key}.output=NAME for questions with answers",
    }[wanted]  # fmt: skip
    return (
        f"{files.field}.schema={wanted}: {what} was not found in {files.path}, whose columns are {columns}. "
        f"Name them: {example}."
    )


def _type_of(first: list[dict[str, Any]], name: str) -> str:
    values = _values(first, name)
    return type(values[0]).__name__ if values else "empty"
