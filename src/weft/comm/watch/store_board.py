"""A board in the store that the ranks met at: each leaves a small report there, and the first reads them all.

A report costs its sender one request. The first rank alone asks for as many words as there are ranks, in a few
requests. A thread of figures uses it, with a connection of its own: training's collectives are left alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from weft.comm.private_torch import connect_store
from weft.private_torch import Store

_TIMEOUT = datetime.timedelta(seconds=5)
_PREFIX = "weft/figures/"
#: Words that are asked for at once.
_AT_ONCE = 1024


class StoreBoard:
    """One rank's end of the board.

    Args:
        rank: this one.
        number: of all ranks.
        open_store: gives a connection of the caller's own; None: one to the ranks' store.
    """

    def __init__(self, rank: int, number: int, open_store: Callable[[], Store] | None = None):
        self._rank, self._number = rank, number
        self._open_store = open_store or (lambda: connect_store(_TIMEOUT))
        self._store: Store | None = None
        self._are_there = False

    def post(self, text: str) -> None:
        """Leave this rank's report in the place of the one before."""
        self._open().set(f"{_PREFIX}{self._rank}", text)

    def read(self) -> Sequence[str]:
        """Return the newest report of every rank, "" for one that left none."""
        store = self._open()
        untyped: Any = store
        keys = [f"{_PREFIX}{rank}" for rank in range(self._number)]
        if not self._are_there:
            # A word that is not there would be waited for. Whoever has left one keeps it.
            for key in keys:
                store.compare_set(key, "", "")
            self._are_there = True
        found: list[bytes] = []
        for first in range(0, self._number, _AT_ONCE):
            found += untyped.multi_get(keys[first : first + _AT_ONCE])
        return [word.decode(errors="replace") for word in found]

    def _open(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store
