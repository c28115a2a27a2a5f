"""Columns of a recommender's records: their kinds in text form, and the values of each kind.

A column is `NAME=KIND SETTING ...`, such as "user=id min=5" or "rating=label>=4".
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.data.table_data import TableRecord
from weft.errors import ConfigError, Problem, did_you_mean

KINDS = ("number", "id", "ids", "label", "time")
#: Option of the task that lists the columns.
OPTION = "columns"
_NAME = re.compile(r"[^A-Za-z0-9_]")
_SETTINGS = {
    "number": ("log", "missing"),
    "id": ("size", "hash", "min", "unknown"),
    "ids": ("size", "hash", "min", "unknown", "most"),
    "label": (),
    "time": (),
}


@dataclass(frozen=True, slots=True)
class RecordColumn:
    """A column of the records.

    Attributes:
        name: name in the records.
        kind: one of KINDS.
        size: number of rows for integer ids, or of buckets for hashed ids; 0 for a vocabulary learned from the data.
        is_hashed: hash the text of an id into `size` buckets.
        min_count: ids of a learned vocabulary that occur less often share index 0 with unknown ids.
        maps_unknown: map unknown, missing and out-of-range ids instead of refusing them.
        most: maximum number of ids of a list; the last ones are kept. 0 for no maximum.
        at_least: label threshold; None for labels 0 and 1.
        is_log: numbers x become log(1 + x).
        missing: value of missing numbers; None refuses them.
    """

    name: str
    kind: str
    size: int = 0
    is_hashed: bool = False
    min_count: int = 1
    maps_unknown: bool = False
    most: int = 0
    at_least: float | None = None
    is_log: bool = False
    missing: float | None = None

    @property
    def module(self) -> str:
        """Name of the column's table in the model: letters, digits and underscores."""
        return _NAME.sub("_", self.name)

    @property
    def has_ids(self) -> bool:
        """True for the kinds id and ids."""
        return self.kind in ("id", "ids")

    @property
    def learns(self) -> bool:
        """True if the ids are a vocabulary learned from the training records."""
        return self.has_ids and not self.size

    @property
    def padding(self) -> int | None:
        """Index of a table's row that is never trained: the unknown id of a vocabulary without a minimum count."""
        return 0 if self.learns and self.min_count == 1 else None

    def num_rows(self, vocabulary_size: int) -> int:
        """Return the number of rows of the column's table.

        vocabulary_size: number of ids of a learned vocabulary; ignored for other columns.
        """
        return 1 + vocabulary_size if self.learns else self.size + self.maps_unknown


def parse_columns(texts: Sequence[str]) -> tuple[RecordColumn, ...]:
    """Parse the task option `columns`.

    Raises:
        ConfigError: for a text that is not a column, and for names that are used twice.
    """
    found = tuple(parse_column(text) for text in texts)
    names = [one.module for one in found]
    for number, one in enumerate(found):
        if one.module in names[:number]:
            raise _refused(texts[number], f"two columns have the name {one.module!r}. Give each column once")
    return found


def parse_column(text: str) -> RecordColumn:
    """Parse one column, such as "user=id min=5".

    Raises:
        ConfigError: if the text is not a column.
    """
    name, equals, rest = text.partition("=")
    words = rest.split()
    if not equals or not name.strip() or not words:
        raise _refused(text, f"it is not NAME=KIND, with a kind of {', '.join(KINDS)}. Write e.g. user=id")
    kind, at_least = words[0], None
    if kind.startswith("label>="):
        kind, at_least = "label", _number(text, "label>=", kind.removeprefix("label>="))
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f" Use {', '.join(KINDS)}."
        raise _refused(text, f"there is no kind {kind!r}.{hint}")
    settings = dict(_setting(text, kind, word) for word in words[1:])
    return _checked(text, name.strip(), kind, at_least, settings)


def _setting(text: str, kind: str, word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    allowed = _SETTINGS[kind]
    if key not in allowed:
        hint = did_you_mean(key, allowed) or (f" Use {', '.join(allowed)}." if allowed else " Leave it out.")
        raise _refused(text, f"the kind {kind} has no setting {key!r}.{hint}")
    return key, value


def _checked(text: str, name: str, kind: str, at_least: float | None, settings: Mapping[str, str]) -> RecordColumn:
    if {"size", "hash"} <= settings.keys() or ("min" in settings and {"size", "hash"} & settings.keys()):
        raise _refused(text, "ids are integers (size), hashed (hash) or a learned vocabulary (min). Give one of them")
    if settings.get("unknown", "map") != "map":
        raise _refused(text, f"unknown={settings['unknown']}: unknown ids are mapped or refused. Write unknown=map")
    if settings.get("log", ""):
        raise _refused(text, "log has no value. Write log")
    missing = settings.get("missing")
    return RecordColumn(
        name,
        kind,
        size=_whole(text, settings, "size", _whole(text, settings, "hash", 0)),
        is_hashed="hash" in settings,
        min_count=_whole(text, settings, "min", 1),
        maps_unknown="unknown" in settings or "min" in settings,
        most=_whole(text, settings, "most", 0),
        at_least=at_least,
        is_log="log" in settings,
        missing=None if missing is None else _number(text, "missing", missing),
    )


def _whole(text: str, settings: Mapping[str, str], key: str, default: int) -> int:
    value = settings.get(key)
    if value is None:
        return default
    if not value.isdecimal() or not 1 <= int(value) < 2**62:
        raise _refused(text, f"{key}={value}: it is a whole number from 1. Write e.g. {key}=1000")
    return int(value)


def _number(text: str, key: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise _refused(text, f"{key}{value}: it is a number. Write e.g. {key}{'' if key.endswith('=') else '='}4")
    return found


def _refused(text: str, rule: str) -> ConfigError:
    end = "" if rule.endswith(("?", ".")) else "."
    return ConfigError([Problem(f"task.options.{OPTION}", f"task.options.{OPTION}={text}: {rule}{end}")])


# Values of records.


def id_text(record: TableRecord, column: RecordColumn, value: Any) -> str:
    """Return an id as text, so that 7, 7.0 and "7" are equal. Missing values are "".

    Raises:
        DataError: if the value is neither text nor an integer.
    """
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        record.refuse(f"column {column.name!r} holds {_shown(value)}, and an id is text or a whole number.")
    text = str(value).strip()
    try:
        text.encode()
    except UnicodeEncodeError:
        record.refuse(f"column {column.name!r} holds {_shown(text)}, which is not Unicode text. Repair the file.")
    return text


def id_texts(record: TableRecord, column: RecordColumn, value: Any) -> list[str]:
    """Return the ids of a record as text: one for the kind id, any number for ids.

    A list in a csv file is a JSON list, or text that is split at "|" if it contains one, else at white space.

    Raises:
        DataError: if the value is not a list of ids.
    """
    if column.kind == "id":
        return [id_text(record, column, value)]
    if value is None:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            record.refuse(f"column {column.name!r} holds {_shown(value)}, which is not a JSON list.")
    elif isinstance(value, str):
        value = value.split("|") if "|" in value else value.split()
    if not isinstance(value, list | tuple):
        value = [value]
    texts = [id_text(record, column, one) for one in value]
    texts = [one for one in texts if one]
    return texts[-column.most :] if column.most else texts


def hashed(text: str, size: int) -> int:
    """Return the bucket of an id: its 8-byte BLAKE2b digest as a little-endian integer, modulo `size`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % size


def id_reader(column: RecordColumn, vocabulary: Mapping[str, int]) -> Callable[[TableRecord, str], int]:
    """Return a function from the text of an id to its index.

    Indices of a learned vocabulary start at 1, and index 0 is the unknown id. Other columns that map unknown ids have
    an additional last row for them.

    vocabulary: index by text; used for learned vocabularies only.
    """

    def unknown(record: TableRecord, text: str, rule: str) -> int:
        if not column.maps_unknown:
            what = f"the id {text[:80]!r}" if text else "no id"
            record.refuse(f"column {column.name!r} holds {what}{rule} add unknown=map to the column.")
        return 0 if column.learns else column.size

    def learned(record: TableRecord, text: str) -> int:
        found = vocabulary.get(text)
        if found is None:
            return unknown(record, text, ", which the training records do not have. Leave the record out, or")
        return found

    def bucket(record: TableRecord, text: str) -> int:
        return hashed(text, column.size) if text else unknown(record, text, ". Leave the record out, or")

    def integer(record: TableRecord, text: str) -> int:
        # Longer texts are out of range, and Python converts no text of thousands of digits.
        number = int(text) if text.isdecimal() and len(text) < 100 else -1
        if 0 <= number < column.size:
            return number
        return unknown(record, text, f", and its ids are 0 to {column.size - 1}. Use a larger size, or")

    return learned if column.learns else bucket if column.is_hashed else integer


def number_of(record: TableRecord, column: RecordColumn, value: Any) -> float:
    """Return the value of a number column, after its logarithm.

    Raises:
        DataError: if it is missing or not a finite number, or if the logarithm does not exist.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        if column.missing is None:
            record.refuse(
                f"column {column.name!r} has no number. Leave the record out, or add missing=0 to the column."
            )
        found = column.missing
    else:
        found = _finite(record, column, value)
    if not column.is_log:
        return found
    if found <= -1:
        record.refuse(f"column {column.name!r} holds {found:g}, and log needs more than -1. Leave log out.")
    return math.log1p(found)


def label_of(record: TableRecord, column: RecordColumn, value: Any) -> float:
    """Return the label 0 or 1: the value itself, or the result of the comparison with the threshold.

    Raises:
        DataError: if it is not a number, or not 0 or 1 without a threshold.
    """
    found = _finite(record, column, float(value) if isinstance(value, bool) else value)
    if column.at_least is not None:
        return float(found >= column.at_least)
    if found not in (0.0, 1.0):
        record.refuse(
            f"column {column.name!r} holds {found:g}, and a label is 0 or 1. Give a threshold, such as "
            f"{column.name}=label>=4."
        )
    return found


def time_of(record: TableRecord, column: RecordColumn, value: Any) -> float:
    """Return a time as a number: numbers are unchanged, dates in ISO 8601 become seconds since 1970 (UTC).

    Raises:
        DataError: if the value is neither.
    """
    if isinstance(value, str) and not _is_number(value):
        try:
            value = datetime.datetime.fromisoformat(value.strip())
        except ValueError:
            record.refuse(
                f"column {column.name!r} holds {_shown(value)}, and a time is a number or a date in ISO 8601."
            )
    if isinstance(value, datetime.datetime):
        value = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        return value.timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC).timestamp()
    return _finite(record, column, value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _finite(record: TableRecord, column: RecordColumn, value: Any) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        record.refuse(f"column {column.name!r} holds {_shown(value)}, and a number is needed.")
    return found


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


@dataclass(frozen=True)
class ColumnSchema:
    """The columns that a model reads, by kind.

    Attributes:
        columns: all columns in order.
        user: names of the columns of the user, () for models without towers or sequences.
        item: names of the columns of the item; the first one is its id.
    """

    columns: tuple[RecordColumn, ...]
    user: tuple[str, ...] = ()
    item: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> tuple[RecordColumn, ...]:
        """Return the columns of a kind in order."""
        return tuple(one for one in self.columns if one.kind == kind)

    @cached_property
    def ids(self) -> tuple[RecordColumn, ...]:
        """Columns of kind id."""
        return self.of_kind("id")

    @cached_property
    def bags(self) -> tuple[RecordColumn, ...]:
        """Columns of kind ids."""
        return self.of_kind("ids")

    @cached_property
    def numbers(self) -> tuple[RecordColumn, ...]:
        """Columns of kind number."""
        return self.of_kind("number")

    @property
    def label(self) -> RecordColumn | None:
        """The label's column, or None."""
        return next(iter(self.of_kind("label")), None)

    @property
    def time(self) -> RecordColumn | None:
        """The time's column, or None."""
        return next(iter(self.of_kind("time")), None)

    def named(self, name: str) -> RecordColumn:
        """Return a column by its name.

        Raises:
            ConfigError: if no column has the name.
        """
        for one in self.columns:
            if one.name == name:
                return one
        rule = f"there is no column {name!r} in task.options.{OPTION}. Add it, or name another one"
        raise ConfigError([Problem("task.options", f"task.options: {rule}.")])
