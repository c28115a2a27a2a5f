"""Reports in the ranks' store: each rank leaves a small one, and rank 0 reads them all.

A report costs its sender one request. Rank 0 alone asks for as many reports as there are ranks, in a few requests.
The thread that measures uses it, over a connection of its own, so that training's collectives are left alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from weft.comm.private_torch import connect_store
from weft.comm.watch.signed_store import StoreKey, store_key
from weft.private_torch import Store

_TIMEOUT = datetime.timedelta(seconds=5)
_PREFIX = "weft/figures/"
#: Reports per request.
_AT_ONCE = 1024


class StoreBoard:
    """One rank's end of the board. Reports are signed and numbered: others cannot write one, nor bring back an old one.

    Args:
        rank: this rank.
        number: number of ranks.
        open_store: opens a store connection; None connects to the ranks' store.
        key: signs the reports; None takes the key of the process group.
    """

    def __init__(
        self, rank: int, number: int, open_store: Callable[[], Store] | None = None, key: StoreKey | None = None
    ):
        self._rank, self._number = rank, number
        self._open_store = open_store or (lambda: connect_store(_TIMEOUT))
        self._key = key or store_key()
        self._store: Store | None = None
        self._are_there = False
        self._num_posted = 0
        self._newest: dict[int, tuple[int, str]] = {}

    def post(self, text: str) -> None:
        """Replace this rank's report."""
        self._num_posted += 1
        name = f"{_PREFIX}{self._rank}"
        stored = self._key.sign(name, f"{self._num_posted} {text}")
        self._open().set(name, stored)  # pyright: ignore[reportArgumentType]  # bytes are taken too

    def read(self) -> Sequence[str]:
        """Return the newest report of every rank, "" for a rank without one."""
        store = self._open()
        untyped: Any = store
        keys = [f"{_PREFIX}{rank}" for rank in range(self._number)]
        if not self._are_there:
            # A missing key would be waited for. A key that is there keeps its value.
            for key in keys:
                store.compare_set(key, "", "")
            self._are_there = True
        found: list[bytes] = []
        for first in range(0, self._number, _AT_ONCE):
            found += untyped.multi_get(keys[first : first + _AT_ONCE])
        for rank, stored in enumerate(found):
            self._take(rank, keys[rank], stored)
        return [self._newest.get(rank, (0, ""))[1] for rank in range(self._number)]

    def _take(self, rank: int, key: str, stored: bytes) -> None:
        """Keep a report if it is signed and newer than the one before."""
        text = self._key.opened(key, stored) if stored else None
        if text is None:
            return
        number, _, report = text.decode(errors="replace").partition(" ")
        if int(number) > self._newest.get(rank, (0, ""))[0]:
            self._newest[rank] = int(number), report

    def _open(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store
