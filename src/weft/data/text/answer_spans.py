"""Locate the assistant's turns in a rendered conversation.

The conversation is rendered a second time with one or two characters of each part of a message replaced by marks
(private use characters). A mark has the length of the character that it replaces, so its position in the second text is
also the position in the first, even if the template trims, splits or omits contents. Generation starts after the
template's generation prompt, so a turn is trained from there to the token that ends it.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Marks are in a private use area of Unicode. A turn has one mark for each kind of part.
_FIRST_MARK, _LAST_MARK = 0x108000, 0x10FFF0
CONTENT, THOUGHT, CALL, INSERTED, OTHERS = range(5)
_NUM_KINDS = 4  # OTHERS has no marks of its own
_NUM_TURNS = (_LAST_MARK - _FIRST_MARK) // _NUM_KINDS
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")
#: Texts that templates search for in contents: tags and bracketed names. Their characters are never replaced by marks.
_TAGS = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,}\]|◁/?\w+▷")
_LETTER = re.compile(r"[^\W_]")
_SIGN = re.compile(r"[^\s\"\\]")
_THOUGHT_TAG = re.compile(
    r"(?i)</?(?:\w+:)?(?:think|thinking|thoughts?|reasoning)>|\[/?THINK\]|◁/?think▷|"
    r"<\|(?:begin|end)_of_thought\|>|<\|(?:START|END)_THINKING\|>"
)
_END_TAG = re.compile(r"(?i)/|end_")
_SIDE_OF_TAG = re.compile(r"(?i)/|(?:begin|start|end)_")
_CODE = re.compile(r"(?s)```.*?```|`[^`\n]+`")
#: Keys of a message that contain the reasoning before an answer.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
#: Keys whose values templates compare with fixed names.
_UNMARKED_KEYS = ("type", "id", "index", "tool_call_id")
_UNITS = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,}\]|\s+|\w+|.", re.DOTALL)
_OPEN_TAG = re.compile(r"<[a-z]\w*>\s*\Z")

Messages = list[dict[str, Any]]


class Header(NamedTuple):
    """Text of the template before an assistant's turn.

    Attributes:
        prompt: the generation prompt, or the text before an answer if the template has no generation prompt.
        before: last tag or word that the template writes between the preceding message's content and `prompt`. A turn
            starts after it if no prompt is found.
    """

    prompt: str
    before: str


@dataclass(frozen=True)
class TurnFormat:
    """Text of a template around the assistant's turns.

    Attributes:
        header: function from the role of the preceding message to the `Header` of an assistant's turn.
        ends: special tokens that end an assistant's turn.
        stops: tokens among `ends` that end the last turn of a conversation.
        closers: texts between an answer and the token that ends its turn.
        call_closer: text after the last argument of a tool call. It ends a call that no special token ends.
        specials: special tokens, longest first.
    """

    header: Callable[[str], Header]
    ends: tuple[str, ...]
    stops: tuple[str, ...]
    closers: tuple[str, ...]
    call_closer: str
    specials: Sequence[str]


@dataclass
class _Part:
    """Text of one kind in a message. `lead` precedes its first mark, and `trail` follows its last mark."""

    lead: str = ""
    trail: str = ""


@dataclass
class _Marked:
    """Marks of one message: how many of each kind were inserted, and their positions in the rendered text.

    `thoughts` has the position of the first and of the last mark in each part that is reasoning, and its text.
    """

    planted: list[int] = field(default_factory=lambda: [0] * _NUM_KINDS)
    parts: dict[int, _Part] = field(default_factory=dict)
    thoughts: list[tuple[int, int, str]] = field(default_factory=list)
    found: list[tuple[int, int]] = field(default_factory=list)

    def num_found(self, kind: int) -> int:
        return sum(one == kind for _, one in self.found)


class MarkedAnswers:
    """Replaces characters in the messages of a conversation by marks, and locates the assistant's turns by them.

    `messages` are the messages with marks. Render them, and pass the text to `locate`.

    Args:
        messages: messages in the template's format.
        others: replace characters in messages of other roles too. Their marks limit the end of an assistant's turn.
        insert: insert a mark at the end of the content if an assistant's turn has no character to replace.
    """

    def __init__(self, messages: Messages, *, others: bool, insert: bool):
        self._roles = [str(message["role"]) for message in messages]
        self._marked = [_Marked() for _ in messages]
        self.messages = [
            self._mark(place, message, insert=insert) if message["role"] == "assistant" or others else message
            for place, message in enumerate(messages)
        ]

    def _mark(self, place: int, message: dict[str, Any], *, insert: bool) -> dict[str, Any]:
        marked, content = self._marked[place], message.get("content")
        result = dict(message)
        if message["role"] != "assistant":
            if isinstance(content, str):
                result["content"] = _mark_text(content, _mark_of(place, CONTENT), marked, CONTENT, ends=False)
            return result
        if isinstance(content, str):
            result["content"] = "".join(
                _mark_text(part, _mark_of(place, kind), marked, kind) for part, kind in split_thoughts(content)
            )
        in_content = marked.planted[THOUGHT]
        for key in REASONING_KEYS:
            if isinstance(value := message.get(key), str):
                marked.planted[THOUGHT] = in_content  # a template renders one of these keys
                result[key] = _mark_text(value, _mark_of(place, THOUGHT), marked, THOUGHT)
        if calls := message.get("tool_calls"):
            result["tool_calls"] = _mark_calls(calls, _mark_of(place, CALL), marked)
        if insert and not any(marked.planted) and isinstance(content, str):
            kept = content.rstrip()
            result["content"] = kept + _mark_of(place, INSERTED) + content[len(kept) :]
            marked.planted[INSERTED] = 1
            marked.parts[INSERTED] = _Part(kept, content[len(kept) :])
        return result

    def locate(self, text: str, shadow: str) -> bool:
        """Record the positions of the marks in `text`, and return True.

        Return False if the texts differ in more than the marks, or if turns are repeated or out of order.

        text: rendering of the original messages. shadow: rendering of the messages with marks.
        """
        offset, done, last = 0, 0, -1
        for match in _MARKS.finditer(shadow):
            at = match.start()
            if text[done - offset : at - offset] != shadow[done:at]:
                return False
            done = at + 1
            number, kind = divmod(ord(match[0]) - _FIRST_MARK, _NUM_KINDS)
            marked = self._nearest(number, last)
            if marked is None:
                return False
            place, one = marked
            if one.num_found(kind) < one.planted[kind] or kind == CALL:
                if self._roles[place] == "assistant" and one.num_found(kind) < one.planted[kind]:
                    if place < last:
                        return False
                    last = place
                one.found.append((at - offset, kind))
            elif self._roles[place] == "assistant" and kind != THOUGHT:
                return False
            offset += kind == INSERTED
        return text[done - offset :] == shadow[done:]

    def _nearest(self, number: int, last: int) -> tuple[int, _Marked] | None:
        """Return the index of the message that has mark `number`, and its marks; or None if no message has it.

        In very long conversations, several messages have the same mark. The first of them from index `last` on is
        returned, or else the last of them.
        """
        places = range(number, len(self._marked), _NUM_TURNS)
        place = next((one for one in places if one >= last), places[-1] if places else -1)
        return (place, self._marked[place]) if place >= 0 else None

    def spans(self, text: str, form: TurnFormat) -> Iterator[tuple[int, int, int]]:
        """Yield (message index, start, end) for each assistant's turn that the template renders, in characters."""
        stops = self._stops()
        turns = [place for place, role in enumerate(self._roles) if role == "assistant" and self._own(place)]
        done = 0
        for number, place in enumerate(turns):
            own = self._own(place)
            limit = self._own(turns[number + 1])[0][0] if number + 1 < len(turns) else len(text)
            index = bisect(stops, own[-1][0])
            limit = min([limit, *stops[index : index + 1]])
            low = self._start(text, place, max([done, *stops[:index][-1:]]), form)
            high = self._end(text, place, limit, form)
            yield place, low, high
            done = high

    def is_interrupted(self) -> bool:
        """Return True if the template writes a message of another role inside a message of the assistant."""
        stops = self._stops()
        turns = [own for place, role in enumerate(self._roles) if role == "assistant" and (own := self._own(place))]
        return any(bisect(stops, own[0][0]) != bisect(stops, own[-1][0]) for own in turns)

    def _stops(self) -> list[int]:
        """Return the positions of the marks of other roles than the assistant, in order."""
        marked = zip(self._roles, self._marked, strict=True)
        return sorted(at for role, one in marked if role != "assistant" for at, _ in one.found)

    def left_out(self) -> tuple[list[int], set[int]]:
        """Return the parts of messages that are missing from the rendered text.

        Returns:
            the indices of assistant messages that have content and are missing as a whole, and the kinds of parts
                (CONTENT, THOUGHT, CALL) that are missing from any assistant message, or OTHERS for another message.
        """
        missing, kinds = [], set[int]()
        for place, (role, marked) in enumerate(zip(self._roles, self._marked, strict=True)):
            if role != "assistant":
                kinds |= {OTHERS} if marked.planted[CONTENT] and not marked.found else set()
                continue
            lost = {kind for kind in range(_NUM_KINDS) if marked.planted[kind] and not marked.num_found(kind)}
            if CONTENT in lost and not marked.found:
                missing.append(place)
            kinds |= lost - {INSERTED}
        return missing, kinds

    def thoughts(self, text: str, place: int) -> list[tuple[int, int]] | None:
        """Return the ranges of characters of a message's reasoning, without its tags.

        Return None if a range is unknown, because the template changes the reasoning or it consists of tags.
        """
        parts = [
            (mark - len(thought) + len(thought.lstrip()), thought.strip())
            for *marks, thought in self._marked[place].thoughts
            for mark in marks
            if thought.strip()
        ]
        if any(first < 0 for first, _ in parts):
            return None
        ranges: list[tuple[int, int]] = []
        for at, kind in self._own(place):
            if kind != THOUGHT or (ranges and at < ranges[-1][1]):
                continue
            found = [
                (at - first, at - first + len(thought))
                for first, thought in parts
                if first <= at and text.startswith(thought, at - first)
            ]
            if not found:
                return None
            ranges.append(max(found, key=lambda part: part[1] - part[0]))
        return ranges

    def turn_at(self, low: int, high: int) -> int | None:
        """Return the index of the first assistant message with a mark in text[low:high], or None."""
        for place, marked in enumerate(self._marked):
            if self._roles[place] == "assistant" and any(low <= at < high for at, _ in marked.found):
                return place
        return None

    def _own(self, place: int) -> list[tuple[int, int]]:
        """Return (position, kind) for each mark of an assistant's message.

        Repetitions in the text are ignored, since a tool's result may repeat the name of the call.
        """
        marked, seen = self._marked[place], [0] * _NUM_KINDS
        own = []
        for at, kind in marked.found:
            seen[kind] += 1
            if seen[kind] <= marked.planted[kind]:
                own.append((at, kind))
        return own

    def _start(self, text: str, place: int, done: int, form: TurnFormat) -> int:
        own = self._own(place)
        first, kind = own[0]
        role = self._roles[place - 1] if place else "user"
        # After a tool's result, some templates write the header of a new turn, and others continue the same turn.
        for header in (form.header(role), form.header("user")):
            for before in (*_prompts(header.prompt), header.before):
                if before and (at := text.rfind(before, done, first)) >= 0:
                    return at + len(before)
        part = self._marked[place].parts.get(kind, _Part())
        lead = next((one for one in (part.lead, part.lead.lstrip()) if text.endswith(one, done, first)), "")
        low = first - len(lead)
        while low > done and text[low - 1] == " ":  # tokenizers join a space with the letters after it
            low -= 1
        return low

    def _end(self, text: str, place: int, limit: int, form: TurnFormat) -> int:
        own = self._own(place)
        last, kind = own[-1]
        part = self._marked[place].parts.get(kind, _Part())
        end = last + (kind != INSERTED)
        if kind in (CALL, THOUGHT):
            found = [at + len(name) for name in form.ends if (at := text.find(name, end, limit)) >= 0]
            if found:
                return min(found)
            if form.call_closer and text.startswith(form.call_closer, end):
                return end + len(form.call_closer)
            if place == len(self._roles) - 1:
                return len(text.rstrip())
            return limit - len(text[end:limit].lstrip("\"'}])"))
        trail = next((one for one in (part.trail, part.trail.rstrip()) if text.startswith(one, end)), "")
        for low in (end + len(trail), end + len(trail.rstrip())):
            for closer in ("", *form.closers):
                if not text.startswith(closer, low):
                    continue
                rest = text[low + len(closer) : min(limit, low + len(closer) + 200)].lstrip()
                name = next((one for one in form.specials if rest.startswith(one)), "")
                if name:
                    return text.index(name, low + len(closer)) + len(name)
        return end + len(trail)


def _mark_of(place: int, kind: int) -> str:
    return chr(_FIRST_MARK + place % _NUM_TURNS * _NUM_KINDS + kind)


def split_thoughts(content: str) -> Iterator[tuple[str, int]]:
    """Yield the parts of a content in order, with their kinds: THOUGHT for reasoning, CONTENT for tags and answers."""
    done = 0
    for _, low, high, _ in _paired_thoughts(content) or ():
        if low > done:
            yield content[done:low], CONTENT
        yield content[low:high], THOUGHT
        done = high
    yield content[done:], CONTENT


class _Thought(NamedTuple):
    """Positions of one part of a content that is reasoning, and of its tags."""

    tag: int
    low: int
    high: int
    end: int


def _paired_thoughts(content: str) -> list[_Thought] | None:
    """Return the parts of a content that are reasoning, or None if their tags do not pair.

    A first end tag without a start tag ends reasoning that begins in the generation prompt.
    """
    parts: list[_Thought] = []
    opened, tag, low = "", 0, 0
    for match in _THOUGHT_TAG.finditer(content):
        name, is_end = _SIDE_OF_TAG.sub("", match[0]).lower(), _END_TAG.search(match[0]) is not None
        if is_end and (opened == name or not (parts or opened)):
            parts.append(_Thought(tag, low, match.start(), match.end()))
            opened = ""
        elif is_end or opened:
            return None
        else:
            opened, tag, low = name, match.start(), match.end()
    return None if opened else parts


def _mark_text(text: str, mark: str, marked: _Marked, kind: int, *, ends: bool = True) -> str:
    """Return the text with its first and last letter replaced by `mark`, and record the marks in `marked`.

    Letters in tags are not replaced, except in tool calls. Without a letter, other characters are replaced, but none in
    tool calls.

    ends: replace the last letter too, not only the first.
    """
    first, last = _free_letters(text, _LETTER, ends=ends, tags=kind != CALL)
    if first < 0 and kind != CALL:
        first, last = _free_letters(text, _SIGN, ends=ends)
    if kind == THOUGHT:
        marked.thoughts.append((first, last, text))
    if first < 0:
        if kind in marked.parts:
            marked.parts[kind].trail += text
        return text
    if kind not in marked.parts:
        marked.parts[kind] = _Part(lead=text[:first])
    marked.parts[kind].trail = text[last + 1 :]
    marked.planted[kind] += 1 if first == last else 2
    if first == last:
        return text[:first] + mark + text[first + 1 :]
    return text[:first] + mark + text[first + 1 : last] + mark + text[last + 1 :]


def _free_letters(text: str, pattern: re.Pattern[str], *, ends: bool, tags: bool = True) -> tuple[int, int]:
    """Return the positions of the first and the last match, or (-1, -1).

    ends: if False, return the first position twice. tags: ignore matches in tags.
    """
    spans = [match.span() for match in _TAGS.finditer(text)] if tags and ("<" in text or "[" in text) else []
    first, at = -1, 0
    for low, high in [*spans, (len(text), len(text))]:
        match = pattern.search(text, at, low)
        if match is not None:
            first = match.start()
            break
        at = high
    if first < 0 or not ends:
        return first, first
    at = len(text) - 1
    for low, high in [*reversed(spans), (-1, first)]:
        while at >= high and not pattern.match(text, at):
            at -= 1
        if at >= high:
            break
        at = low - 1
    return first, at


def _mark_calls(value: Any, mark: str, marked: _Marked) -> Any:
    if isinstance(value, dict):
        return {key: one if key in _UNMARKED_KEYS else _mark_calls(one, mark, marked) for key, one in value.items()}
    if isinstance(value, list):
        return [_mark_calls(one, mark, marked) for one in value]
    return _mark_text(value, mark, marked, CALL) if isinstance(value, str) else value


def _prompts(prompt: str) -> Iterator[str]:
    """Yield a generation prompt, then its prefixes that end after a tag or white space, longest first.

    Some turns begin with only a part of the prompt. Nothing is yielded for a blank prompt.
    """
    if not prompt.strip():
        return
    yield prompt
    units = _UNITS.findall(prompt)
    for size in range(len(units) - 1, 0, -1):
        shorter = "".join(units[:size])
        if not shorter.strip() or not (units[size - 1].isspace() or units[size - 1][-1] in ">]"):
            continue
        if not _OPEN_TAG.search(shorter):  # the tag is part of the trained reasoning
            yield shorter


def common_units(first: str, second: str) -> str:
    """Return the longest common prefix of two texts that does not end inside a tag, a word or a run of spaces."""
    found = []
    for one, other in zip(_UNITS.findall(first), _UNITS.findall(second), strict=False):
        if one != other:
            break
        found.append(one)
    return "".join(found)


def last_unit(text: str) -> str:
    """Return the last tag, run of letters or punctuation character of a text, or "" if the text is blank."""
    return next((one for one in reversed(_UNITS.findall(text)) if one.strip()), "")


def without_thoughts(text: str) -> str:
    """Return a text without its reasoning, the tags around it, and the white space after these."""
    for thought in reversed(_paired_thoughts(text) or ()):
        text = text[: thought.tag] + text[thought.end :].lstrip()
    return text


def has_unclear_thoughts(text: str) -> bool:
    """Return True if reasoning tags such as <think> do not pair, or are in code and may be an answer's text."""
    in_code = any(_THOUGHT_TAG.search(code[0]) for code in _CODE.finditer(text))
    return in_code or _paired_thoughts(text) is None


def without_thought_tags(text: str) -> str:
    """Return a text without reasoning tags such as <think>."""
    return _THOUGHT_TAG.sub("", text)


def replace_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to each string of a JSON value, except keys, and return the result."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: replace_texts(one, change) for key, one in value.items()}
    return [replace_texts(one, change) for one in value] if isinstance(value, list) else value
