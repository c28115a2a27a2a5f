"""Documents, and functions that make them from records of each kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from weft.data.text.records import Broken, Record
from weft.data.text.schema import Schema
from weft.data.text.turns import (
    Filled,
    Turn,
    Unusable,
    apply_reasoning,
    as_json,
    content_of_turns,
    filled_by_table,
    parameters_of,
    read_turns,
    schema_filled_by_table,
    taken_for_assistant,
    without_nulls,
)

#: Number of possible values of `Document.draw`.
ALL_DRAWS = 2**32


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the training data. Exactly one of text, turns and ids is set.

    Attributes:
        file: name of its file.
        draw: 32 bits of the content's digest. They determine whether the document is in the train or the eval split.
        text: its text.
        turns: turns of a conversation.
        ids: token ids.
        trained: one bool per id, or None if all are trained.
        part: index of a text chunk in its file.
        last: whether this is the last chunk of its file.
        prompt: text before `text` that is not trained.
        note: remark for the user, which is counted over documents.
        tools: JSON list of the tools that the assistant may call, or "".
        other: for the chosen document of a preference pair, the rejected one.
        liking: factor of its trained tokens' weights: 1 for desired answers, -1 for rejected or undesired ones.
        number: number of the record in the file, from 1, or 0 if unknown.
    """

    file: str
    draw: int
    text: str | None = None
    turns: tuple[Turn, ...] | None = None
    ids: np.ndarray | None = None
    trained: np.ndarray | None = None
    part: int = 0
    last: bool = True
    prompt: str | None = None
    note: str = ""
    tools: str = ""
    other: Document | None = None
    liking: float = 1.0
    number: int = 0

    @property
    def source(self) -> str:
        """File and record number, for errors."""
        return f"{self.file}:{self.number}" if self.number else self.file


def tools_of(record: Record, schema: Schema) -> str:
    """Return the tools that the assistant may call as a JSON list, or "" for no tools. Raises Unusable if malformed."""
    found = record.value.get(schema.tools) if schema.tools else None
    if isinstance(found, list) and (record.filled or schema_filled_by_table(found)):
        found = without_nulls(found)
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            raise Unusable("tools are not JSON") from None
    if not found:
        return ""
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise Unusable("tools are not a list of objects")
    return as_json(found)


def nulls_of(record: Record, schema: Schema, tools: str, *columns: str) -> Filled:
    """Return whether a table added null values to the record's objects, and the parameters that its tools declare.

    Args:
        record: the record.
        schema: the record's columns.
        tools: JSON of its tools, or "".
        columns: columns with messages.
    """
    given = record.value.get(schema.tools) if schema.tools else None
    filled = record.filled or any(filled_by_table(record.value.get(name)) for name in columns)
    return Filled(filled or schema_filled_by_table(given), parameters_of(json.loads(tools)) if tools else {})


def column_of(record: Record, name: str) -> Any:
    """Return the value of a column.

    Raises:
        Unusable: if the column is missing.
    """
    if name not in record.value:
        raise Unusable("missing column")
    return record.value[name]


def draw_of(text: str) -> int:
    """Return a 32-bit hash of a text.

    Raises:
        Unusable: if it is not valid UTF-8.
    """
    try:
        return draw_of_bytes(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise Unusable("invalid UTF-8") from None


def draw_of_bytes(content: bytes) -> int:
    """Return a 32-bit hash of bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")


# Preference records: pairs of a chosen and a rejected answer, and answers with a verdict (desired or not).

#: Note for a pair whose two answers are equal.
_EQUAL = "with equal answers"
_VERDICTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def read_pair(record: Record, schema: Schema) -> Document:
    """Return the document of the chosen answer. Its `other` is the document of the rejected answer, in the same split.

    Raises:
        Unusable: if an answer is missing, empty or malformed, if one is a text and the other a chat, or if there is no
            prompt column and the answers do not have a common prompt.
    """
    filled = _filled(record, schema)
    answers = [_answer(record, getattr(schema, part), part, schema, filled) for part in ("chosen", "rejected")]
    prompt = _prompt(record, schema, filled)
    both = [_full(prompt, answer) for answer in answers]
    if len({isinstance(one, _Plain) for one in both}) > 1:
        raise Unusable("chosen and rejected are of different kinds")
    if prompt is None:
        both = _with_common_context(*both)
    chosen, rejected = (_document(record, one, schema) for one in both)
    draw = draw_of(json.dumps([_content(chosen), _content(rejected)], ensure_ascii=False))
    note = _EQUAL if _content(chosen) == _content(rejected) else ""
    return replace(chosen, draw=draw, note=note, other=replace(rejected, draw=draw, liking=-1.0))


def read_verdict(record: Record, schema: Schema) -> Document:
    """Return the document of an answer with a verdict. For an undesired answer, `liking` is -1.

    Raises:
        Unusable: if the answer is missing, empty or malformed, or the verdict is neither true nor false.
    """
    filled = _filled(record, schema)
    prompt, answer = (
        _prompt(record, schema, filled), _answer(record, schema.completion, "completion", schema, filled)
    )  # fmt: skip
    verdict = column_of(record, schema.label)
    liked = _VERDICTS.get(str(verdict).strip().lower())
    if liked is None:
        raise Unusable("a label is neither true nor false")
    document = _document(record, _full(prompt, answer), schema)
    draw = draw_of(json.dumps([_content(document), liked], ensure_ascii=False))
    return replace(document, draw=draw, liking=1.0 if liked else -1.0)


class _Plain(NamedTuple):
    prompt: str
    text: str


#: Prompt and answer joined.
_Full = _Plain | tuple[Turn, ...]


def _filled(record: Record, schema: Schema) -> Filled:
    columns = [name for name in (schema.prompt, schema.chosen, schema.rejected, schema.completion) if name]
    return nulls_of(record, schema, tools_of(record, schema), *columns)


def _prompt(record: Record, schema: Schema, filled: Filled) -> str | tuple[Turn, ...] | None:
    value = record.value.get(schema.prompt) if schema.prompt else None
    if value is None or value == [] or isinstance(value, str):
        return value or None
    return tuple(turn.as_context() for turn in _turns(value, schema, filled))


def _answer(record: Record, column: str, part: str, schema: Schema, filled: Filled) -> str | tuple[Turn, ...]:
    value = record.value.get(column)
    if value is None:
        raise Unusable(f"no {part} answer" if part != "completion" else "no completion")
    if isinstance(value, str):
        if not value.strip():
            raise Unusable(f"empty {part} answer" if part != "completion" else "empty completion")
        return value
    turns = _turns([value] if isinstance(value, dict) else value, schema, filled)
    if turns[-1].role != "assistant":
        raise Unusable(f"{part} does not end with the assistant's turn")
    if turns[-1].is_empty:
        raise Unusable(f"empty {part} answer" if part != "completion" else "empty completion")
    return turns


def _turns(messages: Any, schema: Schema, filled: Filled) -> tuple[Turn, ...]:
    """Return turns with weight 1 for each weight other than 0, since preference losses have no other weights."""
    turns = read_turns(messages, schema.role or "role", schema.content or "content", filled)
    return tuple(turn._replace(weight=float(turn.weight != 0)) for turn in turns)


def _full(prompt: str | tuple[Turn, ...] | None, answer: str | tuple[Turn, ...]) -> _Full:
    if isinstance(answer, str):
        if prompt is None or isinstance(prompt, str):
            return _Plain(prompt or "", answer)
        return (*prompt, Turn("assistant", answer))
    if isinstance(prompt, str):
        # Some data sets repeat the question before each answer. The prompt column is then redundant.
        if answer[0].role != "assistant":
            last = max(place for place, turn in enumerate(answer) if turn.role != "assistant")
            return (*(turn.as_context() for turn in answer[: last + 1]), *answer[last + 1 :])
        return (Turn("user", prompt), *answer)
    return _without_repeats(prompt or (), answer)


def _without_repeats(prompt: tuple[Turn, ...], answer: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Join the messages of a prompt and an answer, without the messages of the prompt that the answer repeats."""
    asked, full = _plain_turns(prompt), _plain_turns(answer)
    most = min(len(asked), len(full) - 1)
    repeated = next((size for size in range(most, 0, -1) if asked[-size:] == full[:size]), 0)
    if repeated:
        return (*prompt, *answer[repeated:])
    ends = (end for end in range(len(asked), len(full)) if asked and full[end - len(asked) : end] == asked)
    if end := next(ends, 0):
        return (*(turn.as_context() for turn in answer[:end]), *answer[end:])
    return (*prompt, *answer)


def _plain_turns(turns: tuple[Turn, ...]) -> list[tuple[str, str, str]]:
    return [(turn.role, turn.content.strip(), turn.more) for turn in turns]


def _with_common_context(chosen: _Full, rejected: _Full) -> list[_Full]:
    """Split two answers after their common prefix, which is the prompt if the data has no prompt column.

    Raises Unusable if the rest of a text is blank.
    """
    if isinstance(chosen, _Plain) and isinstance(rejected, _Plain):
        cut = _shared_prefix(chosen.text, rejected.text)
        found = [_Plain(one.text[:cut], one.text[cut:]) for one in (chosen, rejected)]
        if not all(one.text.strip() for one in found):
            raise Unusable("one answer is the beginning of the other, and there is no prompt")
        return list(found)
    assert not isinstance(chosen, _Plain)
    assert not isinstance(rejected, _Plain)
    least = min(len(chosen), len(rejected)) - 1
    number = next((place for place in range(least) if chosen[place] != rejected[place]), least)
    return [(*(turn.as_context() for turn in one[:number]), *one[number:]) for one in (chosen, rejected)]


def _shared_prefix(first: str, second: str) -> int:
    """Return the length of a common prefix of two texts that ends after a newline or before a space, or 0."""
    alike = min(len(first), len(second))
    same = next((place for place in range(alike) if first[place] != second[place]), alike)
    same -= same == len(first) == len(second)
    line, word = first.rfind("\n", 0, same) + 1, first.rfind(" ", 0, same)
    return max(line, word, 0)


def _document(record: Record, full: _Full, schema: Schema) -> Document:
    if isinstance(full, _Plain):
        if schema.reasoning != "keep":
            raise Unusable("an answer that is no conversation, which data.reasoning needs")
        return Document(record.file, 0, text=full.text, prompt=full.prompt, number=record.number)
    turns = apply_reasoning(full, schema.reasoning)
    if turns[-1].is_empty:
        raise Unusable("an answer of only reasoning, which data.reasoning drops")
    return Document(record.file, 0, turns=turns, tools=tools_of(record, schema), number=record.number)


def _content(document: Document) -> Sequence[Any]:
    if document.turns is not None:
        return [*content_of_turns(document.turns), document.tools]
    return [document.prompt, document.text]


# Conversion of a record into a document, or into a `Broken` with the reason.

#: Note for a document with an empty answer. Only its end token is trained.
EMPTY_ANSWER = "with an empty answer"
#: Note for a conversation in which data.reasoning has nothing to mask or drop.
NO_REASONING = "without reasoning that data.reasoning finds"


def read_document(record: Record, schema: Schema, vocab_size: int) -> Document | Broken:
    """Convert a record to a document, or return a `Broken` with the reason why it cannot be used.

    Args:
        record: the record from a reader.
        schema: the record's columns.
        vocab_size: records with ids at or above it are rejected.
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
    # A blank chunk in the middle of a file is part of its document.
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
    if all(turn.role == "assistant" for turn in turns):
        raise Unusable("no turn before the answer")
    note = taken_for_assistant(messages, schema.role)
    applied = apply_reasoning(turns, schema.reasoning)
    if schema.reasoning != "keep" and not any(turn.has_reasoning for turn in turns):
        note = note or NO_REASONING
    return _conversation(record, applied, note, tools)


def _conversation(record: Record, turns: tuple[Turn, ...], note: str = "", tools: str = "") -> Document:
    if any(turn.is_empty for turn in turns if turn.role == "assistant"):
        note = EMPTY_ANSWER
    content = content_of_turns(turns)
    draw = draw_of(json.dumps([*content, tools] if tools else content, ensure_ascii=False))
    return Document(record.file, draw, turns=turns, note=note, tools=tools, number=record.number)


def _instruction(record: Record, schema: Schema) -> Document:
    """Return Alpaca's columns as a chat. The input follows the instruction in the user's turn."""
    system, asked, more = (_optional_text(record, name) for name in (schema.system, schema.instruction, schema.input))
    answer = column_of(record, schema.output)
    if not isinstance(answer, str):
        raise Unusable("not a string")
    question = "\n\n".join(part for part in (asked, more) if part.strip())
    if not question:
        raise Unusable("empty")
    turns = apply_reasoning((Turn("user", question), Turn("assistant", answer)), schema.reasoning)
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
