"""The tokens of a sample, with a mark where a picture or a recording stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.media.mixed.sample_parts import SamplePart

#: What stands in place of a picture's or a recording's tokens.
PICTURE_MARK, SOUND_MARK = -1, -2


class TextCodec(Protocol):
    """Text to tokens. end: ends a text. turn_start, turn_end: around a turn of a chat. digest: names the codec."""

    end: int
    turn_start: int
    turn_end: int
    digest: str

    def ids(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""
        ...


class ByteText:
    """A token for each byte of UTF-8, then four that say how texts and turns end and begin."""

    end, pad, turn_start, turn_end = 256, 257, 258, 259
    num_ids = 260
    digest = "bytes"

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode())

    def text(self, ids: Sequence[int]) -> str:
        """Return what tokens say, up to the end of a text or a turn."""
        ends = [place for place, one in enumerate(ids) if one in (self.end, self.turn_end)]
        kept = ids[: ends[0]] if ends else ids
        return bytes(one for one in kept if one < 256).decode("utf-8", "replace").strip()

    def whole(self, ids: Sequence[int]) -> str:
        """Return what tokens are, with marks for media and what ends and begins texts."""
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
    """tokens: ids and marks, (T,). learnt: which of them count in the loss, (T,)."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.uint8]


def sample_tokens(parts: Sequence[SamplePart], codec: TextCodec) -> SampleTokens:
    """Return the tokens of a sample's pieces.

    Args:
        parts: in order.
        codec: of their texts.
    """
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
