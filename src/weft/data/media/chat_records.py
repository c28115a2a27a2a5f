"""Conversations with images and audio clips: their columns, their chat template, and their tokens.

A character replaces each image or audio clip in the text of a message. The chat template gets lists of parts, and the
processor's text replaces each placeholder that the template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from weft.data.media.folder_processor import FolderProcessor, joined, pack, processor_digest, unpack
from weft.data.media.mixed_items import MixedAhead, MixedItems
from weft.data.media.mixed_records import MixedRecords, Sizes
from weft.data.media.mixed_samples import (
    MixedColumns,
    SamplePart,
    UnusableSample,
    chat_of,
    content_parts,
    media_lists,
)
from weft.data.media.records import CHAT, MediaKind
from weft.data.text.chat_template import ChatTemplate, RefusedConversation
from weft.data.text.records import is_valid_text
from weft.data.text.template_sandbox import Rendered
from weft.data.text.tokenizer_limits import bounded
from weft.data.text.turns import Turn, Unusable, apply_reasoning, as_json, list_of_messages, read_turns
from weft.errors import DataError

#: Characters that replace an image and an audio clip in a message (private use), with the type of their part.
_PLACEHOLDERS = {"\U0010fffa": "image", "\U0010fffb": "audio"}
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
        given = media_lists(record, self.picture, self.audio)
        if record.get("videos") or record.get("video"):
            raise UnusableSample("it has a video, and images and audio clips are read. Use its frames as images")
        messages = [dict(turn) for turn in chat_of(record, self.text)]
        media: list[SamplePart] = []
        for turn in messages:
            turn["role"] = turn.pop("from") if "role" not in turn and "from" in turn else turn.get("role")
            value = turn.pop("value", None)
            content = turn.get("content", value)
            if isinstance(content, str | list):
                parts = list(content_parts(content, given))
                if any(character in part.text for part in parts for character in _PLACEHOLDERS):
                    raise UnusableSample("its text has a character of private use (U+10FFFA or U+10FFFB)")
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
        if not is_valid_text(told):
            raise UnusableSample("its text is not valid Unicode: it has half of a surrogate pair")
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

    If a template cannot read all contents as lists, only those with media become lists. Some templates, for example,
    concatenate the system message with the user's text.
    """

    def render_messages(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> Rendered:
        """Return the text of messages, whose contents become lists of parts. Contents of tools' messages are unchanged.

        Raises:
            RefusedConversation: if the template rejects the messages, or does not read lists.
            DataError: as in `ChatTemplate.render_messages`.
        """
        refused: RefusedConversation | None = None
        for only_media in (False, True):
            try:
                found = super().render_messages([_listed(one, only_media) for one in messages], tools, prompt=prompt)
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
    parts = [{"type": _PLACEHOLDERS[one]} if one in _PLACEHOLDERS else {"type": "text", "text": one} for one in pieces]
    return {**message, "content": parts}


@dataclass(frozen=True)
class ChatSurvey:
    """Reads conversations as tokens, with the tokens of their images and audio clips.

    Attributes:
        columns: columns of messages and media.
        processor: processor of the model's folder.
        most: maximum tokens of a conversation.
        most_bad: maximum share of conversations that cannot be used.
        upright: whether images are rotated as their EXIF data asks.
        reasoning: value of data.reasoning.
    """

    columns: ChatColumns
    processor: FolderProcessor
    most: int
    most_bad: float
    reasoning: str = "keep"
    upright: bool = True

    def digest(self) -> list[Any]:
        """Return the JSON values that determine the rows of the table."""
        reasoning = [self.reasoning] if self.reasoning != "keep" else []
        folder = processor_digest(self.processor.folder)
        return ["chat", 1, folder, self.most, self.processor.max_pixels, self.most_bad, *reasoning]

    @cached_property
    def template(self) -> MediaTemplate:
        """The folder's chat template.

        Raises:
            DataError: if it is missing, or does not write exactly one placeholder for an image or audio clip.
        """
        tokenizer, processor = self.processor.tokenizer, self.processor
        names = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        template = processor.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        if not template:
            rule = "it has no chat template. Put the chat_template.jinja of the model into it"
            raise DataError(f"model.path={processor.folder}: {rule}.")
        specials = [str(one) for one in tokenizer.all_special_tokens]
        found = MediaTemplate({"chat_template": str(template), **names}, specials)
        is_sound = min(processor.kinds)
        character, mark = list(_PLACEHOLDERS)[is_sound], processor.kinds[is_sound].mark
        count = found.prompt([Turn("user", f"{character}?")]).count(mark)
        if count != 1:
            raise DataError(
                f"model.path={processor.folder}: its chat template writes {mark} {count} times for an "
                f"{_PLACEHOLDERS[character]}. Put the chat_template.jinja of the model into the folder."
            )
        return found

    def row(self, parts: Sequence[SamplePart], sizes: Sizes) -> dict[str, np.ndarray] | str:
        """Return a conversation's row of the table (`tokens`, `learnt` and `packed`), or the reason to skip it."""
        told = json.loads(parts[-1].text)
        tools = json.dumps(told["tools"], ensure_ascii=False) if told["tools"] else ""
        kinds, seconds = self.processor.kinds, self.processor.seconds
        for is_sound, size in sizes:
            what = "audio clip" if is_sound else "image"
            if is_sound not in kinds:
                return f"it has an {what}, which this model does not read"
            if is_sound and size[0] > seconds * size[1]:
                return f"it has an audio clip longer than the {seconds:g} s that the model reads"
            if kinds[is_sound].is_single and sum(one == is_sound for one, _ in sizes) > 1:
                return f"it has several {what}s, which the model's processor handles differently from one"
        if self.processor.has_suffix and not sizes:
            return "it has no image, without which the model's processor makes no inputs"
        try:
            turns = apply_reasoning(read_turns(told["messages"], "role", "content"), self.reasoning)
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
        """Replace the placeholders of a rendered text, and return its row of the table or the reason to skip it.

        spans: trained ranges of characters.
        """
        processor = self.processor
        marks = {kind.mark: is_sound for is_sound, kind in processor.kinds.items()}
        found = list(re.finditer("|".join(map(re.escape, marks)), text))
        if [marks[one[0]] for one in found] != [is_sound for is_sound, _ in sizes]:
            return f"its chat template writes {len(found)} placeholders for {len(sizes)} images and audio clips"
        pieces, media, packed, done, added = [], [], [], 0, 0
        shifts: list[tuple[int, int]] = []
        for one, (is_sound, size) in zip(found, sizes, strict=True):
            made, num_bytes = processor.blank(is_sound, size)
            pieces += [text[done : one.start()], made]
            media.append((one.start() + added, one.start() + added + len(made)))
            done, added = one.end(), added + len(made) - len(one[0])
            shifts.append((done, added))
            packed.append(num_bytes)
        full = "".join([*pieces, text[done:]])

        def covered(ranges: Iterator[tuple[int, int]]) -> np.ndarray:
            return np.any([(low >= start) & (low < end) for start, end in ranges] or [low < 0], axis=0)

        def moved(place: int) -> int:
            return place + next((total for end, total in reversed(shifts) if end <= place), 0)

        cut = moved(spans[0][0]) if spans else len(full)
        tokens, low, high = bounded(lambda: processor.encode(full, cut), len(full))
        if len(low) > self.most:
            return f"it has {len(low)} tokens, more than train.seq_len={self.most}"
        learnt = covered((moved(start), moved(end)) for start, end in spans) & ~covered(iter(media)) & (high > low)
        if not learnt.any():
            return "it has no answer to train"
        return {"tokens": tokens, "learnt": learnt.astype(np.uint8), "packed": np.array(packed, np.int64)}


# Conversations as model inputs. Decode processes read images and audio clips, and run the folder's processor on them.


class ChatItems(MixedItems):
    """Images and audio clips of conversations, by item index, as packed inputs of the model.

    Args:
        records: the conversations.
        processor: processor of the model's folder.
    """

    smaller = "max_pixels"

    def __init__(self, records: ChatRecords, processor: FolderProcessor):
        self.records, self.processor = records, processor
        self._count_items()
        #: Largest size of an item in bytes.
        self.shape = (max(1, records.most_bytes()),)

    def shaped(self, item: int, values: NDArray[np.uint8]) -> NDArray[Any]:
        """Return `values` unchanged, which are the packed inputs of an item."""
        return values

    def medium(self, epoch: int, item: int) -> NDArray[Any]:
        """Return the packed inputs of an item, which are equal in every epoch: uint8 (B,)."""
        index, number = self.locate(item)
        made = self.processor.read(self.records.medium(index, number), *self.records.sizes(index)[number])
        return np.frombuffer(pack(made.inputs), np.uint8)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that describe this object to decode processes."""
        processor = self.processor
        told = {"folder": str(processor.folder), "max_pixels": processor.max_pixels}
        return {"kind": "chat", "source": self.records.format(), **told}

    @classmethod
    def of(cls, told: dict[str, Any]) -> ChatItems:
        """Return the object for the output of `to_json`."""
        processor = FolderProcessor(Path(told["folder"]), told["max_pixels"])
        return cls(ChatRecords.parse(told["source"]), processor)


class ChatAhead(MixedAhead):
    """Conversations by index: `input_ids` and `learnt`, each (T,), and the inputs of their images and audio clips."""

    def _sample(self, index: int, made: Mapping[int, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        records = self.items.records
        items = [unpack(made[item]) for item in self.items.of_sample(index)]
        names = dict.fromkeys(name for item in items for name in item)
        inputs = {name: joined([item[name] for item in items if name in item], "rows") for name in names}
        return {"input_ids": records.tokens(index), "learnt": records.learnt(index), **inputs}
