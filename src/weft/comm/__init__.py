"""The one door for communication: every collective names its axis and is counted."""

from weft.comm.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from weft.comm.ledger import Ledger

__all__ = ["Ledger", "all_gather", "all_reduce", "barrier", "broadcast", "reduce_scatter"]
