"""The one door for communication: every collective names its axis and is counted."""

from __future__ import annotations

from weft.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from weft.comm.ledger import Ledger
from weft.comm.meet import join, sends_short_summands, transports
from weft.comm.pending import LateCopy, Pending
from weft.comm.store_talk import StoreTalk
from weft.comm.word import FirstWord

__all__ = [
    "FirstWord",
    "LateCopy",
    "Ledger",
    "Pending",
    "StoreTalk",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "join",
    "reduce_scatter",
    "sends_short_summands",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
    "transports",
]
