"""Token ids of texts of any length in bounded memory, equal to the ids of the full text.

A long text is encoded in overlapping windows. A token depends on the text around it, and some tokenizers add a space at
the start of a text. Two windows are therefore joined only at a boundary around which both have equal tokens. The tokens
of the first window before the boundary and of the second after it then equal the tokens of the full text. Windows
without such a boundary are encoded together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from weft.errors import DataError

#: Characters of a window, and the overlap at each end.
WINDOW_CHARS = 2**16
_OVERLAP_CHARS = 512
#: Number of windows that are encoded together, on all cores.
GROUP_WINDOWS = 16
#: Maximum size of a window. A longer text without a boundary would take gigabytes.
_MAX_WINDOW_CHARS = 2**24


class Tokens:
    """Ids of a text, and the range of characters of each token.

    ids: int64 [n]. source: the offsets as int64 [n, 2], an encoding of the tokenizers library that has them, or None.
    """

    __slots__ = ("_source", "ids")

    def __init__(self, ids: np.ndarray, source: Any):
        self.ids, self._source = ids, source

    @property
    def has_offsets(self) -> bool:
        """True if offsets are available."""
        return self._source is not None

    def offsets(self) -> np.ndarray:
        """Return the start and end (exclusive) of each token in characters, int64 [n, 2], or [0, 2] without offsets."""
        if self._source is None:
            return np.zeros((0, 2), np.int64)
        if isinstance(self._source, np.ndarray):
            return self._source
        return np.array(self._source.offsets, np.int64).reshape(-1, 2)


class WindowCodec(Protocol):
    """Tokenizer of a batch of independent texts, each at most one window long."""

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int64."""
        ...

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text with offsets, which takes 1.5 times as long."""
        ...


class _Window(NamedTuple):
    """The encoded characters from `low` to `high` (exclusive) of the buffer. Those before `begin` are only context."""

    low: int
    begin: int
    high: int
    tokens: Tokens


class _Edge(NamedTuple):
    """Tokens of a window near one of its ends, as (id, start, end) with the range of characters of each token.

    `first` is the index of the first token.
    """

    first: int
    tokens: list[tuple[int, int, int]]


class TextEncoder:
    """Encoder of one text that is fed in parts.

    Args:
        encoder: tokenizer of the windows.
        window_chars: characters of a window.
        with_offsets: return offsets too, which takes 1.5 times as long.

    Raises:
        DataError: from `feed` and `finish`, if 2**24 characters have no boundary between tokens.
    """

    def __init__(self, encoder: WindowCodec, *, window_chars: int = WINDOW_CHARS, with_offsets: bool = False):
        self._encoder, self._window_chars, self._with_offsets = encoder, window_chars, with_offsets
        self._parts: list[str] = []
        self._num_chars = 0
        #: Number of characters of the text before the buffer.
        self._before = 0
        #: Start of the characters in the buffer whose ids were not returned yet. The characters before it are context.
        self._begin = 0
        #: Index of the first token in the first window whose id was not returned yet.
        self._first = 0

    def feed(self, part: str) -> Tokens:
        """Add a part of the text, and return the tokens that later parts cannot change and that were not returned yet.

        Short parts are collected first, so the result may have no tokens.
        """
        self._parts.append(part)
        self._num_chars += len(part)
        if self._num_chars < GROUP_WINDOWS * self._window_chars:
            return _joined([])
        return self._advance(is_end=False)

    def finish(self) -> Tokens:
        """Return the remaining tokens."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> Tokens:
        text = "".join(self._parts)
        cuts = self._cuts(text, is_end=is_end)
        if len(cuts) < 2:
            return _joined([])
        windows = self._windows(text, list(itertools.pairwise(cuts)))
        current, first, index, done = windows[0], self._first, 1, list[Tokens]()
        while index < len(windows):
            following = windows[index]
            found = self._agreed(text, current, following)
            if found is None:
                following = self._aligned(text, current, following)
                found = self._agreed(text, current, following)
            if found is None:
                index, current = self._merged(text, current, windows, index)
                continue
            last, start, cut = found
            done.append(self._part(current, first, last))
            current, first, index = following._replace(begin=cut), start, index + 1
        if is_end:
            done.append(self._part(current, first, len(current.tokens.ids)))
        self._parts, self._num_chars = [text[current.low :]], len(text) - current.low
        self._before, self._begin, self._first = self._before + current.low, current.begin - current.low, first
        return _joined(done)

    def _part(self, window: _Window, first: int, last: int) -> Tokens:
        """Return a range of a window's tokens, with offsets in the text."""
        ids = window.tokens.ids[first:last]
        offsets = window.tokens.offsets()[first:last] + (self._before + window.low) if self._with_offsets else None
        return Tokens(ids, offsets)

    def _encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self._with_offsets:
            return self._encoder.tokens(texts)
        return [Tokens(ids, None) for ids in self._encoder.ids(texts)]

    def _cuts(self, text: str, *, is_end: bool) -> list[int]:
        """Return the boundaries of the windows, after a newline or before a space if possible."""
        size, start, cuts = self._window_chars, self._begin, [self._begin]
        limit = len(text) if is_end else len(text) - _OVERLAP_CHARS
        while limit - start > size:
            half, end = start + size // 2, start + size
            start = text.rfind("\n", half, end) + 1 or max(text.rfind(" ", half, end), 0) or end
            cuts.append(start)
        return [*cuts, len(text)] if is_end else cuts

    def _windows(self, text: str, planned: list[tuple[int, int]]) -> list[_Window]:
        bounds = [
            # The first window starts at the start of the buffer, as it did when the window before it was encoded.
            (max(0, begin - _OVERLAP_CHARS) if number else 0, begin, min(len(text), end + _OVERLAP_CHARS))
            for number, (begin, end) in enumerate(planned)
        ]
        encoded = self._encode([text[low:high] for low, _, high in bounds])
        return [_Window(*bound, tokens) for bound, tokens in zip(bounds, encoded, strict=True)]

    def _agreed(self, text: str, current: _Window, following: _Window) -> tuple[int, int, int] | None:
        """Return a boundary between two windows, or None if their tokens near it differ or all begin before it.

        The result is the index of the first token after the boundary, in each window, and the first character of that
        token.
        """
        cut, half = following.begin, _OVERLAP_CHARS // 2
        edges = (
            self._edge(text, current, cut - half, is_end=True),
            self._edge(text, following, cut + half, is_end=False),
        )
        left, right = (
            [(edge.first + place, token) for place, token in enumerate(edge.tokens)
             if token[1] >= cut - half and token[2] <= cut + half]
            for edge in edges
        )  # fmt: skip
        if [token for _, token in left] != [token for _, token in right]:
            return None
        for (last, token), (first, _) in zip(left, right, strict=True):
            if token[1] >= cut:
                return last, first, token[1]
        return None

    def _edge(self, text: str, window: _Window, until: int, *, is_end: bool) -> _Edge:
        """Return the tokens of a window from `until` to its end if `is_end`, else from its start to `until`.

        Windows usually have no offsets. The text of the edge is therefore encoded again, with some characters more, and
        its tokens are returned as far as their ids equal the window's, counted from that end of the window.
        """
        if is_end:
            low, high = max(window.low, until - _OVERLAP_CHARS), window.high
        else:
            low, high = window.low, min(window.high, until + _OVERLAP_CHARS)
        [tokens] = self._encoder.tokens([text[low:high]])
        spans, size = tokens.offsets() + low, min(len(tokens.ids), len(window.tokens.ids))
        near, own = tokens.ids, window.tokens.ids
        if is_end:
            near, own = near[::-1], own[::-1]
        differ = np.flatnonzero(near[:size] != own[:size])
        same = int(differ[0]) if len(differ) else size
        kept = slice(len(spans) - same, len(spans)) if is_end else slice(0, same)
        found = [(token, *span) for token, span in zip(tokens.ids[kept].tolist(), spans[kept].tolist(), strict=True)]
        return _Edge(len(own) - same if is_end else 0, found)

    def _aligned(self, text: str, current: _Window, following: _Window) -> _Window:
        """Return the following window, moved to begin at a token of the current one.

        In a run of one repeated letter, windows have equal tokens only if they begin at a token boundary.
        """
        edge = self._edge(text, current, following.low, is_end=True)
        low = max((token[1] for token in edge.tokens if token[1] <= following.low), default=following.low)
        if low == following.low:
            return following
        [tokens] = self._encode([text[low : following.high]])
        return following._replace(low=low, tokens=tokens)

    def _merged(self, text: str, current: _Window, windows: list[_Window], index: int) -> tuple[int, _Window]:
        """Merge the current window with the following ones until its size doubles.

        Return the index of the next window, and the merged one. Raises DataError if that is longer than 2**24
        characters.
        """
        wanted = current.high + (current.high - current.begin)
        while index + 1 < len(windows) and windows[index].high < wanted:
            index += 1
        high = windows[index].high
        if high - current.low > _MAX_WINDOW_CHARS:
            raise DataError(
                f"tokenizer: {_MAX_WINDOW_CHARS} characters of a text are one word to it. Leave the text out."
            )
        [tokens] = self._encode([text[current.low : high]])
        return index + 1, current._replace(high=high, tokens=tokens)


def encode_long(
    text: str, codec: WindowCodec, *, window_chars: int = WINDOW_CHARS, with_offsets: bool = False
) -> Tokens:
    """Return the tokens of a text of any length.

    Args:
        text: the text, which is encoded in windows if it is longer than one.
        codec: tokenizer of the windows.
        window_chars: characters of a window.
        with_offsets: return offsets too.
    """
    stream = TextEncoder(codec, window_chars=window_chars, with_offsets=with_offsets)
    step = GROUP_WINDOWS * window_chars
    parts = [stream.feed(text[start : start + step]) for start in range(0, len(text), step)]
    return _joined([*parts, stream.finish()])


def _joined(parts: Sequence[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([np.zeros(0, np.int64), *(one.ids for one in parts)])
    if any(one.has_offsets for one in parts):
        return Tokens(ids, np.concatenate([np.zeros((0, 2), np.int64), *(one.offsets() for one in parts)]))
    return Tokens(ids, None)
