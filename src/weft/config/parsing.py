"""Keys and values in TOML notation, the line of each key (which tomllib does not report), and origins of values.

The line scanner expects text that tomllib has accepted. It never decides whether a file is valid.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import cast

#: A path in nested tables and arrays: ("data", "train", 0, "path").
KeyPath = tuple[str | int, ...]

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
#: Parts of a URL that may be a password or a token.
_SECRETS = re.compile(r"(?<=://)[^/]*(?=@)|(?<=\?).+", re.DOTALL)


def dotted(path: KeyPath) -> str:
    """Return the path as it is typed in an override: data.train.0.path. Parts that are no bare keys are quoted."""
    is_bare = [isinstance(part, int) or BARE_KEY.fullmatch(part) for part in path]
    return ".".join(str(part) if bare else json.dumps(part) for part, bare in zip(path, is_bare, strict=True))


def shown(value: object, limit: int = 60) -> str:
    """Return a value as one line of text for messages, truncated to `limit` characters.

    Values are written as in TOML, but a string without quotes unless it is empty or has unprintable characters. User
    info and queries of URLs are hidden.
    """
    text = _plain_toml(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _plain_toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        value = _SECRETS.sub("***", value) if "://" in value else value
        return value if value.isprintable() and value else json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**40 else "(a huge number)"
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, object], value).items()
        return "{" + ", ".join(f"{dotted((key,))} = {as_toml(item)}" for key, item in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(item) for item in cast(list[object], value)) + "]"
    return str(value)


def as_toml(value: object) -> str:
    """Return a value as TOML on one line, with texts in quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _plain_toml(value)


#: A model named by Python code: module:name, such as timm.models:resnet50.
MODEL_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


_HUGE_NUMBER = re.compile(r"[0-9_]{4000,}")
_AT_LINE = re.compile(r"\(at line (\d+), column (\d+)\)")


def error_line(error: Exception, text: str) -> tuple[int, str]:
    """Return the line of a TOML syntax error, and its message without the position."""
    if not isinstance(error, tomllib.TOMLDecodeError):  # Python cannot read a number with thousands of digits
        number = _HUGE_NUMBER.search(text)
        line = text.count("\n", 0, number.start() if number else 0) + 1
        return line, "a number has too many digits"
    reason = str(error)
    place = _AT_LINE.search(reason)
    line = int(place.group(1)) if place else _unfinished_line(text)
    return line, _AT_LINE.sub("", reason).replace("(at end of document)", "").strip()


def _unfinished_line(text: str) -> int:
    """Return the first line of the statement that is unfinished at the end of the text."""
    lines = text.split("\n")
    for count in range(min(len(lines) - 1, 5000), 0, -1):
        try:
            tomllib.loads("\n".join(lines[:count]))
        except (ValueError, RecursionError):
            continue
        while count < len(lines) - 1 and not lines[count].strip():
            count += 1
        return count + 1
    return 1


def split_key(text: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, as TOML reads it: 'a."b.c"' -> ("a", "b.c"). Raises ValueError for others."""
    if "=" in text or "\n" in text or "#" in text:
        raise ValueError("not a dotted key")
    node: object = tomllib.loads(f"{text} = 0")
    parts: list[str] = []
    while isinstance(node, dict):
        ((key, node),) = node.items()  # pyright: ignore[reportUnknownVariableType]  # a tree of TOML
        parts.append(str(key))  # pyright: ignore[reportUnknownArgumentType]  # a tree of TOML
    return tuple(parts)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key, table and array element of a valid TOML text, by path."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.scan()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self._line = 1
        self._line_at = 0  # the position up to which line breaks are counted
        self._lengths: dict[KeyPath, int] = {}  # number of elements of arrays of tables

    def scan(self) -> None:
        table: KeyPath = ()
        while self._skip_blank():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_blank(self) -> bool:
        """Skip spaces, line breaks and comments. Return False at the end of the text."""
        while self.at < len(self.text):
            if self._peek() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self._peek() in " \t\n":
                self.at += 1
            else:
                return True
        return False

    def _mark(self, path: KeyPath) -> None:
        self._line += self.text.count("\n", self._line_at, self.at)
        self._line_at = self.at
        self.lines.setdefault(path, self._line)

    def _header(self) -> KeyPath:
        is_array = self.text.startswith("[[", self.at)
        start = self.at
        self.at += 2 if is_array else 1
        parts = self._key()
        self._skip_blank()
        self.at += 2 if is_array else 1
        end, self.at = self.at, start
        place: list[str | int] = []
        for number, part in enumerate(parts):
            place.append(part)
            path = tuple(place)
            if is_array and number == len(parts) - 1:
                self._lengths[path] = self._lengths.get(path, 0) + 1
            self._mark(path)
            if path in self._lengths:  # a header names the newest element of an array of tables
                place.append(self._lengths[path] - 1)
                self._mark(tuple(place))
        self.at = end
        return tuple(place)

    def _key(self) -> list[str]:
        """Read a dotted key, move the position to its end, and return its parts."""
        parts: list[str] = []
        while True:
            self._skip_blank()
            start = self.at
            if self._peek() in ('"', "'"):
                self._skip_string()
                parts.append(str(tomllib.loads(f"key = {self.text[start : self.at]}")["key"]))
            else:
                match = BARE_KEY.match(self.text, self.at)
                self.at = match.end() if match else len(self.text)
                parts.append(self.text[start : self.at])
            self._skip_blank()
            if self._peek() != ".":
                return parts
            self.at += 1

    def _pair(self, table: KeyPath) -> None:
        start = self.at
        parts = self._key()
        end, self.at = self.at, start
        for number in range(len(parts)):
            self._mark((*table, *parts[: number + 1]))
        self.at = end + 1  # the equals sign
        self._value((*table, *parts))

    def _value(self, path: KeyPath) -> None:
        self._skip_blank()
        mark = self._peek()
        if mark in ('"', "'"):
            self._skip_string()
        elif mark == "{":
            self._items("}", path)
        elif mark == "[":
            self._items("]", path)
        else:
            while self.at < len(self.text) and self._peek() not in ",]}#\n":
                self.at += 1

    def _items(self, close: str, path: KeyPath) -> None:
        """Read the items of an inline table or an array."""
        self.at += 1
        index = 0
        while self._skip_blank() and self._peek() != close:
            if self._peek() == ",":
                self.at += 1
            elif close == "}":
                self._pair(path)
            else:
                self._mark((*path, index))
                self._value((*path, index))
                index += 1
        self.at += 1

    def _skip_string(self) -> None:
        mark = self._peek()
        if self.text.startswith(mark * 3, self.at):
            self.at += 3
            self._skip_to(mark * 3, mark == '"')
            while self._peek() == mark:  # up to two more quotes are part of the text
                self.at += 1
        else:
            self.at += 1
            self._skip_to(mark, mark == '"')

    def _skip_to(self, close: str, escapes: bool) -> None:
        while self.at < len(self.text) and not self.text.startswith(close, self.at):
            self.at += 2 if escapes and self._peek() == "\\" else 1
        self.at += len(close)


# Origins of values: "train.toml:12", "command line", or the default.

COMMAND_LINE = "command line"
DEFAULT = "default"


def origin_of(origins: Mapping[str, str], keys: Sequence[str], fallback: str = "") -> str:
    """Return the origin of the first of these dotted keys that was set, or `fallback` if none was.

    A key counts as set if itself, a table around it, or a key inside it was set.

    Args:
        origins: dotted key -> origin.
        keys, fallback: keys in order of preference, and the result if none was set.
    """
    typed = {key: origin for key, origin in origins.items() if origin != DEFAULT}
    for key in keys:
        around = key
        while around and around not in typed:
            around = around.rpartition(".")[0]
        inside = (origin for other, origin in typed.items() if other.startswith(f"{key}."))
        if origin := typed[around] if around else next(inside, ""):
            return origin
    return fallback
