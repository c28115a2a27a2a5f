"""Pictures that are asked for many at a time, and decoded by processes beside the rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from weft.data.media.decode_pool import DecodePool, Key
from weft.data.media.pictures import Pictures

_MOST_WORKERS = 8


class DecodedAhead(Pictures):
    """Pictures of a source, decoded by processes that start when many are first asked for.

    Args:
        pictures: which, and how they are seen.
        workers: processes; 0: the rank decodes.
    """

    def __init__(self, pictures: Pictures, workers: int):
        super().__init__(pictures.source, pictures.look, pictures.seed)
        self.workers = workers
        self._pool: DecodePool | None = None
        self._lock = Lock()

    def many(self, wanted: Sequence[Key], soon: Sequence[Key] = ()) -> list[tuple[NDArray[np.uint8], int]]:
        """Return samples, and have others decoded while they are used.

        Args:
            wanted: (epoch, index) of each.
            soon: what is asked for next.

        Raises:
            DataError: for a picture that cannot be decoded.
        """
        if not self.workers:
            return [self.in_epoch(*key) for key in wanted]
        with self._lock:
            if self._pool is None:
                self._pool = DecodePool(self, self.workers, len(wanted) + len(soon))
            pixels = self._pool.many(wanted, soon)
        return [(one, self.source.label(index)) for one, (_, index) in zip(pixels, wanted, strict=True)]

    def pids(self) -> list[int]:
        """Return the processes that decode now."""
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        """End the processes; the next call starts others."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.close()


def usual_workers(num_ranks: int) -> int:
    """Return how many processes decode for each rank of a machine: one for each core that is left, at most 8.

    num_ranks: on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(_MOST_WORKERS, cores // num_ranks - 1))
