"""Token ids of texts of any length in bounded memory, equal to those of the full text.

A long text is encoded in windows that overlap. Tokenizers look at a neighbourhood only, such as a word, but also at the
start of a text, which some of them prefix with a blank. So a cut is accepted only if two neighbouring windows agree on all
tokens around it: what one window has left of the cut and the other one right of it is then what the full text has.
Windows that do not agree are encoded as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.errors import DataError

#: Characters of a window, and how many more it reads at each end.
WINDOW_CHARS = 2**16
_OVERLAP_CHARS = 512
#: Windows that are encoded together, on all cores.
GROUP_WINDOWS = 16
#: A longer text without a cut would take gigabytes.
_MAX_WINDOW_CHARS = 2**24


class Tokens:
    """Ids of a text, and the characters of the text that each one stands for.

    Args:
        ids: int64 [n].
        encoding: of the tokenizers library, which has the offsets; or int64 [n, 2].
    """

    __slots__ = ("_encoding", "ids")

    def __init__(self, ids: np.ndarray, encoding: Any):
        self.ids, self._encoding = ids, encoding

    def span(self, index: int) -> tuple[int, int]:
        """Return the first character of a token and the one after its last."""
        if isinstance(self._encoding, np.ndarray):
            low, high = self._encoding[index]
            return int(low), int(high)
        return self._encoding.token_to_chars(index) or (0, 0)

    def offsets(self) -> np.ndarray:
        """Return the spans of all tokens, int64 [n, 2]."""
        if isinstance(self._encoding, np.ndarray):
            return self._encoding
        return np.array(self._encoding.offsets, np.int64).reshape(-1, 2)


#: Encodes texts, each for itself.
Encode = Callable[[Sequence[str]], list[Tokens]]


class _Window(NamedTuple):
    """Characters low..high of the buffer, encoded; the part from `begin` is its own."""

    low: int
    begin: int
    high: int
    tokens: Tokens


class TextEncoder:
    """Encodes one text that arrives in parts.

    Args:
        encode: encodes windows.
        window_chars: characters of a window.
        with_offsets: whether results have the characters of each token.
    """

    def __init__(self, encode: Encode, *, window_chars: int = WINDOW_CHARS, with_offsets: bool = False):
        self._encode, self._window_chars, self._with_offsets = encode, window_chars, with_offsets
        self._parts: list[str] = []
        self._num_chars = 0
        #: Of the buffer: characters before it in the text, and where the part begins whose ids were not returned.
        self._before, self._begin = 0, 0

    def feed(self, part: str) -> Tokens:
        """Add a part of the text, and return ids that no further part can change."""
        self._parts.append(part)
        self._num_chars += len(part)
        if self._num_chars < GROUP_WINDOWS * self._window_chars:
            return _joined([])
        return self._advance(is_end=False)

    def finish(self) -> Tokens:
        """Return the ids of the rest."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> Tokens:
        text = "".join(self._parts)
        cuts = self._cuts(text, is_end=is_end)
        done: list[Tokens] = []
        if len(cuts) > 1:
            encoded = self._windows(text, list(itertools.pairwise(cuts)))
            current, first, index = encoded[0], self._own(encoded[0]), 1
            while index < len(encoded):
                following = encoded[index]
                found = _agreed(current, following, following.begin)
                if found is None:
                    following = self._aligned(text, current, following)
                    found = _agreed(current, following, following.begin)
                if found is None:
                    index, current = self._merged(text, current, encoded, index)
                    first = self._own(current)
                    continue
                last, start, cut = found
                done.append(self._part(current, first, last))
                current, first, index = following._replace(begin=cut), start, index + 1
            if is_end:
                done.append(self._part(current, first, len(current.tokens.ids)))
            low, begin = current.low, current.begin
        else:
            low, begin = 0, self._begin
        self._parts, self._num_chars = [text[low:]], len(text) - low
        self._before, self._begin = self._before + low, begin - low
        return _joined(done)

    def _cuts(self, text: str, *, is_end: bool) -> list[int]:
        """Where windows begin, and the end of the last: after a newline or before a space if there is one."""
        size, start, cuts = self._window_chars, self._begin, [self._begin]
        limit = len(text) if is_end else len(text) - _OVERLAP_CHARS
        while limit - start > size:
            half, end = start + size // 2, start + size
            start = text.rfind("\n", half, end) + 1 or max(text.rfind(" ", half, end), 0) or end
            cuts.append(start)
        return [*cuts, len(text)] if is_end else cuts

    def _windows(self, text: str, planned: list[tuple[int, int]]) -> list[_Window]:
        bounds = [
            (max(0, begin - _OVERLAP_CHARS), begin, min(len(text), end + _OVERLAP_CHARS)) for begin, end in planned
        ]
        encoded = self._encode([text[low:high] for low, _, high in bounds])
        return [_Window(*bound, tokens) for bound, tokens in zip(bounds, encoded, strict=True)]

    def _own(self, window: _Window) -> int:
        """The first token of a window that begins where an earlier one was cut."""
        if not window.begin:
            return 0
        index = 0
        while index < len(window.tokens.ids) and window.tokens.span(index)[0] + window.low < window.begin:
            index += 1
        return index

    def _aligned(self, text: str, current: _Window, following: _Window) -> _Window:
        """The following window, beginning at a token of the current one: in runs of one letter each shift differs."""
        index = len(current.tokens.ids) - 1
        while index > 0 and current.tokens.span(index)[0] + current.low > following.low:
            index -= 1
        low = max(0, current.tokens.span(index)[0] + current.low)
        if index <= 0 or low == following.low:
            return following
        [tokens] = self._encode([text[low : following.high]])
        return following._replace(low=low, tokens=tokens)

    def _merged(self, text: str, current: _Window, encoded: list[_Window], index: int) -> tuple[int, _Window]:
        """The current window with as many of the following ones as double it, and the index of the next."""
        wanted = current.high + (current.high - current.begin)
        while index + 1 < len(encoded) and encoded[index].high < wanted:
            index += 1
        high = encoded[index].high
        if high - current.low > _MAX_WINDOW_CHARS:
            raise DataError(
                f"tokenizer: {_MAX_WINDOW_CHARS} characters of a text are one word to it. Leave the text out."
            )
        [tokens] = self._encode([text[current.low : high]])
        return index + 1, current._replace(high=high, tokens=tokens)

    def _part(self, window: _Window, first: int, last: int) -> Tokens:
        ids = window.tokens.ids[first:last]
        if not self._with_offsets:
            return Tokens(ids, np.zeros((0, 2), np.int64))
        return Tokens(ids, window.tokens.offsets()[first:last] + (window.low + self._before))


def encode_long(text: str, encode: Encode, *, window_chars: int = WINDOW_CHARS) -> Tokens:
    """Return the tokens of a text of any length, with the characters of each.

    Args:
        text: encoded in windows if it is longer than one.
        encode: encodes windows.
        window_chars: characters of a window.
    """
    encoder = TextEncoder(encode, window_chars=window_chars, with_offsets=True)
    step = GROUP_WINDOWS * window_chars
    parts = [encoder.feed(text[start : start + step]) for start in range(0, len(text), step)]
    return _joined([*parts, encoder.finish()])


def _agreed(current: _Window, following: _Window, cut: int) -> tuple[int, int, int] | None:
    """Where two windows can be cut: the token of each that is the following one's first, and its first character.

    None unless all tokens near the cut are the same in both.
    """
    low, high = cut - _OVERLAP_CHARS // 2, cut + _OVERLAP_CHARS // 2
    left, left_tokens = _between(current, low, high, from_end=True)
    right, right_tokens = _between(following, low, high, from_end=False)
    if left_tokens != right_tokens:
        return None
    for place, (_, start, _) in enumerate(left_tokens):
        if start >= cut:
            return left + place, right + place, start
    return None


def _between(window: _Window, low: int, high: int, *, from_end: bool) -> tuple[int, list[tuple[int, int, int]]]:
    """The tokens within some characters, as (id, first character, end), and the index of the first of them."""
    ids, tokens = window.tokens.ids, window.tokens
    order = range(len(ids) - 1, -1, -1) if from_end else range(len(ids))
    found: list[tuple[int, int, int]] = []
    edge = 0
    for index in order:
        start, end = (one + window.low for one in tokens.span(index))
        if (from_end and end <= low) or (not from_end and start >= high):
            break
        if start >= low and end <= high:
            found.append((int(ids[index]), start, end))
            edge = index
    if from_end:
        return edge, found[::-1]
    return edge - len(found) + 1, found


def _joined(parts: Sequence[Tokens]) -> Tokens:
    if not parts:
        return Tokens(np.zeros(0, np.int64), np.zeros((0, 2), np.int64))
    if len(parts) == 1:
        return parts[0]
    return Tokens(np.concatenate([one.ids for one in parts]), np.concatenate([one.offsets() for one in parts]))
