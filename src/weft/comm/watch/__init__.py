"""A thread of each rank that notices when nothing moves any more, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "StoreBoard",
    "StoreKey",
    "WARN_AFTER_S",
    "Watch",
    "forged",
    "hang_event",
    "share_store_key",
    "store_key",
    "run_once",
]

if TYPE_CHECKING:
    from weft.comm.watch.first_rank import run_once
    from weft.comm.watch.hang_watch import WARN_AFTER_S, Watch
    from weft.comm.watch.signed_store import StoreKey, forged, share_store_key, store_key
    from weft.comm.watch.standing import hang_event
    from weft.comm.watch.store_board import StoreBoard

__getattr__ = loads(
    __name__,
    {
        "StoreBoard": ".store_board",
        "StoreKey": ".signed_store",
        "forged": ".signed_store",
        "WARN_AFTER_S": ".hang_watch",
        "Watch": ".hang_watch",
        "hang_event": ".standing",
        "share_store_key": ".signed_store",
        "store_key": ".signed_store",
        "run_once": ".first_rank",
    },
)
