"""Rendering of conversations with a tokenizer's chat template, and the ranges of characters that are trained.

The assistant's generations are trained: from the end of the generation prompt to the token that ends the turn,
inclusive. If the template has `{% generation %}` blocks, they define the ranges instead.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from weft.data.text.answer_spans import (
    CALL,
    CONTENT,
    OTHERS,
    REASONING_KEYS,
    THOUGHT,
    Header,
    MarkedAnswers,
    Messages,
    TurnFormat,
    common_units,
    last_unit,
    replace_texts,
    without_thought_tags,
)
from weft.data.text.template_sandbox import Rendered, Sandbox, TemplateLimit
from weft.data.text.turns import Turn
from weft.errors import DataError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
#: Contents of the small conversations that are rendered to find out how a template formats turns (private use
#: characters).
_ASKED, _SAID, _RETURNED, _NEXT = "\U0010fff4", "\U0010fff5", "\U0010fff6", "\U0010fff7"
#: Placeholder for a character of a special token's name that occurs as plain text.
_PLAIN = "\U0010fff8"
_CALL_ID = "abcdefghi"
_MESSAGE_CHARS = 200
_LEFT_OUT = {
    THOUGHT: "whose reasoning the chat template leaves out",
    CALL: "whose tool calls the chat template leaves out",
    CONTENT: "with an answer that the chat template leaves out",
    OTHERS: "with a message of the user, a tool or the system that the chat template leaves out",
}
_TOOLS_LEFT_OUT = "whose tools the chat template leaves out"
_SYSTEM_JOINED = "whose system message is part of the first user message, since the chat template has no system role"


class RefusedConversation(DataError):
    """Raised if a conversation cannot be used with the template. Other conversations of the same data may be valid.

    text: the full error. reason: a short form, for counts of invalid records.
    """

    def __init__(self, text: str, reason: str):
        super().__init__(text)
        self.reason = reason


class TrainedSpan(NamedTuple):
    """A range of trained characters, low <= index < high, and its weight in the loss."""

    low: int
    high: int
    weight: float = 1.0


class ChatTemplate:
    """A chat template and the special tokens that it may use, such as bos_token.

    `left_out` counts the conversations of `render` of which the template left out a part, such as tool calls, by a text
    that describes the part.

    Args:
        chat: the template under "chat_template", and the text of special tokens under names such as "eos_token".
        specials: all special tokens of the tokenizer, as text.
    """

    def __init__(self, chat: Mapping[str, str], specials: Sequence[str]):
        self._template = chat["chat_template"]
        self._names = {key: value for key, value in chat.items() if key != "chat_template"}
        self._specials = sorted((one for one in specials if one), key=len, reverse=True)
        self._marks_answers = bool(_GENERATION.search(self._template))
        self._header = lru_cache(maxsize=None)(self._find_header)
        self.left_out: Counter[str] = Counter()

    def render(self, turns: Sequence[Turn], tools: str = "") -> tuple[str, list[TrainedSpan]]:
        """Return the text of a conversation, and the ranges of characters that are trained.

        tools: JSON list of the tools that the assistant may call, or "".

        Raises:
            RefusedConversation: if the template rejects the conversation, or omits or repeats answers.
            DataError: if the template cannot be compiled, or exceeds its limits of work.
        """
        asked = turns
        turns = self._supported(asked)
        messages, schemas = self._messages(turns), json.loads(tools) if tools else None
        rendered = self.render_messages(messages, schemas)
        answers = self._located(rendered.text, messages, schemas)
        if answers is None and not self._marks_answers:
            raise _unclear()
        if self._marks_answers:
            spans = _of_blocks(rendered, turns, answers)
        else:
            assert answers is not None
            spans = [
                TrainedSpan(low, high, turns[place].weight)
                for place, low, high in answers.spans(rendered.text, self._turn_format)
            ]
        spans = _without_reasoning(rendered.text, spans, turns, answers)
        kinds = answers.left_out()[1] if answers is not None else set()
        self.left_out.update(note for kind, note in _LEFT_OUT.items() if kind in kinds)
        if schemas and "tools" not in self._sandbox.variables:
            self.left_out[_TOOLS_LEFT_OUT] += 1
        if turns is not asked and asked[0].content.strip():
            self.left_out[_SYSTEM_JOINED] += 1
        return rendered.text, [span for span in spans if span.weight]

    def prompt(self, turns: Sequence[Turn], tools: str = "") -> str:
        """Return the text of a conversation followed by the prompt for the assistant's next turn.

        tools: JSON list of the tools that the assistant may call, or "".

        Raises:
            RefusedConversation: if the template rejects the conversation.
            DataError: if the template cannot be compiled, or exceeds its limits of work.
        """
        messages = self._messages(self._supported(turns))
        return self.render_messages(messages, json.loads(tools) if tools else None, prompt=True).text

    def split_literals(self, turns: Sequence[Turn], tools: str = "", *, prompt: bool = False) -> list[tuple[str, bool]]:
        """Return the text as parts (text, is literal). A literal part is content that equals a special token's text.

        Args:
            turns: the turns of the conversation.
            tools: JSON list of the tools that the assistant may call, or "".
            prompt: append the prompt for the assistant's next turn.

        Raises:
            RefusedConversation: if the template rejects the conversation or rewrites such a content, or if the name of
                a key contains a special token's text.
            DataError: as in `render`.
        """
        turns = self._supported(turns)
        messages, schemas = self._messages(turns), json.loads(tools) if tools else None
        text = self.render_messages(messages, schemas, prompt=prompt).text
        plain = [
            replace_texts(message, self._hidden_for(turn.role)) | {"role": message["role"]}
            for message, turn in zip(messages, turns, strict=True)
        ]
        shadow = self.render_messages(plain, replace_texts(schemas, self._hidden_for("")), prompt=prompt).text
        pieces: list[tuple[str, bool]] = []
        at = 0
        for match in re.finditer(f"{_PLAIN}+", shadow):
            pieces += [(text[at : match.start()], False), (text[match.start() : match.end()], True)]
            at = match.end()
        pieces.append((text[at:], False))
        same = "".join(_PLAIN * len(piece) if is_plain else piece for piece, is_plain in pieces)
        if same != shadow or self._has_special_key(messages, schemas):
            raise RefusedConversation(
                "tokenizer: the text of one of its special tokens is in a part of the conversation that the chat "
                "template rewrites, so it would become that token. Take it out of the data.",
                "a special token's text where the chat template rewrites it",
            )
        return [piece for piece in pieces if piece[0]]

    def has_special(self, turns: Sequence[Turn], tools: str = "") -> bool:
        """Return True if a content, a tool call or a tool contains the text of a special token.

        Reasoning tags in the assistant's turns are ignored.
        """
        parts = [tools, *(part for turn in turns if turn.role != "assistant" for part in (turn.content, turn.more))]
        own = [part for turn in turns if turn.role == "assistant" for part in (turn.content, turn.more)]
        parts += map(without_thought_tags, own)
        return any(name in part for part in parts for name in self._specials)

    def after_answer(self) -> str:
        """Return the text that the template writes after an answer, without white space at its ends.

        Raises:
            DataError: as in `render`.
        """
        text = self.render_messages([_message("user", _ASKED), _message("assistant", _SAID)], None).text
        if text.count(_SAID) != 1:
            raise _unclear()
        return text.partition(_SAID)[2].strip()

    def end_marks(self) -> list[str]:
        """Return the special tokens that end an assistant's turn, or [] if plain text ends it.

        Raises:
            DataError: as in `render`.
        """
        self.after_answer()  # for its errors
        return list(self._turn_format.stops)

    def begins_with_special(self, text: str) -> bool:
        """Return True if a text begins with a special token."""
        return any(text.startswith(name) for name in self._specials)

    def _supported(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Return turns that the template renders: first ones of the system join the first user turn if needed."""
        if not turns or turns[0].role != "system" or self._takes_system:
            return turns
        number = next((place for place, turn in enumerate(turns) if turn.role != "system"), len(turns))
        first, rest = turns[number : number + 1], turns[number + 1 :]
        if first and first[0].role != "user":
            first, rest = (), turns[number:]
        content = "\n\n".join(turn.content for turn in [*turns[:number], *first] if turn.content.strip())
        return [(*first, turns[0])[0]._replace(role="user", content=content), *rest] if content or first else rest

    @cached_property
    def _takes_system(self) -> bool:
        """True if the template renders the system message of questions and of answered questions."""
        asked = [_message("user", _NEXT)]
        return all(self._renders_system(messages) for messages in (asked, [*asked, _message("assistant", _SAID)]))

    def _renders_system(self, messages: Messages) -> bool:
        """Return True if a system message before these is rendered, or if the template refuses even them alone."""
        try:
            return _ASKED in self.render_messages([_message("system", _ASKED), *messages], None).text
        except RefusedConversation:
            try:
                return not self.render_messages(messages, None).text
            except RefusedConversation:
                return True

    def _messages(self, turns: Sequence[Turn]) -> Messages:
        """Return messages in the format of transformers, with the arguments of calls in the template's form."""
        messages = []
        for turn in turns:
            message = turn.message
            thoughts = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
            if thoughts is not None:
                message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
            if calls := message.get("tool_calls"):
                message["tool_calls"] = _with_arguments(calls, as_text=self._takes_text)
            messages.append(message)
        return messages

    @cached_property
    def _takes_text(self) -> bool:
        """True if tool-call arguments must be passed as JSON text, not as objects, for the template to render JSON."""
        asked = _message("user", _ASKED)
        try:
            text = self.render_messages([asked, _calling({"key": "value"})], None).text
        except DataError:
            text = "'key'"
        if "'key'" not in text:
            return False
        try:
            return "key" in self.render_messages([asked, _calling('{"key": "value"}')], None).text
        except DataError:
            return False

    def _located(self, text: str, messages: Messages, tools: Any) -> MarkedAnswers | None:
        """Return the located turns, or None if they cannot be located or one contains a message of another role.

        Raises RefusedConversation if the template leaves out an answer.

        If all marks together fail, fewer marks are tried, since a template may inspect contents.
        """
        for others, insert in ((True, True), (False, True), (True, False), (False, False)):
            answers = MarkedAnswers(messages, others=others, insert=insert)
            try:
                shadow = self.render_messages(answers.messages, tools).text
            except RefusedConversation:
                continue
            if answers.locate(text, shadow):
                if answers.left_out()[0]:
                    raise _unclear()
                return None if answers.is_interrupted() else answers
        return None

    @cached_property
    def _turn_format(self) -> TurnFormat:
        asked, said = _message("user", _ASKED), _message("assistant", _SAID)
        called, returned = _calling({"key": _SAID}), _message("tool", _RETURNED)
        last = self._after(_SAID, [asked, said])
        middle = self._after(_SAID, [asked, said, _message("user", _NEXT)]).partition(_NEXT)[0]
        after_call = self._after(_SAID, [asked, called])
        before_result = self._after(_SAID, [asked, called, returned]).partition(_RETURNED)[0]
        ends, closers, stops = [], [], []
        for after in (last, middle):
            found = self._first_special(after)
            if found is not None:
                ends.append(found[0])
                stops = stops or [found[0]]  # special tokens that end the last turn
                closers.append(after[: found[1]].rstrip() if after is last else "")
        if not any(name in after_call for name in ends):
            names = [name for name in self._specials if after_call.rstrip().endswith(name)]
            found = self._first_special(before_result)
            names = names[:1] or ([found[0]] if found else [])
            ends += names
            stops += names
        closers = [one for one in closers if one.strip()]
        return TurnFormat(
            self._header, tuple(dict.fromkeys(ends)), tuple(dict.fromkeys(stops)), tuple(closers),
            after_call.rstrip(), self._specials,
        )  # fmt: skip

    def _first_special(self, text: str) -> tuple[str, int] | None:
        found = [(text.index(name), -len(name), name) for name in self._specials if name in text]
        return (min(found)[2], min(found)[0]) if found else None

    def _after(self, content: str, messages: Messages, *, prompt: bool = False) -> str:
        """Render messages and return the text after the last `content`.

        Return "" if the template refuses the messages or leaves out the content.
        """
        try:
            found = self.render_messages(self._adapted(messages), None, prompt=prompt).text.rpartition(content)
        except RefusedConversation:
            return ""
        return found[2] if found[1] else ""

    def _adapted(self, messages: Messages) -> Messages:
        return [
            {**one, "tool_calls": _with_arguments(one["tool_calls"], as_text=self._takes_text)}
            if "tool_calls" in one
            else one
            for one in messages
        ]

    def _find_header(self, role: str) -> Header:
        """Return the `Header` of an assistant's turn that follows a message of this role."""
        asked, said = _message("user", _ASKED), _message("assistant", _SAID)
        before, last = {
            "system": ([_message("system", _ASKED)], _ASKED),
            "assistant": ([asked, said], _SAID),
            "tool": ([asked, _calling({"key": "value"}), _message("tool", _RETURNED)], _RETURNED),
        }.get(role, ([asked], _ASKED))
        plain = self._after(last, before)
        asking = self._after(last, before, prompt=True)
        shared = common_units(asking, plain)
        prompt = asking[len(shared) :]
        if not prompt.strip():  # the template has no generation prompt
            answered = self._after(last, [*before, _message("assistant", _NEXT)]).partition(_NEXT)
            shared = common_units(answered[0], plain)
            prompt = answered[0][len(shared) :] if answered[1] else ""
        return Header(prompt, last_unit(shared)) if prompt.strip() else Header("", last_unit(plain))

    def _hidden_for(self, role: str) -> Any:
        """Return a function that replaces each character of special tokens' texts by a placeholder.

        Reasoning tags are not replaced in the assistant's texts.
        """
        names = [name for name in self._specials if role != "assistant" or without_thought_tags(name)]
        pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        return lambda text: pattern.sub(lambda match: _PLAIN * len(match[0]), text)

    def _has_special_key(self, messages: Messages, tools: Any) -> bool:
        hidden = json.dumps(replace_texts([messages, tools], self._hidden_for("")), ensure_ascii=False)
        return any(name in hidden for name in self._specials)

    @cached_property
    def _sandbox(self) -> Sandbox:
        try:
            return Sandbox(self._template)
        except Exception as error:  # jinja2 and the compiler raise many exceptions for an invalid template
            raise DataError(
                f"tokenizer: its chat template cannot be used ({_first_line(error)}). Repair it, "
                "or use the model's own."
            ) from error

    def render_messages(self, messages: Messages, tools: Any, *, prompt: bool = False) -> Rendered:
        """Return the text of messages in the template's form.

        Args:
            messages: messages in the format of transformers.
            tools: tools that the assistant may call, or None.
            prompt: append the prompt for the assistant's next turn.

        Raises:
            RefusedConversation, DataError: as in `prompt`.
        """
        sandbox = self._sandbox
        size = sum(_MESSAGE_CHARS + _size_of(message) for message in messages) + _size_of(tools)
        variables = {
            **self._names, "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt,
        }  # fmt: skip
        try:
            return sandbox.render(variables, size)
        except (TemplateLimit, MemoryError, RecursionError) as error:
            why = str(error) if isinstance(error, TemplateLimit) else f"fails with {type(error).__name__}"
            raise DataError(
                f"tokenizer: its chat template {why}. Use the model's own chat template, or repair this one."
            ) from error
        except Exception as error:  # a template may raise any error, such as that roles must alternate
            roles = ", ".join(str(message["role"]) for message in messages[:8])
            more = ", ..." if len(messages) > 8 else ""
            why = _first_line(error)
            raise RefusedConversation(
                f"tokenizer: its chat template refuses a conversation of {roles}{more} ({why}). Change the data.",
                f"refused by the chat template: {why}",
            ) from error


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content} | ({"name": "name", "tool_call_id": _CALL_ID} if role == "tool" else {})


def _calling(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "id": _CALL_ID, "function": {"name": "name", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_arguments(calls: Any, *, as_text: bool) -> Any:
    if not isinstance(calls, list):
        return calls
    return [_with_one(call, as_text=as_text) for call in calls]


def _with_one(call: Any, *, as_text: bool) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_one(call["function"], as_text=as_text)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        arguments = parsed if isinstance(parsed, dict) else arguments
    if not isinstance(arguments, dict):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments}


def _size_of(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    size = 8
    if isinstance(value, dict):
        for one in value.values():
            size += 8 + _size_of(one)
    elif isinstance(value, list):
        for one in value:
            size += _size_of(one)
    return size


def _of_blocks(rendered: Rendered, turns: Sequence[Turn], answers: MarkedAnswers | None) -> list[TrainedSpan]:
    """Return the ranges of the template's generation blocks, with the weights of their turns.

    Raises RefusedConversation if the weights differ and the turn of a block is unknown.
    """
    own = [turn for turn in turns if turn.role == "assistant"]
    spans = [TrainedSpan(*block) for block in rendered.generated]
    weights = {turn.weight for turn in own}
    if len(spans) == len(own):
        return [span._replace(weight=turn.weight) for span, turn in zip(spans, own, strict=True)]
    if len(weights) > 1:
        places = [answers.turn_at(span.low, span.high) if answers is not None else None for span in spans]
        if None in places:
            raise _unclear()
        return [
            span._replace(weight=turns[place].weight)
            for span, place in zip(spans, places, strict=True)
            if place is not None
        ]
    return [span._replace(weight=own[0].weight) for span in spans] if own else []


def _without_reasoning(
    text: str, spans: list[TrainedSpan], turns: Sequence[Turn], answers: MarkedAnswers | None
) -> list[TrainedSpan]:
    """Return the trained ranges without the reasoning of turns that mask it."""
    for place in (place for place, turn in enumerate(turns) if turn.masks_reasoning):
        ranges = answers.thoughts(text, place) if answers is not None else None
        if ranges is None:
            raise RefusedConversation(
                "tokenizer: its chat template changes reasoning, or the reasoning is only tags, so data.reasoning=mask "
                "cannot find it. Use data.reasoning=keep or drop.",
                "reasoning that data.reasoning=mask cannot find",
            )
        for low, high in ranges:
            spans = cut_out(spans, low, high)
    return spans


def cut_out(spans: Sequence[TrainedSpan], low: int, high: int) -> list[TrainedSpan]:
    """Return the trained ranges without the characters low <= index < high."""
    before = [span._replace(high=min(span.high, low)) for span in spans]
    after = [span._replace(low=max(span.low, high)) for span in spans]
    return [part for pair in zip(before, after, strict=True) for part in pair if part.low < part.high]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


def _unclear() -> RefusedConversation:
    return RefusedConversation(
        "tokenizer: its chat template leaves out, repeats or interrupts answers, so the trained tokens are unknown. "
        "Use another chat template, or data of schema=ids with a mask.",
        "the chat template leaves out, repeats or interrupts answers",
    )
