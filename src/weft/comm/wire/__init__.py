"""What travels in place of a tensor: wires, and what they carry from step to step."""

from __future__ import annotations

from weft.comm.wire.coded import gather_coded, sum_coded
from weft.comm.wire.coder import Coder, Coders, chance_key
from weft.comm.wire.low_rank import BASIS, LowRank, Matrix, matrices_of
from weft.comm.wire.row_codes import RowCodes, RowStretch, power_scale
from weft.comm.wire.wire import State, Wire, find_wire

__all__ = [
    "BASIS",
    "Coder",
    "Coders",
    "LowRank",
    "Matrix",
    "RowCodes",
    "RowStretch",
    "State",
    "chance_key",
    "Wire",
    "find_wire",
    "gather_coded",
    "matrices_of",
    "power_scale",
    "sum_coded",
]
