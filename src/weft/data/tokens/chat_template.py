"""Conversations through a tokenizer's own chat template, rendered by transformers, and which characters are trained.

Trained: what an assistant says, and the token that ends its turn.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import DataError, MissingExtra

#: Stand in for contents while the template is looked at. Of a private area of Unicode, so that no text has them.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"

Turns = Sequence[tuple[str, str]]
Span = tuple[int, int]


class ChatTemplate:
    """A chat template and the names of special tokens that it knows, such as bos_token.

    Args:
        chat: "chat_template", and names of tokens by what they are.
        specials: all special tokens of the tokenizer, as text.
    """

    def __init__(self, chat: Mapping[str, str], specials: Sequence[str]):
        self._template = chat["chat_template"]
        self._names = {key: value for key, value in chat.items() if key != "chat_template"}
        self._specials = sorted((one for one in specials if one), key=len, reverse=True)

    def render(self, turns: Turns) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the ranges of characters that are trained.

        Args:
            turns: (role, content) pairs.

        Raises:
            DataError: where the template refuses the roles, or leaves out or reorders answers.
            MissingExtra: without transformers.
        """
        text, around = self._text(turns), self._around(turns, {"assistant"})
        answers = [content for role, content in turns if role == "assistant"]
        spans, place = [], self._expect(text, around[0], 0)
        for answer, after in zip(answers, around[1:], strict=True):
            fits = (one for one in (answer, answer.strip()) if text.startswith(one + after, place))
            end = next((place + len(one) for one in fits), -1)
            if end < 0:  # the template rewrites answers, as where it leaves out thoughts
                end = text.find(after, place) if after else len(text)
            if end < 0:
                raise _unclear()
            spans.append((place, end + self._end_mark(after)))
            place = end + len(after)
        return text, spans

    def apart(self, turns: Turns) -> list[tuple[str, bool]]:
        """Return the text in pieces: (text, whether it is a content, in which no special token counts)."""
        around = self._around(turns, {role for role, _ in turns})
        pieces = [(around[0], False)]
        for (_, content), after in zip(turns, around[1:], strict=True):
            pieces += [(content, True), (after, False)]
        return pieces

    def has_special(self, turns: Turns) -> bool:
        """Return whether a content looks like a special token somewhere."""
        return any(name in content for _, content in turns for name in self._specials)

    def _around(self, turns: Turns, roles: set[str]) -> list[str]:
        """The template's own text before, between and after the contents of some roles."""
        marks = [f"{_OPEN}{number}{_CLOSE}" for number in range(len(turns))]
        used = [mark for mark, (role, _) in zip(marks, turns, strict=True) if role in roles]
        text = self._text([(role, mark if mark in used else said)
                           for mark, (role, said) in zip(marks, turns, strict=True)])  # fmt: skip
        pieces = []
        for mark in used:
            if text.count(mark) != 1:
                raise _unclear()
            before, _, text = text.partition(mark)
            pieces.append(before)
        return [*pieces, text]

    def _expect(self, text: str, start: str, place: int) -> int:
        if not text.startswith(start, place):
            raise _unclear()
        return place + len(start)

    def _end_mark(self, after: str) -> int:
        """Characters up to the end of the special token that ends a turn; 0 where none follows the answer."""
        rest = after.lstrip()
        name = next((one for one in self._specials if rest.startswith(one)), "")
        return len(after) - len(rest) + len(name) if name else 0

    def _text(self, turns: Turns) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            library: Any = importlib.import_module("transformers.utils.chat_template_utils")
            render = library.render_jinja_template
        except (ImportError, AttributeError) as error:
            raise MissingExtra("transformers", "hf", "a chat template") from error
        try:
            rendered = render([messages], chat_template=self._template, add_generation_prompt=False, **self._names)
        except Exception as error:  # a template raises what it likes, such as that roles must alternate
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
            roles = ", ".join(role for role, _ in turns)
            raise DataError(
                f"tokenizer: its chat template refuses a conversation of {roles} ({first}). Change the data."
            ) from error
        return rendered[0][0]


def _unclear() -> DataError:
    return DataError(
        "tokenizer: its chat template leaves out or repeats answers, so Weft cannot tell what is trained. "
        "Use another chat template, or data of schema=ids with a mask."
    )
