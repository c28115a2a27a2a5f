"""What a sample is made of, in lines for people: text as it is, numbers where they are few, else how large they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

_MOST_VALUES, _MOST_TEXT = 16, 2000


def described(sample: Any, name: str = "") -> list[str]:
    """Return a line for each tensor, number and text of a sample.

    Of many values a digest says whether two samples are the same.

    Args:
        sample: nested in tuples, lists, mappings and dataclasses.
        name: what it is called.
    """
    parts = list(_parts(sample))
    if parts:
        return [line for key, part in parts for line in described(part, f"{name}{key}")]
    head = f"{name.lstrip('.')}: " if name else ""
    return [head + line for line in _words(sample)]


def _parts(sample: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(sample, Mapping):
        yield from ((f".{key}", part) for key, part in sample.items())
    elif isinstance(sample, tuple | list) and len(sample) <= _MOST_VALUES:
        yield from ((f"[{place}]", part) for place, part in enumerate(sample))
    elif is_dataclass(sample) and not isinstance(sample, type):
        yield from ((f".{field.name}", getattr(sample, field.name)) for field in fields(sample))


def _words(value: Any) -> list[str]:
    from weft.data import visible

    if isinstance(value, str):
        cut = f" ... ({len(value)} characters)" if len(value) > _MOST_TEXT else ""
        return [visible(line) for line in f"{value[:_MOST_TEXT]}{cut}".split("\n")]
    if value is None or isinstance(value, bool | int | float | np.number):
        return [str(value)]
    array = _array(value)
    if array is None:
        return [visible(repr(value))[:_MOST_TEXT]]
    kind, shape = str(array.dtype), "x".join(map(str, array.shape)) or "one value"
    if array.dtype.kind not in "biuf":
        return [f"{kind}, {shape}"]
    if array.size <= _MOST_VALUES:
        return [f"{array.tolist()} ({kind})"]
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()
    finite = array[np.isfinite(array)]
    odd = f", {array.size - finite.size} of {array.size} values are not finite" if finite.size < array.size else ""
    if not finite.size:
        return [f"{kind}, {shape}{odd}; digest {digest}"]
    low, high, mean = finite.min(), finite.max(), finite.mean(dtype=np.float64)
    return [f"{kind}, {shape}: {low:.5g} to {high:.5g}, mean {mean:.5g}{odd}; digest {digest}"]


def _array(value: Any) -> np.ndarray | None:
    """A tensor, an array, or a long list of numbers, as an array of a format that numpy has."""
    if callable(getattr(value, "detach", None)):
        value = value.detach().cpu()
        try:
            return value.numpy()
        except TypeError:  # bfloat16 and the like
            return value.float().numpy()
    if not isinstance(value, np.ndarray | list | tuple):
        return None
    try:
        return np.asarray(value)
    except ValueError:
        return None
