"""A thread of each rank that notices when nothing moves any more, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "StoreBoard",
    "WARN_AFTER_S",
    "Watch",
    "hang_event",
    "run_once",
]

if TYPE_CHECKING:
    from weft.comm.watch.first_rank import run_once
    from weft.comm.watch.hang_watch import WARN_AFTER_S, Watch
    from weft.comm.watch.standing import hang_event
    from weft.comm.watch.store_board import StoreBoard

__getattr__ = loads(
    __name__,
    {
        "StoreBoard": ".store_board",
        "WARN_AFTER_S": ".hang_watch",
        "Watch": ".hang_watch",
        "hang_event": ".standing",
        "run_once": ".first_rank",
    },
)
