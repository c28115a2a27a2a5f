"""JSON with exact round trips: no lost digits, no NaN that other readers reject, no repeated keys.

A float that JSON cannot represent is written as {"$float": "nan"} (or "inf", "-inf") and read back as that float.
Tuples are read back as lists.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from weft.errors import CheckpointError

#: Key of the object that replaces inf or NaN.
_TAG = "$float"
_NUMBER_LIST = re.compile(r"\[\n\s*((?:-?[0-9.e+-]+,?\s+)+)\]")
#: Maximum nesting: more than any valid state has, and well below Python's recursion limit.
_MAX_DEPTH = 64


def encode(value: object, name: str) -> bytes:
    """Return `value` as ASCII JSON.

    Raises CheckpointError if a value would not survive the round trip. The message names its key.
    """
    text = json.dumps(_plain(value, name, 0), allow_nan=False, indent=1)
    # A raw line break is never inside a JSON string, so this joins only the lines of lists of numbers.
    return _NUMBER_LIST.sub(lambda match: "[" + " ".join(match.group(1).split()) + "]", text).encode() + b"\n"


def decode(text: bytes, name: str) -> Any:
    """Return the value of a text from `encode`. Raises CheckpointError if the text is not strict JSON."""
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON ({error})") from error


def _plain(value: object, name: str, depth: int) -> object:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{name}: nested deeper than {_MAX_DEPTH} levels. Store a flatter value.")
    if value is None or isinstance(value, bool | int | str):
        # A subclass (an enum, a numpy float) would be read back as its base class.
        if type(value) not in (type(None), bool, int, str):
            raise CheckpointError(f"{name}: a {type(value).__name__} cannot be written as JSON. Store a plain value.")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: repr(value)}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{position}]", depth + 1) for position, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, name): _plain(item, f"{name}.{key}", depth + 1) for key, item in value.items()}
    raise CheckpointError(
        f"{name}: a {type(value).__name__} cannot be written as JSON."
        " Store numbers, text, lists and dicts; tensors belong in `tensors`."
    )


def _key(key: object, name: str) -> str:
    if type(key) is not str:
        raise CheckpointError(f"{name}: the key {key!r} is not text, and JSON allows only text keys. Use str({key!r}).")
    if key == _TAG:
        raise CheckpointError(f"{name}: the key '{_TAG}' is reserved by the format. Rename it.")
    return key


def _object(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0] == _TAG:
        if pairs[0][1] not in ("nan", "inf", "-inf"):
            raise ValueError(f"{_TAG} is {pairs[0][1]!r}")
        return float(pairs[0][1])
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is out of range")
    return number
