"""The one door for communication: every collective names its axis and is counted."""

from weft.comm.collectives import all_reduce, barrier, broadcast
from weft.comm.ledger import Ledger

__all__ = ["Ledger", "all_reduce", "barrier", "broadcast"]
