"""Records that say which answers people prefer: pairs of a chosen and a rejected answer, and answers with a verdict.

Prompt and answers are texts, used as they are, or lists of messages, which are chats. Trained is the answer: an
assistant's turns behind what both answers of a pair begin with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.data.read.filled import Filled
from weft.data.read.one_document import Document, column_of, draw_of, nulls_of, tools_of
from weft.data.read.records import Record
from weft.data.read.schema import Schema
from weft.data.read.turns import Turn, Unusable, content_of_turns, read_turns

#: The note of a pair that says nothing about what is preferred.
_EQUAL = "with equal answers"
_VERDICTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def read_pair(record: Record, schema: Schema) -> Document:
    """Return the document of the chosen answer; its `other` is that of the rejected one, of the same draw.

    Raises:
        Unusable: where an answer is missing or says nothing.
    """
    filled = _filled(record, schema)
    answers = [_answer(record, getattr(schema, part), part, schema, filled) for part in ("chosen", "rejected")]
    prompt = _prompt(record, schema, filled)
    both = [_full(prompt, answer) for answer in answers]
    if prompt is None:
        both = _with_common_context(*both)
    chosen, rejected = (_document(record, one, schema) for one in both)
    draw = draw_of(json.dumps([_content(chosen), _content(rejected)], ensure_ascii=False))
    note = _EQUAL if _content(chosen) == _content(rejected) else ""
    return replace(chosen, draw=draw, note=note, other=replace(rejected, draw=draw, liking=-1.0))


def read_verdict(record: Record, schema: Schema) -> Document:
    """Return the document of an answer that is wanted or not; of one that is not, `liking` is -1.

    Raises:
        Unusable: where the answer or the verdict is missing.
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
    """An answer as text, with the text before it."""

    prompt: str
    text: str


#: Prompt and answer as one.
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
    """Turns whose weight is 0 or 1: of an answer a token counts or not."""
    turns = read_turns(messages, schema.role or "role", schema.content or "content", filled)
    return tuple(turn._replace(weight=float(turn.weight != 0)) for turn in turns)


def _full(prompt: str | tuple[Turn, ...] | None, answer: str | tuple[Turn, ...]) -> _Full:
    """Prompt and answer as one; they may be of different kinds."""
    if isinstance(answer, str):
        if prompt is None or isinstance(prompt, str):
            return _Plain(prompt or "", answer)
        return (*prompt, Turn("assistant", answer))
    if isinstance(prompt, str):
        # Some data sets repeat the question before each answer; then the prompt column says nothing more.
        if answer[0].role != "assistant":
            last = max(place for place, turn in enumerate(answer) if turn.role != "assistant")
            return (*(turn.as_context() for turn in answer[: last + 1]), *answer[last + 1 :])
        return (Turn("user", prompt), *answer)
    return _without_repeats(prompt or (), answer)


def _without_repeats(prompt: tuple[Turn, ...], answer: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """A prompt of messages and an answer that may repeat all of it, its end, or hold it behind turns of its own."""
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
    """Both without a prompt of their own: it is what they begin with alike."""
    if isinstance(chosen, _Plain) and isinstance(rejected, _Plain):
        cut = _word_border(chosen.text, rejected.text)
        found = [_Plain(one.text[:cut], one.text[cut:]) for one in (chosen, rejected)]
        if not all(one.text.strip() for one in found):
            raise Unusable("one answer is the beginning of the other, and there is no prompt")
        return list(found)
    if isinstance(chosen, _Plain) or isinstance(rejected, _Plain):
        raise Unusable("chosen and rejected are of different kinds")
    least = min(len(chosen), len(rejected)) - 1
    number = next((place for place in range(least) if chosen[place] != rejected[place]), least)
    return [(*(turn.as_context() for turn in one[:number]), *one[number:]) for one in (chosen, rejected)]


def _word_border(first: str, second: str) -> int:
    """Characters that two texts begin with alike, up to the end of a line or the border of a word."""
    alike = min(len(first), len(second))
    same = next((place for place in range(alike) if first[place] != second[place]), alike)
    same -= same == len(first) == len(second)
    line, word = first.rfind("\n", 0, same) + 1, first.rfind(" ", 0, same)
    return max(line, word, 0)


def _document(record: Record, full: _Full, schema: Schema) -> Document:
    if isinstance(full, _Plain):
        return Document(record.file, 0, text=full.text, prompt=full.prompt, number=record.number)
    return Document(record.file, 0, turns=full, tools=tools_of(record, schema), number=record.number)


def _content(document: Document) -> Sequence[Any]:
    if document.turns is not None:
        return [*content_of_turns(document.turns), document.tools]
    return [document.prompt, document.text]
