"""What ranks tell each other through the store they met at: for a thread beside training, whose collectives it leaves
alone.

A word costs its sender one request, whatever the number of ranks; the first rank, which alone needs all words, reads
them in a few. A collective of a second group would do too, but that group holds a socket for every other rank.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from weft.comm.private_torch import connect_store, default_store
from weft.errors import CheckpointError, CommError, WeftError
from weft.private_torch import Store

#: How long (s) one request waits for words that are not there yet; then it is made again, without an end.
_SLICE = datetime.timedelta(seconds=60)
#: Words that are asked for at once.
_AT_ONCE = 1024


class StoreTalk:
    """One conversation of all ranks. All make it, and then call the same methods in the same order, from one thread.

    A rank that ends leaves the others waiting; what ends the job ends them too. Methods raise CommError where the store
    is lost.

    Args:
        rank: this one.
        number: of all ranks.
        open_store: gives a connection of the thread's own; None: one to the ranks' store.
    """

    def __init__(self, rank: int, number: int, open_store: Callable[[], Store] | None = None):
        """open_store: gives a connection of the thread's own; that to the ranks' store unless another is given."""
        self._rank, self._number = rank, number
        self._open_store = open_store or (lambda: connect_store(_SLICE))
        self._store: Store | None = None
        self._turn = 0
        self._spent: list[str] = []
        # Conversations of one process after each other do not read each other's words.
        store = open_store() if open_store else default_store()
        self._prefix = f"weft/talk/{store.add(f'weft/talk/{rank}', 1)}"

    def gather(self, record: bytes) -> list[bytes]:
        """Return the bytes of every rank in their order, on the first rank; [] on the others, who do not wait."""
        turn = self._next()
        with self._told_if_lost() as store:
            if self._rank:
                _put(store, f"{turn}/{self._rank}", record)
                return []
            keys = [f"{turn}/{rank}" for rank in range(1, self._number)]
            found = [record, *self._read(store, keys)]
            # Who has spoken here has heard everything that was said before.
            for key in (*keys, *self._spent):
                store.delete_key(key)
            self._spent.clear()
        return found

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Return the JSON value that the first rank's `act` returns, on all ranks.

        Raises:
            CheckpointError: on the other ranks, with the text of what `act` raised on the first.
        """
        turn = self._next()
        if self._rank:
            with self._told_if_lost() as store:
                said = json.loads(self._read(store, [turn])[0])
            if "error" in said:
                raise CheckpointError(said["error"])
            return said["value"]
        try:
            said = {"value": act()}
        except BaseException as error:
            told = str(error) if isinstance(error, WeftError) else f"rank 0: {type(error).__name__}: {error}"
            self._say(turn, {"error": told})
            raise
        self._say(turn, said)
        return said["value"]

    def _say(self, key: str, said: dict[str, Any]) -> None:
        with self._told_if_lost() as store:
            _put(store, key, json.dumps(said).encode())
            self._spent.append(key)

    def _next(self) -> str:
        self._turn += 1
        return f"{self._prefix}/{self._turn}"

    def _read(self, store: Store, keys: Sequence[str]) -> list[bytes]:
        """Wait for words as long as it takes."""
        untyped: Any = store
        found: list[bytes] = []
        for first in range(0, len(keys), _AT_ONCE):
            some = list(keys[first : first + _AT_ONCE])
            while not _are_there(store, some):
                pass
            found += untyped.multi_get(some)
        return found

    @contextmanager
    def _told_if_lost(self) -> Generator[Store]:
        try:
            if self._store is None:
                self._store = self._open_store()
            yield self._store
        except (dist.DistError, RuntimeError) as error:
            raise CommError(
                f"rank {self._rank} of {self._number} lost the other ranks while a checkpoint was saved ({error}). "
                "The log of one of them says why."
            ) from error


def _are_there(store: Store, keys: list[str]) -> bool:
    """Wait for a while; whether all words are there."""
    try:
        store.wait(keys, _SLICE)
    except dist.DistStoreError as error:
        if "timeout" in str(error).lower():
            return False
        raise
    return True


def _put(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # pyright: ignore[reportArgumentType]  # bytes are taken too; the stub says str
