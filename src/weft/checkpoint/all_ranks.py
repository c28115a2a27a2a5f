"""What saving and loading ask of the other ranks, said by who calls: a checkpoint knows no collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _act(act: Callable[[], Any]) -> Any:
    return act()


def _only(record: bytes) -> list[bytes]:
    return [record]


@dataclass(frozen=True, slots=True)
class Together:
    """One rank among all, and what it may ask of the others.

    on_first: the JSON value that the first rank's function returns, on all ranks; what it raises, all raise. gather:
    the
    bytes of every rank in their order, on the first rank; others may get none.
    """

    rank: int = 0
    number: int = 1
    on_first: Callable[[Callable[[], Any]], Any] = _act
    gather: Callable[[bytes], list[bytes]] = _only


#: A process of its own.
ALONE = Together()
