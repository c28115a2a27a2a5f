"""What gradients cost as the wire that a plan's `reduce` names: on the way, and in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weft.planner.space.columns import Columns
from weft.spec import WIRES, WireSpec, wire_spec

Array = NDArray[np.float64]


def wire_bytes(columns: Columns, numel: Array, own_bytes: float) -> Array:
    """Bytes on the wire of so many gradients, which have `own_bytes` each where nothing is encoded."""
    return _of_rows(columns, lambda wire: wire.num_bytes(numel, own_bytes))


def copy_bytes(columns: Columns, own_bytes: float) -> Array:
    """Bytes per gradient of the encoded copy beside what is on its way."""
    return _of_rows(columns, lambda wire: wire.copy_bytes(own_bytes))


def state_bytes(columns: Columns) -> Array:
    """Bytes per gradient of what ranks that send them carry from step to step, the last step's beside the next."""
    sends = columns.dp_replicate * columns.dp_shard * columns.cp > 1
    return np.where(sends, 2 * _of_rows(columns, lambda wire: wire.state_bytes), 0.0)


def _of_rows(columns: Columns, of: Callable[[WireSpec], Array | float]) -> Array:
    """Each row's figure, by the wire of its plan."""
    found = np.zeros(len(columns))
    for code in np.unique(columns.reduce):
        found = np.where(columns.reduce == code, of(wire_spec(WIRES[int(code)])), found)
    return found
