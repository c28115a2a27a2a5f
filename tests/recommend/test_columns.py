"""Columns of recommenders: their texts, values and errors."""

from __future__ import annotations

import datetime
import math

import pytest

from weft.data.table_data import TableRecord
from weft.errors import ConfigError, DataError
from weft.recommend.columns import (
    hashed,
    id_reader,
    id_text,
    id_texts,
    label_of,
    number_of,
    parse_column,
    parse_columns,
    time_of,
)

RECORD = TableRecord("a.jsonl", 3, {})
OPTION = "task.options.columns"


@pytest.mark.parametrize("text, error", [
    ("user", "user: it is not NAME=KIND, with a kind of number, id, ids, label, time. Write e.g. user=id."),
    ("user=idd", "user=idd: there is no kind 'idd'. Did you mean 'id'?"),
    ("user=id sise=3", "user=id sise=3: the kind id has no setting 'sise'. Did you mean 'size'?"),
    ("at=time log", "at=time log: the kind time has no setting 'log'. Leave it out."),
    ("user=id size=0", "user=id size=0: size=0: it is a whole number from 1. Write e.g. size=1000."),
    ("user=id size=9 hash=9", "user=id size=9 hash=9: ids are integers (size), hashed (hash) or a learned vocabulary "
     "(min). Give one of them."),
    ("user=id unknown=drop", "user=id unknown=drop: unknown=drop: unknown ids are mapped or refused. Write "
     "unknown=map."),
    ("rating=label>=x", "rating=label>=x: label>=x: it is a number. Write e.g. label>=4."),
])  # fmt: skip
def test_text_that_is_no_column_is_refused(text, error):
    with pytest.raises(ConfigError) as caught:
        parse_column(text)
    assert str(caught.value) == f"{OPTION}={error}"


def test_column_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError) as caught:
        parse_columns(["a.b=id", "a_b=number"])
    assert str(caught.value) == f"{OPTION}=a_b=number: two columns have the name 'a_b'. Give each column once."


def test_settings_are_parsed():
    column = parse_column("tags = ids min=5 most=20")
    assert (column.name, column.kind, column.min_count, column.most) == ("tags", "ids", 5, 20)
    assert (column.learns, column.maps_unknown, column.padding) == (True, True, None)
    assert parse_column("tags=ids").padding == 0
    assert parse_column("user=id size=9").num_rows(0) == 9
    assert parse_column("user=id hash=9 unknown=map").num_rows(0) == 10
    assert parse_column("user=id").num_rows(9) == 10


@pytest.mark.parametrize("value", [[7, "x y"], '[7, "x y"]', "7|x y", " 7.0|x y "])
def test_lists_of_all_formats_are_equal(value):
    column = parse_column("tags=ids")
    expected = ["7.0", "x y"] if value == " 7.0|x y " else ["7", "x y"]
    assert id_texts(RECORD, column, value) == expected


def test_ids_are_compared_as_text():
    column = parse_column("user=id")
    assert id_texts(RECORD, column, 7) == id_texts(RECORD, column, 7.0) == id_texts(RECORD, column, "7") == ["7"]
    assert id_texts(RECORD, parse_column("tags=ids"), "a b") == ["a", "b"]
    assert id_texts(RECORD, parse_column("tags=ids most=2"), ["a", "b", "c"]) == ["b", "c"]
    assert id_texts(RECORD, parse_column("tags=ids"), None) == []


def test_hash_is_stable():
    """The values are part of the format: another hash would move the rows of trained tables."""
    assert [hashed(text, 1000) for text in ("u1", "7", "ä")] == [130, 255, 504]


@pytest.mark.parametrize("column, text, error", [
    ("user=id", "u9", "the id 'u9', which the training records do not have. Leave the record out, or add unknown=map "
     "to "
     "the column."),
    ("user=id", "", "no id, which the training records do not have. Leave the record out, or add unknown=map to the "
     "column."),
    ("user=id hash=4", "", "no id. Leave the record out, or add unknown=map to the column."),
    ("user=id size=4", "4", "the id '4', and its ids are 0 to 3. Use a larger size, or add unknown=map to the column."),
    ("user=id size=4", "-1", "the id '-1', and its ids are 0 to 3. Use a larger size, or add unknown=map to "
     "the column."),
    ("user=id size=4", "x", "the id 'x', and its ids are 0 to 3. Use a larger size, or add unknown=map to the column."),
])  # fmt: skip
def test_unknown_ids_are_refused_or_mapped(column, text, error):
    with pytest.raises(DataError) as caught:
        id_reader(parse_column(column), {"u1": 1})(RECORD, text)
    assert str(caught.value) == f"a.jsonl, record 3: column 'user' holds {error}"
    mapped = parse_column(f"{column} unknown=map")
    assert id_reader(mapped, {"u1": 1})(RECORD, text) == (0 if mapped.learns else 4)


def test_numbers():
    assert number_of(RECORD, parse_column("a=number log"), "7") == math.log(8)
    assert number_of(RECORD, parse_column("a=number missing=2"), "") == 2.0
    with pytest.raises(DataError, match=r"record 3: column 'a' has no number. Leave the record out, or add missing=0"):
        number_of(RECORD, parse_column("a=number"), None)
    with pytest.raises(DataError, match=r"holds -2, and log needs more than -1. Leave log out."):
        number_of(RECORD, parse_column("a=number log"), -2)
    with pytest.raises(DataError, match=r'holds "x", and a number is needed.'):
        number_of(RECORD, parse_column("a=number"), "x")


def test_labels():
    assert [label_of(RECORD, parse_column("a=label>=4"), one) for one in ("3.5", 4)] == [0.0, 1.0]
    assert [label_of(RECORD, parse_column("a=label"), one) for one in (True, 0, "1")] == [1.0, 0.0, 1.0]
    with pytest.raises(DataError) as caught:
        label_of(RECORD, parse_column("a=label"), 3)
    assert str(caught.value) == (
        "a.jsonl, record 3: column 'a' holds 3, and a label is 0 or 1. Give a threshold, such as a=label>=4."
    )


def test_times():
    column, day = parse_column("at=time"), datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
    for value in (
        "2026-11-30",
        "2026-11-30T00:00:00+00:00",
        day,
        day.date(),
        day.replace(tzinfo=None),
        day.timestamp(),
    ):
        assert time_of(RECORD, column, value) == day.timestamp()
    with pytest.raises(DataError, match=r'holds "soon", and a time is a number or a date in ISO 8601.'):
        time_of(RECORD, column, "soon")


READ = {
    "id": lambda column, value: id_reader(column, {})(RECORD, id_text(RECORD, column, value)),
    "number": lambda column, value: number_of(RECORD, column, value),
    "label": lambda column, value: label_of(RECORD, column, value),
}


@pytest.mark.parametrize("kind, value, text", [
    ("number", 10**400, "and a number is needed"),
    ("label", 10**400, "and a number is needed"),
    ("id", "\ud800", "which is not Unicode text. Repair the file"),
    ("id size=9", "--5", "the id '--5', and its ids are 0 to 8"),
    ("id size=9", "1" * 5000, ", and its ids are 0 to 8"),
])  # fmt: skip
def test_values_that_python_cannot_convert_are_refused(kind, value, text):
    column = parse_column(f"x={kind}")
    with pytest.raises(DataError) as caught:
        READ[column.kind](column, value)
    assert text in str(caught.value)
