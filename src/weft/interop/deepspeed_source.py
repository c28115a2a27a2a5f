"""Reads the tables of a DeepSpeed config from a path, a text or a dict, with the line of every key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from weft.config.parsing import KeyPath, dotted, shown
from weft.errors import ConfigError, Problem, did_you_mean

#: Maximum depth, which no config needs. It keeps recursion well below Python's limit.
_MOST_DEPTH = 40

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')

#: A string, a comment, a comma, a closing bracket, or a run of anything else.
_LEXEME = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/|,|(?P<closing>[}\]])|\s+|[^\s"/#,}\]]+|.', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Source:
    """tables: contents of the file. name: its path, or '' for a dict. lines: dotted key -> line of the file."""

    tables: Mapping[str, object]
    name: str = ""
    lines: Mapping[str, int] = field(default_factory=dict[str, int])

    def origin(self, key: str) -> str:
        """Return the position of a key: 'ds_config.json:12', only the file if the line is unknown, or ''."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.name}:{self.lines[key]}" if key else self.name


def read_source(source: Path | str | Mapping[str, object]) -> Source:
    """Read the tables of a config: a path, JSON text (it begins with a brace), or a dict. Raises ConfigError."""
    if isinstance(source, Mapping):
        _check_depth(source)
        return Source(_with_text_keys(source))
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        return _parsed(source, "ds_config")
    name = shown(str(source), 200)
    return _parsed(_read_text(Path(source), name), name)


def _read_text(path: Path, name: str) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        files = sorted(file.name for file in path.parent.glob("*.json"))
        remedy = did_you_mean(path.name, files) or " Check the path."
        raise ConfigError(f"DeepSpeed config {name}: there is no such file.{remedy}") from None
    except IsADirectoryError:
        raise ConfigError(f"DeepSpeed config {name}: this is a folder. Name a JSON file in it.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"DeepSpeed config {name}: it cannot be read ({reason}). Check its path.") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _wrong(name, line, f"byte 0x{raw[error.start]:02x} is not UTF-8 text. Save the file as UTF-8.") from None


def _parsed(text: str, name: str) -> Source:
    text = _as_json(text.removeprefix("\ufeff"))
    try:
        tables: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(name, error.lineno, _syntax(text, error)) from None
    except RecursionError:
        raise _wrong(name, 1, _TOO_DEEP) from None
    except ValueError:  # Python refuses to read a number of thousands of digits
        raise _wrong(name, 1, "a number has thousands of digits. Write one of ordinary size.") from None
    if not isinstance(tables, dict):
        kind = "a list" if isinstance(tables, list) else "a single value"
        raise _wrong(name, 1, f"a DeepSpeed config is a JSON object, but this is {kind}. Write {{ ... }} around it.")
    lines, problems = _scan(text, name)
    if problems:
        raise ConfigError(problems)
    return Source(cast(dict[str, object], tables), name, {dotted(path): line for path, line in lines.items()})


def _as_json(text: str) -> str:
    """Blank out comments and trailing commas, which DeepSpeed's reader (hjson) accepts; lines keep their numbers."""
    kept: list[str] = []
    for match in _LEXEME.finditer(text):
        lexeme = match[0]
        if lexeme.startswith(("//", "#", "/*")):
            lexeme = "\n" * lexeme.count("\n")
        elif match["closing"] and (last := _last_solid(kept)) is not None and kept[last] == ",":
            kept[last] = ""
        kept.append(lexeme)
    return "".join(kept)


def _last_solid(lexemes: list[str]) -> int | None:
    """Return the index of the last lexeme that is not blank."""
    return next((index for index in range(len(lexemes) - 1, -1, -1) if lexemes[index].strip()), None)


_TOO_DEEP = f"tables are nested more than {_MOST_DEPTH} deep. Flatten them."


def _wrong(name: str, line: int, message: str) -> ConfigError:
    return ConfigError([Problem("", message, f"{name}:{line}")])


def _syntax(text: str, error: json.JSONDecodeError) -> str:
    """Return the syntax error at the position where reading stopped, and the remedy."""
    at = text[error.pos : error.pos + 1]
    line = text.split("\n")[error.lineno - 1].strip()
    if not text.strip():
        return "the file is empty. A DeepSpeed config is a JSON object: { ... }."
    if at == "'":
        return f"JSON keys and strings have double quotes, not single ones: {shown(line, 80)!r}."
    reason = f"{error.msg[:1].lower()}{error.msg[1:]}"
    where = f" in {shown(line, 80)!r}" if line else ""
    return f"this is not JSON: {reason}{where}. Write keys and strings in double quotes, separated by commas."


def _scan(text: str, name: str) -> tuple[dict[KeyPath, int], list[Problem]]:
    """Return the line of every key of valid JSON. Refuse duplicate keys, invalid numbers, and too deep nesting."""
    lines: dict[KeyPath, int] = {}
    problems: list[Problem] = []
    path: list[str | int] = []  # one entry for each open bracket, the key or index inside it
    last: tuple[str, int] = ("", 1)
    for token, line in _tokens(text):
        if token in ("{", "["):
            path.append("" if token == "{" else 0)
            if len(path) > _MOST_DEPTH:
                raise _wrong(name, line, _TOO_DEEP)
        elif token in ("}", "]"):
            path.pop()
        elif token == ":":
            path[-1] = str(json.loads(last[0]))
            place = tuple(path)
            if place in lines:
                rule = f"{dotted(place)} is set twice, first in line {lines[place]}. Keep one."
                problems.append(Problem(dotted(place), rule, f"{name}:{last[1]}"))
            lines.setdefault(place, last[1])
        elif token == ",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else ""
        elif token[0] != '"' and token not in ("true", "false", "null") and not math.isfinite(float(token)):
            rule = f"{shown(token, 40)} is not a JSON number. Write a finite number, or leave the key out."
            problems.append(Problem(dotted(tuple(path)), rule, f"{name}:{line}"))
        last = (token, line)
    return lines, problems


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line, counted = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        yield match.group(), line


def _check_depth(tables: Mapping[str, object]) -> None:
    """Refuse a dict that is nested too deep, or contains itself."""
    level: list[object] = [tables]
    for _ in range(_MOST_DEPTH + 1):
        level = list({id(inside): inside for value in level for inside in _inside(value)}.values())
        if not level:
            return
    raise ConfigError(f"ds_config: {_TOO_DEEP}")


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(cast(Mapping[object, object], value).values())
    return cast(list[object], value) if isinstance(value, list) else []


def _with_text_keys(tables: Mapping[str, object]) -> dict[str, object]:
    return {
        str(key): _with_text_keys(cast(Mapping[str, object], value)) if isinstance(value, Mapping) else value
        for key, value in tables.items()
    }
