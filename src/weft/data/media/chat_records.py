"""Conversations with images and audio clips: their columns, their chat template, and their tokens.

A character stands for each image or audio clip in the text of a message. The chat template gets lists of parts, and the
processor's text replaces each placeholder that the template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from weft.data.media.folder_processor import FolderProcessor, processor_digest
from weft.data.media.mixed_records import MixedRecords, Sizes
from weft.data.media.mixed_samples import (
    MixedColumns,
    SamplePart,
    UnusableSample,
    chat_of,
    content_parts,
    given_media,
)
from weft.data.media.records import CHAT, MediaKind
from weft.data.text.chat_template import ChatTemplate, RefusedConversation
from weft.data.text.template_sandbox import Rendered
from weft.data.text.tokenizer_limits import bounded
from weft.data.text.turns import Turn, Unusable, as_json, list_of_messages, read_turns
from weft.errors import DataError

#: Characters that stand for an image and an audio clip in a message (private use), with the type of their part.
_STAND_INS = {"\U0010fffa": "image", "\U0010fffb": "audio"}
_CHARACTER = {"picture": "\U0010fffa", "recording": "\U0010fffb"}
_SPLIT = re.compile("([\U0010fffa\U0010fffb])")
_LISTED = "{'type': '"


@dataclass(frozen=True, slots=True)
class ChatColumns(MixedColumns):
    """Columns of conversations. `text` is the column of the messages."""

    def parts(self, record: Mapping[str, Any]) -> list[SamplePart]:
        """Return the media of a conversation in order, and then its messages and tools as JSON.

        Raises:
            UnusableSample: if it has no messages, or its placeholders and media do not match.
        """
        given = given_media(record, self.picture, self.audio)
        messages = [dict(turn) for turn in chat_of(record, self.text)]
        media: list[SamplePart] = []
        for turn in messages:
            turn["role"] = turn.pop("from") if "role" not in turn and "from" in turn else turn.get("role")
            value = turn.pop("value", None)
            content = turn.get("content", value)
            if any(character in str(content) for character in _STAND_INS):
                raise UnusableSample("its text has a character of private use (U+10FFFA or U+10FFFB)")
            if isinstance(content, str | list):
                parts = list(content_parts(content, given))
                media += [part for part in parts if part.what != "text"]
                content = "".join(part.text if part.what == "text" else _CHARACTER[part.what] for part in parts)
            turn["content"] = content
        if not media and (rest := list(given.rest())):  # a column of images, and no placeholder, as TRL allows
            first = next((turn for turn in messages if turn["role"] in ("user", "human")), None)
            if first is None:
                raise UnusableSample(f"it has {len(rest)} images or audio clips, and no user's turn for them")
            first["content"] = "".join(_CHARACTER[part.what] for part in rest) + str(first["content"] or "")
            media = rest
        given.check_all_used()
        try:
            told = as_json({"messages": messages, "tools": list_of_messages(record.get("tools"))})
        except Unusable as error:
            raise UnusableSample(f"its messages have {error}") from error
        return [*media, SamplePart("text", told)]


class ChatRecords(MixedRecords):
    """Conversations in records, in the order of their files."""

    kind: ClassVar[MediaKind] = CHAT

    def mixed_columns(self) -> ChatColumns:
        picture, _, audio = self.columns.media.partition("\n")
        return ChatColumns(self.columns.label, picture, audio)

    def most_bytes(self) -> int:
        """Return the packed size of the largest image or audio clip in bytes."""
        return int(max(self.table.column("packed"), default=0))


class MediaTemplate(ChatTemplate):
    """A chat template that reads contents as lists of parts.

    A template may read only the contents with media as lists: some add a system message to a text.
    """

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> Rendered:
        refused: RefusedConversation | None = None
        for only_media in (False, True):
            try:
                found = super()._rendered([_listed(one, only_media) for one in messages], tools, prompt=prompt)
            except RefusedConversation as error:
                refused = refused or error
                continue
            if _LISTED not in found.text or any(_LISTED in str(one.get("content")) for one in messages):
                return found
        raise refused or RefusedConversation(
            "tokenizer: its chat template does not read contents that are lists of parts. Use the model's own.",
            "the chat template does not read contents that are lists of parts",
        )


def _listed(message: dict[str, Any], only_media: bool) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or message["role"] == "tool" or (only_media and not _SPLIT.search(content)):
        return message
    pieces = [piece for piece in _SPLIT.split(content) if piece] or [""]
    parts = [{"type": _STAND_INS[one]} if one in _STAND_INS else {"type": "text", "text": one} for one in pieces]
    return {**message, "content": parts}


@dataclass(frozen=True)
class ChatSurvey:
    """Reads conversations as tokens, with the tokens of their images and audio clips.

    Attributes:
        columns: columns of messages and media.
        processor: processor of the model's folder.
        most: maximum tokens of a conversation.
        most_bad: maximum share of conversations that cannot be used.
    """

    columns: ChatColumns
    processor: FolderProcessor
    most: int
    most_bad: float
    upright: bool = True

    def digest(self) -> list[Any]:
        """Return the JSON values that determine the rows."""
        return ["chat", 1, processor_digest(self.processor.folder), self.most, self.processor.max_pixels, self.most_bad]

    @cached_property
    def template(self) -> MediaTemplate:
        """The folder's chat template.

        Raises:
            DataError: if there is none, or it does not write exactly one placeholder for an image or audio clip.
        """
        tokenizer, processor = self.processor.tokenizer, self.processor
        names = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        chat = {"chat_template": processor.template(), **names}
        found = MediaTemplate(chat, [str(one) for one in tokenizer.all_special_tokens])
        for is_sound, mark in processor.marks.items():
            character = list(_STAND_INS)[is_sound]
            text = found.prompt([Turn("user", f"{character}?")])
            if text.count(mark) != 1:
                raise DataError(
                    f"model.path={processor.folder}: its chat template writes {mark} {text.count(mark)} times for an "
                    f"{_STAND_INS[character]}. Put the chat_template.jinja of the model into the folder."
                )
        return found

    def row(self, parts: Sequence[SamplePart], sizes: Sizes) -> dict[str, np.ndarray] | str:
        """Return a conversation's columns, or the reason to skip it."""
        told = json.loads(parts[-1].text)
        tools = json.dumps(told["tools"], ensure_ascii=False) if told["tools"] else ""
        if missing := next((is_sound for is_sound, _ in sizes if is_sound not in self.processor.marks), None):
            return f"it has an {'audio clip' if missing else 'image'}, which this model does not read"
        if any(is_sound and size[0] > self.processor.seconds * size[1] for is_sound, size in sizes):
            return f"it has an audio clip longer than the {self.processor.seconds:g} s that the model reads"
        try:
            turns = read_turns(told["messages"], "role", "content")
            if any(turn.is_trained and turn.weight != 1 for turn in turns):
                return "a turn has a weight other than 0 and 1"
            if self.template.has_special(turns, tools):
                return "its text has the text of a special token"
            text, spans = self.template.render(turns, tools)
            return self._tokens(text, [(low, high) for low, high, _ in spans], sizes)
        except Unusable as error:
            return f"its messages are unusable: {error}"
        except RefusedConversation as error:
            return error.reason

    def _tokens(self, text: str, spans: list[tuple[int, int]], sizes: Sizes) -> dict[str, np.ndarray] | str:
        """Replace the placeholders of a rendered text, and return its tokens. spans: trained ranges of characters."""
        processor, marks = self.processor, self.processor.marks
        found = list(re.finditer("|".join(map(re.escape, marks.values())), text))
        if [one[0] for one in found] != [marks[is_sound] for is_sound, _ in sizes]:
            return f"its chat template writes {len(found)} placeholders for {len(sizes)} images and audio clips"
        pieces, media, packed, done, added = [], [], [], 0, 0
        shifts: list[tuple[int, int]] = []
        for one, (is_sound, size) in zip(found, sizes, strict=True):
            made, num_bytes = processor.blank(size, is_sound=is_sound)
            pieces += [text[done : one.start()], made]
            media.append((one.start() + added, one.start() + added + len(made)))
            done, added = one.end(), added + len(made) - len(one[0])
            shifts.append((done, added))
            packed.append(num_bytes)
        full = "".join([*pieces, text[done:]])
        begin = processor.tokenizer.bos_token
        options = {"add_special_tokens": not (begin and full.startswith(begin)), "return_offsets_mapping": True}
        encoded: Any = bounded(lambda: processor.tokenizer(full, **options), len(full))
        low, high = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        if len(low) > self.most:
            return f"it has {len(low)} tokens, more than train.seq_len={self.most}"

        def covered(ranges: Iterator[tuple[int, int]]) -> np.ndarray:
            return np.any([(low >= start) & (low < end) for start, end in ranges] or [low < 0], axis=0)

        def moved(place: int) -> int:
            return place + next((total for end, total in reversed(shifts) if end <= place), 0)

        learnt = covered((moved(start), moved(end)) for start, end in spans) & ~covered(iter(media)) & (high > low)
        if not learnt.any():
            return "it has no answer to train"
        tokens = np.array(encoded["input_ids"], np.int32)
        return {"tokens": tokens, "learnt": learnt.astype(np.uint8), "packed": np.array(packed, np.int64)}
