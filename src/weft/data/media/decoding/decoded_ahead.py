"""Pictures and sound that are asked for many at a time, and decoded by processes beside the rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from weft.data.media.decoding.decode_pool import DecodePool, Key
from weft.data.media.decoding.decode_worker import Decodable
from weft.mesh.cores import cores_of_rank

_MOST_WORKERS = 8


class DecodedAhead:
    """Samples of a source, decoded by processes that start when many are first asked for.

    Args:
        samples: which, and what is made of them.
        workers: processes; 0: the rank decodes.
    """

    def __init__(self, samples: Decodable, workers: int):
        self.samples, self.workers = samples, workers
        self._pool: DecodePool | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.in_epoch(0, index)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return (self[index] for index in range(len(self)))

    def in_epoch(self, epoch: int, index: int) -> tuple[Any, Any]:
        """Return a sample as it is in an epoch: what is decoded, and what is learnt."""
        return self.samples.decoded(epoch, index), self.samples.learnt(index)

    def many(self, wanted: Sequence[Key], soon: Sequence[Key] = ()) -> list[tuple[Any, Any]]:
        """Return samples, and have others decoded while they are used.

        Args:
            wanted: (epoch, index) of each.
            soon: what is asked for next.

        Raises:
            DataError: for a sample that cannot be decoded.
        """
        if not self.workers:
            return [self.in_epoch(*key) for key in wanted]
        with self._lock:
            if self._pool is None:
                self._pool = DecodePool(self.samples, self.workers, len(wanted) + len(soon))
            made = self._pool.many(wanted, soon)
        return [(one, self.samples.learnt(index)) for one, (_, index) in zip(made, wanted, strict=True)]

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
    return max(0, min(_MOST_WORKERS, cores_of_rank(num_ranks) - 1))
