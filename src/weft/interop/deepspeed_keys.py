"""DeepSpeed's config keys: parsing a file, the list of valid keys, and the outcome of importing each key."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import cast

from weft.config.parsing import KeyPath, dotted, shown
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.env import is_secret
from weft.errors import ConfigError, Problem, did_you_mean, nearest_name

#: Maximum nesting depth, far above the depth of any config. It keeps recursion well below Python's limit.
_MOST_DEPTH = 40

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')

#: A token: a string, a comment, a comma, a closing bracket, or a sequence of other characters.
_LEXEME = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/|,|(?P<closing>[}\]])|\s+|[^\s"/#,}\]]+|.', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed config file.

    Attributes:
        tables: its contents.
        name: its path, or ''.
        lines: line number of each dotted key.
    """

    tables: Mapping[str, object]
    name: str = ""
    lines: Mapping[str, int] = field(default_factory=dict[str, int])

    def origin(self, key: str) -> str:
        """Return the position of a key, such as 'ds_config.json:12'.

        If the key's line is unknown, this is the line of the nearest table around it, or else only the file's name (''
        for a dict).
        """
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.name}:{self.lines[key]}" if key else self.name


def read_source(source: Path | str | Mapping[str, object]) -> Source:
    """Read the tables of a config: a path, JSON text (it begins with a brace), or a dict.

    Raise ConfigError if it cannot be read.
    """
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
    except ValueError:  # Python raises an error for numbers of thousands of digits
        raise _wrong(name, 1, "a number has thousands of digits. Write one of ordinary size.") from None
    if not isinstance(tables, dict):
        kind = "a list" if isinstance(tables, list) else "a single value"
        raise _wrong(name, 1, f"a DeepSpeed config is a JSON object, but this is {kind}. Write {{ ... }} around it.")
    lines, problems = _scan(text, name)
    if problems:
        raise ConfigError(problems)
    return Source(cast(dict[str, object], tables), name, {dotted(path): line for path, line in lines.items()})


def _as_json(text: str) -> str:
    """Return the text without comments and trailing commas, which DeepSpeed accepts. Line numbers do not change."""
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
    return next((index for index in range(len(lexemes) - 1, -1, -1) if lexemes[index].strip()), None)


_TOO_DEEP = f"tables are nested more than {_MOST_DEPTH} deep. Flatten them."


def _wrong(name: str, line: int, message: str) -> ConfigError:
    return ConfigError([Problem("", message, f"{name}:{line}")])


def _syntax(text: str, error: json.JSONDecodeError) -> str:
    """Return the text of a syntax error at the position at which reading stopped, with a fix."""
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
    """Return the line of every key, and problems: duplicate keys and invalid numbers.

    Raises ConfigError for too deep nesting.
    """
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


# Keys of a config.


BECAME = "became"
FOLLOWS = "follows"
NOTHING = "nothing"
NOT_BUILT = "not built"
REMOVED = "removed"
TYPO = "typo"

#: First part of an outcome's sentence, by kind. The outcome's text is added to it.
PHRASES = {
    BECAME: "became",
    FOLLOWS: "follows from",
    NOTHING: "has no effect in Weft:",
    NOT_BUILT: "not supported yet:",
    REMOVED: "removed from DeepSpeed:",
    TYPO: "typo:",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of importing one key of the file. The outcome of a table may cover all keys in it.

    Attributes:
        key: dotted, as in the file.
        value: as typed, truncated.
        kind: a key of PHRASES.
        text: text after the kind's phrase.
        fields: Weft's settings that the key set, such as "plan.zero" or "optimizer.lr".
    """

    key: str
    value: str
    kind: str
    text: str
    fields: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The outcome as text, such as 'became optimizer.lr=0.0001'."""
        return f"{PHRASES[self.kind]} {self.text}"

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.sentence}"


# DeepSpeed's keys, as listed in `keys.toml`, and suggestions for unknown keys.

#: Minimum similarity for suggesting a key of another table. It is high, because there are hundreds of keys.
_ELSEWHERE = 0.85


@dataclass(frozen=True, slots=True)
class Group:
    """Keys of one table that have the same meaning in Weft. The top of keys.toml describes the fields."""

    keys: tuple[str, ...]  # dotted
    outcome: str
    text: str
    target: str = ""
    whole: bool = False
    off: tuple[object, ...] = ()


@functools.cache
def groups() -> tuple[Group, ...]:
    """Return all groups of keys.toml, in order."""
    text = resources.files("weft.interop").joinpath("keys.toml").read_text(encoding="utf-8")
    return tuple(_group(table) for table in cast(list[dict[str, object]], tomllib.loads(text)["group"]))


def _group(table: dict[str, object]) -> Group:
    section = str(table.get("section", ""))
    return Group(
        keys=tuple(f"{section}.{name}" if section else name for name in cast(list[str], table["keys"])),
        outcome=str(table["outcome"]),
        text=str(table["text"]),
        target=str(table.get("target", "")),
        whole=bool(table.get("whole", False)),
        off=tuple(cast(list[object], table.get("off", []))),
    )


@functools.cache
def known_keys() -> Mapping[str, Group]:
    """Return every dotted key that DeepSpeed has or had, with its group."""
    return {key: group for group in groups() for key in group.keys}


@functools.cache
def sections() -> frozenset[str]:
    """Return every dotted name of a table that has valid keys."""
    parents: set[str] = set()
    for key in known_keys():
        while key := key.rpartition(".")[0]:
            parents.add(key)
    return frozenset(parents)


def meant(section: str, name: str) -> str:
    """Return ' Did you mean ...?' for an unknown key, naming the table if it belongs to another one, or ''."""
    every = {*known_keys(), *sections()}
    here = {key.rpartition(".")[2] for key in every if key.rpartition(".")[0] == section}
    alike = next((known for known in sorted(here) if known.lower() == name.lower()), "")
    homes = sorted(key for key in every if key.rpartition(".")[2] == name)
    if not alike and 1 <= len(homes) <= 2:
        return f" Did you mean {' or '.join(repr(home) for home in homes)}?"
    near = alike or nearest_name(name, sorted(here))
    if near:
        return f" Did you mean '{section + '.' if section else ''}{near}'?"
    leaves = {key.rpartition(".")[2]: key for key in sorted(every)}
    near = next(iter(difflib.get_close_matches(name, sorted(leaves), n=1, cutoff=_ELSEWHERE)), "")
    return f" Did you mean '{leaves[near]}'?" if near else ""


# State of importing one file: the `read_` functions get values from it and report the outcome of each key to it.

AUTO = "auto"
#: Maximum number of ranks, microbatches or sequences in a plan and a config.
MOST = 999_999_999
_KINDS = {"follows": FOLLOWS, "nothing": NOTHING, "not built": NOT_BUILT, "removed": REMOVED}
_COMMENTS = ("comment", "comments", "$schema")


class Reading:
    """State of importing one file.

    Attributes:
        plan: fields of the plan.
        settings: dotted settings of a RunConfig.
        open: settings that are "auto" in the file.
        values: values of the keys to convert, without those that are null.
    """

    def __init__(self, source: Source):
        self.source = source
        self.values: dict[str, object] = {}
        self.lines: dict[str, Outcome] = {}
        self.order: list[str] = []
        self.problems: list[Problem] = []
        self.plan: dict[str, object] = {}
        self.settings: dict[str, object] = {}
        self.open: list[str] = []
        self.notes: list[str] = []
        self.typed: dict[str, object] = {}
        self._sort((), source.tables, is_off=False)

    def _sort(self, path: tuple[str, ...], table: Mapping[str, object], is_off: bool) -> None:
        """Record the outcome of each key that needs no conversion, and store the values of the others."""
        for name, value in table.items():
            inner = (*path, name)
            key = dotted(inner)
            group = known_keys().get(key)
            self.order.append(key)
            self.typed[key] = value
            if key in sections() and isinstance(value, Mapping):
                table = cast(Mapping[str, object], value)
                if table:
                    self._sort(inner, table, is_off=table.get("enabled") is False)
                else:
                    self.nothing(key, "an empty table")
            elif value is None and (group is not None or key in sections()):
                self.nothing(key, "null, as if it were not there")
            elif group is not None:
                self._sort_known(key, value, group, is_off)
            elif key in sections():
                self.wrong(key, "the value must be a table", 'Write e.g. {"enabled": true}')
            elif name.startswith(("_", "//")) or name in _COMMENTS:
                self.nothing(key, "a comment")
            else:
                hint = meant(dotted(path), name) or " It is left out."
                self._note(key, TYPO, f"no such key in DeepSpeed.{hint}")

    def _sort_known(self, key: str, value: object, group: Group, is_off: bool) -> None:
        if group.outcome == "becomes":
            self.values[key] = value
        elif group.outcome == "not built" and (is_off or value in (False, None, "none", "", *group.off)):
            self.nothing(key, "switched off")
        else:
            self._note(key, _KINDS[group.outcome], group.text)

    # Methods that report outcomes

    def became(self, key: str, text: str, *fields: str) -> None:
        self._note(key, BECAME, text, fields)

    def follows(self, key: str, text: str) -> None:
        self._note(key, FOLLOWS, text)

    def nothing(self, key: str, text: str) -> None:
        self._note(key, NOTHING, text)

    def missing(self, key: str, text: str, *fields: str) -> None:
        """Record that Weft lacks the feature of a key, even if a similar setting was set."""
        self._note(key, NOT_BUILT, text, fields)

    def removed(self, key: str, text: str) -> None:
        self._note(key, REMOVED, text)

    def set(self, key: str, setting: str, value: object) -> None:
        """Set a setting of the config from a key, and record the outcome."""
        self.settings[setting] = value
        self.became(key, f"{setting}={number_text(value)}", setting)

    def set_plan_field(self, key: str, **fields: object) -> None:
        """Set fields of the plan from a key, and record the outcome."""
        self.plan |= fields
        words = " ".join(f"{name}={'on' if value is True else value}" for name, value in fields.items())
        self.became(key, f"plan {words}", *(f"plan.{name}" for name in fields))

    def wrong(self, key: str, rule: str, remedy: str) -> None:
        """Record a mistake at a key: `<key>=<value>: <rule>. <remedy>.` The remedy may be a question."""
        end = "" if remedy.endswith("?") else "."
        message = f"{key}={self._value(key)}: {rule}. {remedy}{end}"
        self.problems.append(Problem(key, message, self.source.origin(key)))

    def _note(self, key: str, kind: str, text: str, fields: Sequence[str] = ()) -> None:
        self.lines[key] = Outcome(key, self._value(key), kind, text, tuple(fields))

    def _value(self, key: str) -> str:
        """Return a key's value as text. Secrets, such as comet.api_key, are replaced."""
        return "[redacted]" if is_secret(key.rpartition(".")[2]) else value_text(self.typed.get(key))

    # Methods that read values. They return None if the key is absent, "auto" or invalid, and record that.

    def is_auto(self, key: str) -> bool:
        return self.values.get(key) == AUTO

    def leave_open(self, key: str) -> None:
        """Record a key that is "auto": its setting keeps Weft's default until the user sets it.

        For a key that may not be "auto", a mistake is recorded.
        """
        target = known_keys()[key].target
        if not target:
            self.wrong(key, '"auto" is not a value of this key', "Write the value, or leave the key out")
            return
        self.open.append(target)
        self.follows(key, f"{target} ({default_text(target)} unless you set it)")

    def read_int(self, key: str, low: int = 1, high: int = MOST) -> int | None:
        """Return an integer from `low` to `high`, or None if it is not given or wrong (which is recorded).

        Like DeepSpeed, accept also 8.0, 5e8 and quoted numbers.
        """
        value = _number_in_quotes(self._raw_value(key))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
            return value
        example = f"{key}={max(low, 1)}" if low < high else f"{key}={low}"
        self.wrong(key, f"the value must be a whole number from {low} to {high}", f"Use e.g. {example}")
        return None

    def number(self, key: str, *, above_zero: bool = False, below: float = math.inf) -> float | None:
        """Return a number of at least 0 (or above 0) and below a limit, or None as `read_int`.

        Quoted numbers are accepted.
        """
        value = _number_in_quotes(self._raw_value(key))
        if value is None or is_number(value, above_zero=above_zero, below=below):
            return None if value is None else float(cast(float, value))
        low = "above 0" if above_zero else "from 0"
        limit = "" if below == math.inf else f" and below {below:g}"
        self.wrong(key, f"the value must be a number {low}{limit}", f"Use e.g. {key}={'1e-4' if above_zero else '0.1'}")
        return None

    def switch(self, key: str) -> bool | None:
        """Return a boolean, or None as `read_int`. Like DeepSpeed, accept it also as text."""
        value = self._raw_value(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is None or isinstance(value, bool):
            return value
        self.wrong(key, "the value must be true or false", "Write true or false")
        return None

    def choice(self, key: str, known: Sequence[str]) -> str | None:
        """Return the choice that the value equals, ignoring case, or None as `read_int`."""
        value = self._raw_value(key)
        if value is None:
            return None
        names = {name.lower(): name for name in known}
        if isinstance(value, str) and value.lower() in names:
            return names[value.lower()]
        hint = did_you_mean(value, known).strip() if isinstance(value, str) else ""
        self.wrong(key, f"DeepSpeed knows {', '.join(known[:12])}", hint or f"Use {known[0]}")
        return None

    def _raw_value(self, key: str) -> object:
        value = self.values.get(key)
        if value == AUTO:
            self.leave_open(key)
            return None
        return value


def _number_in_quotes(value: object) -> object:
    if not isinstance(value, str) or len(value) > 40 or not re.fullmatch(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", value):
        return value
    return int(value) if value.isdecimal() else float(value)


def is_number(value: object, *, above_zero: bool = False, below: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return False
    return (value > 0 if above_zero else value >= 0) and value < below


def default_text(target: str) -> str:
    """Return Weft's default value of a setting or of a field of the plan, as text."""
    if target.startswith("plan."):
        return str(getattr(Plan(), target.removeprefix("plan.")))
    node: object = RunConfig()
    for part in target.split("."):
        node = getattr(node, part)
    return "worked out from the other settings" if node is None else number_text(node)


def number_text(value: object) -> str:
    """Return a number in its usual notation, such as 2e8 instead of 200000000.0, and other values as TOML."""
    if isinstance(value, float):
        short = f"{value:g}"
        text = short if float(short) == value else repr(value)
        return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    if isinstance(value, list | tuple):
        return f"[{', '.join(number_text(item) for item in cast(list[object], value))}]"
    return shown(value)


def value_text(value: object) -> str:
    """Return a value of the file for an outcome or an error: on one line, and short."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{...}" if value else "{}"
    shown_whole = number_text(value)
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown_whole)
    return text if len(text) <= 40 else f"{text[:37]}..."
