"""Conversations through a tokenizer's own chat template, rendered by transformers, and which characters are trained.

Trained: what an assistant says, and the token that ends its turn. Three ways find it, by what template and conversation
allow: the template's own `{% generation %}` marks; contents that are told apart by marks in their place; and, for turns
with tool calls, what a turn adds to the text that the conversation before it gives.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.data.read import Turn
from weft.errors import DataError, MissingExtra

#: Stand in for contents while the template is looked at. Of a private area of Unicode, so that no text has them.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TrainedSpan(NamedTuple):
    """Characters low..high, and their weight in the loss."""

    low: int
    high: int
    weight: float = 1.0


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
        self._marks_answers = bool(_GENERATION.search(self._template))

    def render(self, turns: Sequence[Turn], tools: str = "") -> tuple[str, list[TrainedSpan]]:
        """Return the text of a conversation, and the ranges of characters that are trained.

        Args:
            turns: of the conversation.
            tools: JSON of what the assistant may call; "": nothing.

        Raises:
            DataError: where the template refuses the roles, or leaves out or reorders answers.
            MissingExtra: without transformers.
        """
        text, marked = self._text(turns, tools)
        answers = [turn for turn in turns if turn.role == "assistant"]
        if self._marks_answers:
            spans = _of_answers(marked, answers)
        elif any(turn.more for turn in answers):
            spans = list(self._by_growth(text, turns, tools))
        else:
            spans = list(self._by_marks(text, turns, tools))
        return text, [span for span in spans if span.weight]

    def apart(self, turns: Sequence[Turn], tools: str = "") -> list[tuple[str, bool]]:
        """Return the text in pieces: (text, whether it is a content, in which no special token counts).

        Raises:
            DataError: where a special token stands in a tool call, which cannot be told apart.
        """
        if any(name in part for part in (tools, *(turn.more for turn in turns)) for name in self._specials):
            raise DataError(
                "tokenizer: a tool call holds the text of one of its special tokens, and would become that token. "
                "Take it out of the data."
            )
        roles = {turn.role for turn in turns}
        around = self._around(turns, roles, tools)
        pieces = [(around[0], False)]
        for turn, after in zip(filter(_has_content, turns), around[1:], strict=True):
            pieces += [(turn.content, True), (after, False)]
        return pieces

    def has_special(self, turns: Sequence[Turn], tools: str = "") -> bool:
        """Return whether a content or a tool call looks like a special token somewhere."""
        parts = (tools, *(part for turn in turns for part in (turn.content, turn.more)))
        return any(name in part for part in parts for name in self._specials)

    def after_answer(self) -> str:
        """Return the text behind the answer of a conversation of one question, without blanks at its ends.

        Raises:
            DataError: as `render` raises it.
        """
        return self._around((Turn("user", "?"), Turn("assistant", "!")), {"assistant"}, "")[-1].strip()

    def end_marks(self) -> list[str]:
        """Return the special token that ends an assistant's turn, in a list; an empty one where plain text does.

        Raises:
            DataError: as `render` raises it.
        """
        after = self.after_answer()
        return [name for name in self._specials if after.startswith(name)][:1]

    def begins_with_special(self, text: str) -> bool:
        """Return whether a text begins with a special token."""
        return any(text.startswith(name) for name in self._specials)

    def _by_marks(self, text: str, turns: Sequence[Turn], tools: str) -> Iterator[TrainedSpan]:
        around = self._around(turns, {"assistant"}, tools)
        answers = [turn for turn in turns if turn.role == "assistant"]
        if not text.startswith(around[0]):
            raise _unclear()
        place = len(around[0])
        for answer, after in zip(answers, around[1:], strict=True):
            said = (answer.content, answer.content.strip())
            end = next((place + len(one) for one in said if text.startswith(one + after, place)), -1)
            if end < 0:  # the template rewrites answers, as where it leaves out thoughts
                end = text.find(after, place) if after else len(text)
            if end < 0:
                raise _unclear()
            yield TrainedSpan(place, end + self._end_mark(after), answer.weight)
            place = end + len(after)

    def _by_growth(self, text: str, turns: Sequence[Turn], tools: str) -> Iterator[TrainedSpan]:
        """What each answer adds to the text of the turns before it, up to the token that ends it."""
        for place, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            start = self._text(turns[:place], tools, prompts=True)[0] if place else ""
            if not text.startswith(start):  # the template has no prompt for an answer, or another one here
                start = self._text(turns[:place], tools)[0]
            whole = self._text(turns[: place + 1], tools)[0].rstrip()
            if not text.startswith(whole) or not whole.startswith(start):
                raise _unclear()
            ends = any(whole.endswith(name) for name in self._specials)
            yield TrainedSpan(len(start), len(whole) + (0 if ends else self._end_mark(text[len(whole) :])), turn.weight)

    def _around(self, turns: Sequence[Turn], roles: set[str], tools: str) -> list[str]:
        """The template's own text before, between and after the contents of some roles."""
        marks = {
            place: f"{_OPEN}{place}{_CLOSE}"
            for place, turn in enumerate(turns)
            if turn.role in roles and _has_content(turn)
        }
        marked = [turn._replace(content=marks.get(place, turn.content)) for place, turn in enumerate(turns)]
        text, _ = self._text(marked, tools)
        pieces = []
        for mark in marks.values():
            if text.count(mark) != 1:
                raise _unclear()
            before, _, text = text.partition(mark)
            pieces.append(before)
        return [*pieces, text]

    def _end_mark(self, after: str) -> int:
        """Characters up to the end of the special token that ends a turn; 0 where none follows the answer."""
        rest = after.lstrip()
        name = next((one for one in self._specials if rest.startswith(one)), "")
        return len(after) - len(rest) + len(name) if name else 0

    def _text(self, turns: Sequence[Turn], tools: str, *, prompts: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The text, and what the template marks as generated. prompts: for the assistant's next turn."""
        try:
            library: Any = importlib.import_module("transformers.utils.chat_template_utils")
            render = library.render_jinja_template
        except (ImportError, AttributeError) as error:
            raise MissingExtra("transformers", "hf", "a chat template") from error
        options = {**self._names, "tools": json.loads(tools)} if tools else self._names
        try:
            rendered, marked = render(
                [[turn.message for turn in turns]],
                chat_template=self._template,
                add_generation_prompt=prompts,
                return_assistant_tokens_mask=self._marks_answers,
                **options,
            )
        except Exception as error:  # a template raises what it likes, such as that roles must alternate
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
            roles = ", ".join(turn.role for turn in turns)
            raise DataError(
                f"tokenizer: its chat template refuses a conversation of {roles} ({first}). Change the data."
            ) from error
        return rendered[0], marked[0] if self._marks_answers else []


def _has_content(turn: Turn) -> bool:
    """Whether a template renders its content: of a turn that only calls tools it renders none."""
    return bool(turn.content) or not turn.more


def _of_answers(marked: Sequence[tuple[int, int]], answers: Sequence[Turn]) -> list[TrainedSpan]:
    """The template's own marks with the weights of the turns that they are of."""
    if len(marked) == len(answers):
        return [TrainedSpan(low, high, turn.weight) for (low, high), turn in zip(marked, answers, strict=True)]
    if len({turn.weight for turn in answers}) > 1:
        raise _unclear()
    return [TrainedSpan(low, high, answers[0].weight) for low, high in marked]


def _unclear() -> DataError:
    return DataError(
        "tokenizer: its chat template leaves out or repeats answers, so Weft cannot tell what is trained. "
        "Use another chat template, or data of schema=ids with a mask."
    )
