from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checkpoint.strict_json import decode, encode
from weft.errors import CheckpointError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


def same(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


@settings(max_examples=150, deadline=None)
@given(values)
def test_every_value_round_trips_and_is_standard_json(value):
    text = encode(value, "state")
    assert same(decode(text, "state"), value)
    json.loads(text, parse_constant=pytest.fail)


def test_lists_of_numbers_are_written_on_one_line():
    assert encode({"shape": [1, -2, 3e-5], "b": ["[\n1,\n2]"]}, "state").decode() == (
        '{\n "shape": [1, -2, 3e-05],\n "b": [\n  "[\\n1,\\n2]"\n ]\n}\n'
    )


def test_tuples_are_loaded_as_lists():
    assert decode(encode({"betas": (0.9, 0.95)}, "state"), "state") == {"betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": {1, 2}}]}, "state.a[1].b: a set cannot be written as JSON."),
        ({"a": np.float64(1)}, "state.a: a float64 cannot be written as JSON."),
        ({"a": {1: 2}}, "state.a: the key 1 is not text, and JSON allows only text keys. Use str(1)."),
        ({"$float": 1}, "state: the key '$float' is reserved by the format. Rename it."),
        ({"a": b"x"}, "state.a: a bytes cannot be written as JSON."),
    ],
)
def test_values_that_do_not_round_trip_are_rejected_by_name(value, message):
    with pytest.raises(CheckpointError) as caught:
        encode(value, "state")
    assert str(caught.value).startswith(message)


def test_endless_nesting_is_rejected():
    value: list[object] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="nested deeper than 64 levels"):
        encode(value, "state")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b"NaN", b'{"a": Infinity}', b'{"a": 1, "a": 2}', b"[" * 100_000, b"1e999",
        b'{"$float": "zero"}', b"9" * 5000, b'{"a": [1,]}',
    ],
)  # fmt: skip
def test_hostile_text_is_a_checkpoint_error(text):
    with pytest.raises(CheckpointError, match=r"^state\.json: not valid JSON \("):
        decode(text, "state.json")
