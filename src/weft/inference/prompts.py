"""Prompts of `weft generate --prompts`, and the lines of its result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.text.tokenizer import Tokenizer
from weft.data.text.turns import Turn, Unusable, read_turns
from weft.errors import DataError
from weft.generation.requests import Completion
from weft.inference.json_lines import read_lines

_FORMS = 'Write {"prompt": "..."}, {"messages": [...]} or {"prompt_ids": [...]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompts.

    Attributes:
        index: number of the line among those with text, from 0.
        fields: the line's object. All of its fields are copied to the result.
    """

    index: int
    fields: dict[str, Any]

    def ids(self, tokenizer: Tokenizer, system: str, chats: bool) -> list[int]:
        """Return the prompt's token ids.

        Args:
            tokenizer: the model's tokenizer.
            system: system message to put first, or "".
            chats: True if a text becomes a user's message; else it is used unchanged, without a system message.

        Raises:
            DataError: if the tokenizer has no chat template, or the template rejects the messages.
        """
        if "prompt_ids" in self.fields:
            return list(self.fields["prompt_ids"])
        if (chats or system or "messages" in self.fields) and not tokenizer.has_chat:
            raise DataError("the tokenizer has no chat template and no ChatML tokens. Write prompts, with --raw.")
        turns = [Turn("system", system)] if system else []
        if "messages" in self.fields:
            turns += read_turns(self.fields["messages"], "role", "content")
            tools = self.fields.get("tools")
            return tokenizer.encode_prompt(turns, json.dumps(tools) if tools else "").tolist()
        if not chats and not system:
            return tokenizer.encode(self.fields["prompt"])
        return tokenizer.encode_prompt([*turns, Turn("user", self.fields["prompt"])]).tolist()


def read_prompts(path: Path) -> list[Prompt]:
    """Read the lines of a JSONL file. Empty lines are skipped.

    Raises:
        DataError: if the file cannot be read or has no lines.
        ConfigError: with each bad line and its number.
    """
    found = read_lines(path, "prompts", _FORMS, lambda number, fields: _read(fields))
    return [Prompt(index, fields) for index, fields in enumerate(found)]


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a line. Raise ValueError if it is no prompt."""
    forms = [name for name in ("prompt", "messages", "prompt_ids") if name in fields]
    if len(forms) != 1:
        raise ValueError(f"it has {' and '.join(forms) or 'no prompt'}. {_FORMS}")
    value = fields[forms[0]]
    if forms[0] == "prompt" and not isinstance(value, str):
        raise ValueError(f"prompt is {type(value).__name__}, not text. {_FORMS}")
    if forms[0] == "prompt_ids" and not (
        isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    ):
        raise ValueError("prompt_ids is not a list of whole numbers. Write e.g. [1, 15043]")
    if forms[0] == "messages":
        try:
            turns = read_turns(value, "role", "content")
        except Unusable as error:
            raise ValueError(str(error)) from None
        if turns[-1].role == "assistant":
            raise ValueError("the last message is the assistant's. End with a question")
    return fields


def result_line(prompt: Prompt, sample: int, done: Completion, text: str) -> dict[str, Any]:
    """Return a line of the result: the prompt's fields, and `text`, or `error` if the prompt was refused.

    Args:
        prompt: the prompt.
        sample: index of the text among the texts of one prompt.
        done: the text's tokens.
        text: the tokens' text, cut at a stop text.
    """
    line = {**prompt.fields, "index": prompt.index, "sample": sample}
    line.pop("error", None)  # of an earlier result that is the file of prompts now
    if done.error:
        return {**line, "error": done.error}
    return {
        **line, "text": text, "reason": done.reason, "tokens": len(done.ids), "log_prob": round(sum(done.log_probs), 4)
    }  # fmt: skip


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop text in it."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
