"""Limits on guesses of the page's token: by address, and over all addresses together."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

#: Wrong tokens that an address may show before it has to wait, the first wait (s), and the longest.
_FREE, _FIRST_WAIT_S, _LONGEST_WAIT_S = 5, 1.0, 60.0
#: Wrong tokens of all addresses together within so many seconds.
_OF_ALL, _WINDOW_S = 100, 60.0
#: An address that was wrong is remembered for so long (s), and at most so many of them.
_REMEMBERED_S, _MOST_ADDRESSES = 900.0, 1000


@dataclass(slots=True)
class _Wrong:
    count: int = 0
    last: float = -math.inf


class GuessLimit:
    """Counts wrong tokens. While an address has to wait, its tokens are not even compared.

    Args:
        clock: seconds; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._wrong: dict[str, _Wrong] = {}
        self._of_all: deque[float] = deque(maxlen=_OF_ALL)

    def wait_s(self, address: str) -> float:
        """Return how long this address has to wait before its next guess, 0 if it need not."""
        now, known = self._clock(), self._wrong.get(_network(address))
        wait = self._of_all[0] + _WINDOW_S - now if len(self._of_all) == _OF_ALL else 0.0
        if known is not None and known.count >= _FREE and now - known.last < _REMEMBERED_S:
            pause = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(known.count - _FREE, 10))
            wait = max(wait, known.last + pause - now)
        return max(0.0, wait)

    def note(self, address: str, *, right: bool) -> None:
        """Record a guess.

        Args:
            address: of the visitor.
            right: True if it was the token.
        """
        key, now = _network(address), self._clock()
        known = self._wrong.pop(key, None)
        if right:
            return
        if known is None or now - known.last >= _REMEMBERED_S:
            known = _Wrong()
        known.count, known.last = known.count + 1, now
        while len(self._wrong) >= _MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]  # the one that was wrong longest ago
        self._wrong[key] = known
        self._of_all.append(now)


def _network(address: str) -> str:
    """Return what counts as one visitor: an IPv4 address, or the 64 bits of an IPv6 network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)
