"""Rows that samples bring to tensors whose rows are no samples, such as patches of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rows_of(samples: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Tell how many rows a sample brings to tensors that a collate function concatenates, such as patches of images.

    One tuple for each tensor, array or list of the samples whose length is not 1 for all, without repetitions; a
    sample without it brings none.
    """
    found: dict[tuple[int, ...], None] = {}
    for names in _columns(samples):
        counts = tuple(_length(_at(sample, names)) for sample in samples)
        if any(count != 1 for count in counts) and any(counts):
            found[counts] = None
    return tuple(found)


def _columns(samples: Sequence[Any]) -> list[Any]:
    """Names or places of what samples hold; None for a sample that is one thing."""
    names: dict[Any, None] = {}
    for sample in samples:
        if isinstance(sample, Mapping):
            names.update(dict.fromkeys(sample))
        elif isinstance(sample, tuple | list):
            names.update(dict.fromkeys(range(len(sample))))
        else:
            names[None] = None
    return list(names)


def _at(sample: Any, name: Any) -> Any:
    if isinstance(sample, Mapping):
        return sample.get(name)
    if isinstance(sample, tuple | list):
        return sample[name] if isinstance(name, int) and name < len(sample) else None
    return sample if name is None else None


def _length(value: Any) -> int:
    """Rows of a value: dim 0 of a tensor or array, entries of a list."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    return len(value) if isinstance(value, list) else 0
