"""Content of a record of text, images and audio, in order: plain columns, or a chat in one of its two usual forms.

In a chat, contents are lists of parts ({"type": "image", ...}), or texts with markers (`<image>`, `<audio>`) whose
media are in separate lists of the record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.media.records import PICTURE, SOUND
from weft.data.text.records import is_valid_text
from weft.data.text.turns import list_of_messages

#: Columns whose name does not indicate the kind of media. They are removed from the usual media columns below.
_VAGUE = ("file_name", "path", "bytes")
PICTURE_COLUMNS = ("images", *(name for name in PICTURE.columns if name not in _VAGUE))
SOUND_COLUMNS = ("audios", *(name for name in SOUND.columns if name not in _VAGUE))
_TEXTS = ("text", "caption", "transcription", "transcript", "sentence", "txt", "normalized_text", "answer", "label")
_ASKED = ("prompt", "question", "instruction")
_CHATS = ("messages", "conversations")
#: Columns of a prompt, and of its answer, as texts or as messages.
_PAIRS = ((*_ASKED, "query"), ("completion", "response", "output", *_TEXTS))
_MARKS = re.compile("(<image>|<audio>)")
_LEARNT_ROLES = ("assistant", "gpt", "model")
#: Role names of other chat formats -> role.
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}

What = Literal["text", "picture", "recording", "turn", "end"]


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A part of a sample: a text, an image, an audio clip, or the start or end of a turn.

    Attributes:
        what: kind of the part. "turn" begins a turn whose role is `text`. "end" ends a turn, or a sample without turns.
        text: the text.
        media: an image or an audio clip as a path, bytes, or a mapping with one of them.
        is_learnt: whether the part counts in the loss.
    """

    what: What
    text: str = ""
    media: Any = None
    is_learnt: bool = False


class UnusableSample(ValueError):
    """Raised if a record is skipped. The message is the reason."""


@dataclass(frozen=True, slots=True)
class MixedColumns:
    """Columns of text, images and audio clips. "" selects the usual names."""

    text: str = ""
    picture: str = ""
    audio: str = ""

    def parts(self, record: Mapping[str, Any]) -> list[SamplePart]:
        """Return the parts of a record.

        Raises:
            UnusableSample: if it has no text to learn, is malformed, or its markers and media do not match.
        """
        given = media_lists(record, self.picture, self.audio)
        chat = next((record[name] for name in _CHATS if isinstance(record.get(name), list)), None)
        found = list(_chat_parts(chat, given) if chat is not None else self._plain_parts(record, given))
        given.check_all_used()
        if not all(is_valid_text(part.text) for part in found):
            raise UnusableSample("its text is not valid Unicode: it has half of a surrogate pair")
        if not any(part.is_learnt for part in found):
            raise UnusableSample("it has no text that could be learnt")
        return found

    def _plain_parts(self, record: Mapping[str, Any], given: MediaLists) -> Iterator[SamplePart]:
        text = _text(record, [self.text] if self.text else _TEXTS)
        asked = _text(record, _ASKED)
        if text is None:
            raise UnusableSample("it has no text")
        if not any(mark in f"{asked or ''}{text}" for mark in ("<image>", "<audio>")):
            yield from given.rest()
        if asked:
            yield from _marked(asked, given, is_learnt=False)
        yield from _marked(text, given, is_learnt=True)
        yield SamplePart("end", is_learnt=True)


class MediaLists:
    """Media of a record, which its markers take in order."""

    def __init__(self, lists: Mapping[str, tuple[What, list[Any]]]):
        self._lists = lists
        self._used = dict.fromkeys(lists, 0)

    def at(self, mark: str) -> SamplePart:
        what, media = self._lists[mark]
        self._used[mark] += 1
        return SamplePart(what, media=media[self._used[mark] - 1] if self._used[mark] <= len(media) else None)

    def rest(self) -> Iterator[SamplePart]:
        """Yield the media that no marker has taken, images first."""
        for mark, (_, media) in self._lists.items():
            for _ in range(self._used[mark], len(media)):
                yield self.at(mark)

    def check_all_used(self) -> None:
        for mark, (what, media) in self._lists.items():
            if self._used[mark] != len(media):
                marks = f"{self._used[mark]} {mark} mark{'s' * (self._used[mark] != 1)}"
                raise UnusableSample(f"it has {marks} and {len(media)} {what}{'s' * (len(media) != 1)}")


def media_lists(record: Mapping[str, Any], picture: str, audio: str) -> MediaLists:
    """Return the lists of media of a record.

    picture, audio: names of their columns, or "" for the usual names.
    """
    pictures, sounds = _listed(record, picture, PICTURE_COLUMNS), _listed(record, audio, SOUND_COLUMNS)
    return MediaLists({"<image>": ("picture", pictures), "<audio>": ("recording", sounds)})


def _listed(record: Mapping[str, Any], asked: str, usual: Sequence[str]) -> list[Any]:
    names = [asked] if asked else usual
    found = next((record[name] for name in names if record.get(name) is not None), None)
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def _text(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    found = next((record[name] for name in names if record.get(name) is not None), None)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return found.strip() or None if isinstance(found, str) else None


def _chat_parts(chat: list[Any], given: MediaLists) -> Iterator[SamplePart]:
    for turn in chat:
        if not isinstance(turn, Mapping):
            raise UnusableSample("a turn of its chat is not an object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise UnusableSample("a turn of its chat has no role, or no content")
        is_learnt = role in _LEARNT_ROLES
        yield SamplePart("turn", _ROLES.get(role, role))
        yield from content_parts(content, given, is_learnt=is_learnt)
        yield SamplePart("end", is_learnt=is_learnt)


def chat_of(record: Mapping[str, Any], column: str = "") -> Sequence[Mapping[str, Any]]:
    """Return the messages of a record, or its prompt and answer as messages.

    The text of a column "system" is the first message, unless the messages begin with a system message.

    column: column of the messages, or "" for the usual names and for a prompt with an answer.

    Raises:
        UnusableSample: if it has no messages.
    """
    names = (column,) if column else _CHATS
    found = next((list_of_messages(record[name]) for name in names if record.get(name) is not None), None)
    if found is None and not column:
        asked, answer = (next((record[name] for name in names if record.get(name)), None) for names in _PAIRS)
        more = record.get("input")
        asked = f"{asked}\n{more}" if isinstance(asked, str) and isinstance(more, str) and more else asked
        asked, answer = (
            [{"role": role, "content": value}] if isinstance(value, str) else value
            for role, value in (("user", asked or "" if answer else None), ("assistant", answer))
        )
        found = [*asked, *answer] if isinstance(asked, list) and isinstance(answer, list) else None
    if not isinstance(found, list) or not all(isinstance(turn, Mapping) for turn in found) or not found:
        raise UnusableSample(f"it has no messages in {' or '.join(names)}, and no prompt with an answer")
    system = record.get("system")
    if isinstance(system, str) and system.strip() and found[0].get("role", found[0].get("from")) != "system":
        return [{"role": "system", "content": system}, *found]
    return found


def content_parts(content: str | list[Any], given: MediaLists, *, is_learnt: bool = False) -> Iterator[SamplePart]:
    """Yield the parts of a message's content: a text with markers, or a list of parts.

    Raises:
        UnusableSample: if a part of the list has an unknown type.
    """
    if isinstance(content, str):
        yield from _marked(content, given, is_learnt)
    else:
        for each in content:
            yield from _content_part(each, given, is_learnt)


def _content_part(each: Any, given: MediaLists, is_learnt: bool) -> Iterator[SamplePart]:
    """Yield the parts of an element of a content list. An element without media takes the record's next media."""
    kind = each.get("type") if isinstance(each, Mapping) else None
    if kind == "text":
        yield SamplePart("text", str(each.get("text", "")), is_learnt=is_learnt)
        return
    marks = {"image": "<image>", "image_url": "<image>", "audio": "<audio>", "audio_url": "<audio>"}
    if not isinstance(kind, str) or kind not in marks:
        raise UnusableSample(f"a part of its chat is of type {kind!r}, and text, image and audio are read")
    held = next((each[name] for name in ("bytes", "base64") if each.get(name) is not None), None)
    names = (kind, kind.partition("_")[0], "url", "path")
    own = next((each[name] for name in names if each.get(name) is not None), None)
    if isinstance(own, Mapping) and isinstance(own.get("url"), str):
        own = own["url"]
    own = {"bytes": held} if own is None and held is not None else own
    if own is None:
        yield given.at(marks[kind])
    else:
        yield SamplePart("picture" if marks[kind] == "<image>" else "recording", media=own)


def _marked(text: str, given: MediaLists, is_learnt: bool) -> Iterator[SamplePart]:
    for piece in _MARKS.split(text):
        if piece in ("<image>", "<audio>"):
            yield given.at(piece)
        elif piece:
            yield SamplePart("text", piece, is_learnt=is_learnt)


# Tokens of a sample, with a marker for each image or audio clip.

#: Markers that replace the tokens of an image or an audio clip.
PICTURE_MARK, SOUND_MARK = -1, -2


class TextCodec(Protocol):
    """Codec from text to tokens.

    Attributes:
        end: token that ends a text.
        turn_start: token that begins a turn of a chat.
        turn_end: token that ends a turn of a chat.
        digest: identifies the codec.
    """

    end: int
    turn_start: int
    turn_end: int
    digest: str

    def ids(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""
        ...

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens, with markers for media and special tokens."""
        ...


class ByteText:
    """Codec with a token for each byte of UTF-8 and four special tokens for the ends of texts and turns."""

    end, pad, turn_start, turn_end = 256, 257, 258, 259
    num_ids = 260
    digest = "bytes"

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode())

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, up to the end of a text or a turn."""
        ends = [place for place, one in enumerate(ids) if one in (self.end, self.turn_end)]
        kept = ids[: ends[0]] if ends else ids
        return bytes(one for one in kept if one < 256).decode("utf-8", "replace").strip()

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens, with markers for media and special tokens."""
        names = {-1: "<image>", -2: "<audio>", 256: "<|end|>", 257: "", 258: "<|turn|>", 259: "<|end of turn|>"}
        found: list[str] = []
        run = bytearray()
        for one in ids:
            if 0 <= one < 256:
                run.append(one)
                continue
            found += [run.decode("utf-8", "replace"), names[one]]
            run = bytearray()
        return "".join([*found, run.decode("utf-8", "replace")])


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Token ids with markers, (T,), and a mask `learnt` of those that count in the loss, (T,)."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.uint8]


def sample_tokens(parts: Sequence[SamplePart], codec: TextCodec) -> SampleTokens:
    """Return the tokens of a sample's parts, whose texts `codec` encodes."""
    ids: list[int] = []
    learnt: list[int] = []
    is_chat = False

    def add(some: Sequence[int], is_learnt: bool) -> None:
        ids.extend(some)
        learnt.extend([int(is_learnt)] * len(some))

    for part in parts:
        if part.what == "text":
            add(codec.ids(part.text), part.is_learnt)
        elif part.what == "turn":
            is_chat = True
            add([codec.turn_start, *codec.ids(f"{part.text}\n")], False)
        elif part.what == "end":
            add([codec.turn_end if is_chat else codec.end], part.is_learnt)
            add(codec.ids("\n") if is_chat else [], False)
        else:
            add([PICTURE_MARK if part.what == "picture" else SOUND_MARK], False)
    return SampleTokens(np.array(ids, np.int32), np.array(learnt, np.uint8))
