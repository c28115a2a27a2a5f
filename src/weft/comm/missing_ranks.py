"""Ranks that have not reached the rendezvous store, and the messages for the user about them."""

from __future__ import annotations

import contextlib
import datetime
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from weft import env
from weft.private_torch import Store
from weft.units import format_seconds

#: Time (s) after which a rank reports which ranks it waits for.
NOTICE_S = 5.0
_ASK = datetime.timedelta(seconds=10)
_MOST_NAMED, _MOST_ASKED = 8, 4096
_VARIABLES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"


def note_arrival(store: Store, rank: int) -> None:
    """Record in the store that a rank has reached it."""
    store.set(f"weft/arrived/{rank}", "1")


def missing_ranks(store: Store, world_size: int) -> list[int]:
    """Return the ranks that have not reached the store, among the first 4096, or [] if the store does not answer."""
    with contextlib.suppress(RuntimeError, OSError):
        return [rank for rank in range(min(world_size, _MOST_ASKED)) if not store.check([f"weft/arrived/{rank}"])]
    return []


def wait_for_host(place: env.RankEnv, limit_s: float) -> None:
    """Wait until rank 0's store accepts connections. Raises OSError if it cannot be reached in time."""
    end, pause_s = time.monotonic() + limit_s, 0.05
    while True:
        try:
            with socket.create_connection((place.master_addr, place.master_port), timeout=min(5.0, limit_s)):
                return
        except OSError as error:
            if isinstance(error, socket.gaierror):
                error = OSError(f"the name could not be resolved ({error.strerror})")
            if time.monotonic() + pause_s > end:
                raise TimeoutError(f"timed out: {error}") from error
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)


@contextmanager
def noticed(place: env.RankEnv, store: Store | None, tell: Callable[[str], None] | None) -> Generator[None]:
    """Print once which ranks are missing if the block takes more than 5 s. Does nothing under `weft train`.

    Args:
        store: the rendezvous store, or None until this rank is connected to it.
        tell: called with the line, or None to write it to stderr.
    """
    if place.starter == "weft":  # its launcher watches the processes of all ranks
        yield
        return

    def notice() -> None:
        missing = [0] if store is None else missing_ranks(_own(store), place.world_size)
        if missing and not over.is_set():
            text = (
                f"rank {place.rank} of {place.world_size} waits for {_named(missing)} at "
                f"{place.master_addr}:{place.master_port}. {remedy(place)}"
            )
            if tell is not None:
                tell(text)
            else:
                print(f"weft: {text}", file=sys.stderr, flush=True)

    over = threading.Event()
    timer = threading.Timer(NOTICE_S, notice)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        over.set()
        timer.cancel()


def connection_error(place: env.RankEnv, store: Store | None, error: Exception, limit_s: float) -> str:
    """Return an error sentence for ranks that could not connect. store: None if this rank could not reach it."""
    text = " ".join(str(error).split())
    address = f"{place.master_addr}:{place.master_port}"
    if "in use" in text.lower() or "EADDRINUSE" in text:
        return (
            f"MASTER_PORT={place.master_port}: another program listens at {address} already. Choose another port for "
            f"all ranks, or end that program. {remedy(place)}"
        )
    if "could not be resolved" in text.lower() or "name or service" in text.lower() or "gai error" in text.lower():
        return f"MASTER_ADDR={place.master_addr}: no machine of this name is known here. {remedy(place)}"
    missing = [0] if store is None and place.rank else missing_ranks(store, place.world_size) if store else []
    is_late = any(word in text.lower() for word in ("timed out", "timeout"))
    why = f"within {format_seconds(limit_s)}" if is_late or not text else f"({text[:300]})"
    whom = _named(missing) if missing else "the others"
    return f"rank {place.rank} of {place.world_size} could not connect to {whom} at {address} {why}. {remedy(place)}"


def remedy(place: env.RankEnv) -> str:
    if place.starter == "torchrun" and not env.get("TORCHELASTIC_RUN_ID"):
        return f"Start all ranks, or type `unset {_VARIABLES}` if this command is to start its own."
    return "Check that every rank was started and can reach that address; the log of a missing one has the reason."


def _own(store: Store) -> Store:
    """Return a separate store connection for this thread. The main thread may be blocked on the other one."""
    untyped: Any = store
    own: Store = untyped.clone()
    own.set_timeout(_ASK)
    return own


def _named(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as 'rank 3' or 'ranks 1, 2 and 4 to 7'."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    names = [f"{one[0]} to {one[-1]}" if len(one) > 1 else f"{one[0]}" for one in spans]
    more = f" and {len(names) - _MOST_NAMED} more groups" if len(names) > _MOST_NAMED else ""
    return f"rank{'s' if len(spans) > 1 or len(spans[0]) > 1 else ''} {', '.join(names[:_MOST_NAMED])}{more}"
