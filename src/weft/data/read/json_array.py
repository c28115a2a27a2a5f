"""The elements of a JSON array, one after the other, without holding the whole file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

_READ_BYTES = 2**20
#: What ends a string or is escaped in it, and what matters outside of strings.
_IN_STRING, _OUTSIDE = re.compile(r'(?s)\\.|"'), re.compile(r'[][{},"]')
_SPACE = " \t\r\n"


class BadArray(Exception):
    """The array cannot be read any further. reason: one of few texts; excerpt: where it was."""

    def __init__(self, reason: str, excerpt: str):
        super().__init__(reason)
        self.reason, self.excerpt = reason, excerpt


class _Text:
    """A stream of UTF-8 as text that grows at the end and is dropped at the start. position: the next character."""

    def __init__(self, stream: BinaryIO, max_chars: int):
        self._stream, self._max_chars = stream, max_chars
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer, self.position, self.ended = "", 0, False

    def grow(self) -> bool:
        """Read more; False at the end of the file. Doubling keeps the work in proportion to the size."""
        if len(self.buffer) - self.position > self._max_chars:
            raise BadArray("too long", self.buffer[self.position : self.position + 200])
        if self.ended:
            return False
        block = self._stream.read(max(_READ_BYTES, len(self.buffer) - self.position))
        self.ended = not block
        try:
            more = self._decoder.decode(block, final=self.ended)
        except UnicodeDecodeError as error:
            raise BadArray("invalid UTF-8", repr(error.object[error.start : error.start + 80])) from error
        self.buffer, self.position = self.buffer[self.position :] + more, 0
        return not self.ended

    def next_sign(self) -> str:
        """The next character that is no space, without taking it; "" at the end."""
        while True:
            while self.position < len(self.buffer) and self.buffer[self.position] in _SPACE:
                self.position += 1
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self.grow():
                return ""


def read_array(stream: BinaryIO, max_chars: int) -> Iterator[Any]:
    """The elements of the array that `stream` holds; a BadArray stands for one that cannot be read.

    max_chars: of one element. Raises BadArray where the array breaks off or nothing behind an element can be read.
    """
    text, decoder = _Text(stream, max_chars), json.JSONDecoder()
    if text.next_sign() != "[":
        raise BadArray("not an array", text.buffer[:200])
    text.position += 1
    if text.next_sign() == "]":
        return
    while True:
        try:
            yield _element(text, decoder)
        except BadArray as error:
            _skip_element(text, error)
            yield error
        sign = text.next_sign()
        text.position += 1
        if sign == "]":
            return
        if sign != ",":
            raise BadArray("invalid JSON", text.buffer[max(0, text.position - 1) :][:200])


def _element(text: _Text, decoder: json.JSONDecoder) -> Any:
    text.next_sign()
    while True:
        try:
            value, end = decoder.raw_decode(text.buffer, text.position)
        except (ValueError, RecursionError) as error:
            if not _may_be_incomplete(error, len(text.buffer)) or not text.grow():
                raise BadArray("invalid JSON", text.buffer[text.position : text.position + 200]) from error
            continue
        size = end - text.position
        # A number at the end of what was read may go on.
        if end < len(text.buffer) or not text.grow():
            text.position += size
            return value


def _skip_element(text: _Text, error: BadArray) -> None:
    """Go to the sign behind an element, by its brackets and strings. Raises `error` if the file ends before it."""
    depth, in_string = 0, False
    while True:
        found = (_IN_STRING if in_string else _OUTSIDE).search(text.buffer, text.position)
        if found is None:
            # A backslash at the end belongs to the character that is read next.
            text.position = len(text.buffer) - text.buffer.endswith("\\")
            if not text.grow():
                raise error
            continue
        sign = found[0]
        if depth == 0 and sign in (",", "]", "}"):
            text.position = found.start()
            return
        text.position = found.end()
        if sign == '"':
            in_string = not in_string
        elif sign in ("[", "{", "]", "}"):
            depth += 1 if sign in ("[", "{") else -1


def _may_be_incomplete(error: Exception, size: int) -> bool:
    """Whether more text could mend it. An unterminated string is reported where it starts, all else where it is."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos > size - 64
