"""What a record of text, pictures and sound says, in order: plain columns, or a chat in one of its two usual forms.

In a chat, contents are lists of parts ({"type": "image", ...}), or texts with marks (`<image>`, `<audio>`) whose media
stand in lists beside the chat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.data.media.file_forms import is_valid_text
from weft.data.media.media_kinds import PICTURE, SOUND

#: Columns of a record that hold media, without those that say nothing of its kind.
_VAGUE = ("file_name", "path", "bytes")
PICTURE_COLUMNS = ("images", *(name for name in PICTURE.columns if name not in _VAGUE))
SOUND_COLUMNS = ("audios", *(name for name in SOUND.columns if name not in _VAGUE))
_TEXTS = ("text", "caption", "transcription", "transcript", "sentence", "txt", "normalized_text", "answer", "label")
_ASKED = ("prompt", "question", "instruction")
_CHATS = ("messages", "conversations")
_MARKS = re.compile("(<image>|<audio>)")
_LEARNT_ROLES = ("assistant", "gpt", "model")
#: What roles of other chats are called here.
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}

What = Literal["text", "picture", "recording", "turn", "end"]


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A piece of a sample. what: "turn" begins one, of the role `text`; "end" ends it, or a sample without turns.

    text: of a text. media: of a picture or a recording: a path, bytes, or a mapping of them. is_learnt: whether it
    counts in the loss.
    """

    what: What
    text: str = ""
    media: Any = None
    is_learnt: bool = False


class UnusableSample(ValueError):
    """A record that is left out; its words are the reason."""


@dataclass(frozen=True, slots=True)
class MixedColumns:
    """Columns of text, pictures and recordings; "": the usual names."""

    text: str = ""
    picture: str = ""
    audio: str = ""

    def parts(self, record: Mapping[str, Any]) -> list[SamplePart]:
        """Return the pieces of a record.

        Raises:
            UnusableSample: for a record that has none, or whose marks and media do not match.
        """
        pictures = _listed(record, self.picture, PICTURE_COLUMNS)
        sounds = _listed(record, self.audio, SOUND_COLUMNS)
        given = _Media({"<image>": ("picture", pictures), "<audio>": ("recording", sounds)})
        chat = next((record[name] for name in _CHATS if isinstance(record.get(name), list)), None)
        found = list(_chat_parts(chat, given) if chat is not None else self._plain_parts(record, given))
        given.check_all_used()
        if not all(is_valid_text(part.text) for part in found):
            raise UnusableSample("its text is not valid Unicode: it has half of a surrogate pair")
        if not any(part.is_learnt for part in found):
            raise UnusableSample("it has no text that could be learnt")
        return found

    def _plain_parts(self, record: Mapping[str, Any], given: _Media) -> Iterator[SamplePart]:
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


class _Media:
    """Media that marks stand for, taken one after another."""

    def __init__(self, lists: Mapping[str, tuple[What, list[Any]]]):
        self._lists = lists
        self._used = dict.fromkeys(lists, 0)

    def at(self, mark: str) -> SamplePart:
        what, media = self._lists[mark]
        self._used[mark] += 1
        return SamplePart(what, media=media[self._used[mark] - 1] if self._used[mark] <= len(media) else None)

    def rest(self) -> Iterator[SamplePart]:
        """All that is left, pictures first."""
        for mark, (_, media) in self._lists.items():
            for _ in range(self._used[mark], len(media)):
                yield self.at(mark)

    def check_all_used(self) -> None:
        for mark, (what, media) in self._lists.items():
            if self._used[mark] != len(media):
                marks = f"{self._used[mark]} {mark} mark{'s' * (self._used[mark] != 1)}"
                raise UnusableSample(f"it has {marks} and {len(media)} {what}{'s' * (len(media) != 1)}")


def _listed(record: Mapping[str, Any], asked: str, usual: Sequence[str]) -> list[Any]:
    names = [asked] if asked else usual
    found = next((record[name] for name in names if record.get(name) is not None), None)
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def _text(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    found = next((record[name] for name in names if record.get(name) is not None), None)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return found.strip() or None if isinstance(found, str) else None


def _chat_parts(chat: list[Any], given: _Media) -> Iterator[SamplePart]:
    for turn in chat:
        if not isinstance(turn, Mapping):
            raise UnusableSample("a turn of its chat is not an object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise UnusableSample("a turn of its chat has no role, or no content")
        is_learnt = role in _LEARNT_ROLES
        yield SamplePart("turn", _ROLES.get(role, role))
        if isinstance(content, str):
            yield from _marked(content, given, is_learnt)
        else:
            for each in content:
                yield from _content_part(each, given, is_learnt)
        yield SamplePart("end", is_learnt=is_learnt)


def _content_part(each: Any, given: _Media, is_learnt: bool) -> Iterator[SamplePart]:
    """One part of a content; a part without media of its own stands for the next of the lists."""
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


def _marked(text: str, given: _Media, is_learnt: bool) -> Iterator[SamplePart]:
    for piece in _MARKS.split(text):
        if piece in ("<image>", "<audio>"):
            yield given.at(piece)
        elif piece:
            yield SamplePart("text", piece, is_learnt=is_learnt)
