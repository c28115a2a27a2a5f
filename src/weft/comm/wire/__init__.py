"""What travels in place of a tensor: wires, and what they carry from step to step."""

from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.wire import State, Wire, find_wire

__all__ = ["Coder", "Coders", "State", "Wire", "find_wire"]
