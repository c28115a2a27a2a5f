"""Iteration over batches with one batch ahead (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from weft.errors import DataError


def with_next(
    batches: Iterable[Any], versions: Callable[[Any], Sequence[int]] = lambda batch: ()
) -> Iterator[tuple[Any, Any]]:
    """Yield each batch with the next one, or None behind the last. An error in a batch is raised in its turn.

    Args:
        batches: the batches.
        versions: returns numbers that writes to a batch change.

    Raises:
        DataError: if reading the next batch writes to this one, as a loader with one buffer does.
    """
    iterator, end = iter(batches), object()
    batch = next(iterator, end)
    while batch is not end:
        following, error, before = end, None, versions(batch)
        try:
            following = next(iterator, end)
        except Exception as found:
            error = found
        if before != versions(batch):
            raise DataError(
                "loader: it wrote the next batch into the memory of this one, and with_next holds both. Let collate_fn "
                "return new tensors."
            )
        yield batch, None if following is end else following
        if error is not None:
            raise error
        batch = following
