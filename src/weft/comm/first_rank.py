"""Run an action on one rank instead of all, such as printing an error that each of them raised."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Callable

import torch.distributed as dist

from weft import env
from weft.comm.mesh import open_store
from weft.comm.private_torch import connect_store
from weft.errors import CommError
from weft.private_torch import Store

#: Time (s) to wait for the ranks' store, which may have ended with the rank that hosted it.
_WAIT_S = 2.0


def run_once(text: str, act: Callable[[], None]) -> None:
    """Run `act` on the first rank that calls this with a given text. Later ranks wait until it has finished.

    A rank also runs it if the ranks share no store, the store is unreachable, or the first rank has not finished 2 s
    after the call.
    """
    store = _shared_store()
    key = f"weft/once/{env.restart_count()}/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    try:
        is_first = store is None or store.add(key, 1) == 1
        if store is not None and not is_first:
            # If this rank exited here, the launcher would stop the first rank before it has acted.
            store.wait([f"{key}/done"], datetime.timedelta(seconds=_WAIT_S))
            return
    except (RuntimeError, OSError):
        is_first = True
    act()
    if store is not None and is_first:
        with contextlib.suppress(RuntimeError, OSError):
            store.set(f"{key}/done", "")


def _shared_store() -> Store | None:
    place = env.rank_env()
    if place is None or place.world_size == 1:
        return None
    try:
        if env.keeps_agent_store():
            return open_store(place, _WAIT_S)
        return connect_store(datetime.timedelta(seconds=_WAIT_S)) if dist.is_initialized() else None
    except (CommError, RuntimeError, OSError):
        return None
