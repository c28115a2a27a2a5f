"""Samples shared out: which of a global batch a rank reads, and which of those lie in which microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def share_out(count: int, num_parts: int) -> list[range]:
    """0 to count - 1 as so many runs in order: the first ones may have one more than the others, which may be empty."""
    size, rest = divmod(count, num_parts)
    starts = [part * size + min(part, rest) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def numbers_of(global_batch: int, dp_rank: int, dp_size: int, num_microbatches: int) -> list[range]:
    """Numbers in the global batch of one rank's samples, by microbatch: the rank has one run, cut into runs."""
    own = share_out(global_batch, dp_size)[dp_rank]
    return [range(own.start + part.start, own.start + part.stop) for part in share_out(len(own), num_microbatches)]


def rows_of(samples: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """How many rows each sample brings to tensors that a collate function concatenates, such as patches of images.

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
