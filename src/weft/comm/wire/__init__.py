"""What travels in place of a tensor: wires, and what they carry from step to step."""

from __future__ import annotations

from weft.comm.wire.coded import gather_coded, sum_coded
from weft.comm.wire.coder import Coder, Coders, chance_key
from weft.comm.wire.wire import State, Wire, find_wire

__all__ = [
    "Coder",
    "Coders",
    "State",
    "chance_key",
    "Wire",
    "find_wire",
    "gather_coded",
    "sum_coded",
]
