"""What gradients and weights cost as the wires that `reduce`, `compress` and `gather` name: on the way, in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.planner.space.columns import Columns
from weft.spec import COMPRESSES, GATHERS, WIRES, WireSpec, wire_spec
from weft.spec.plan import PLAN_FIELDS

Array = NDArray[np.float64]
#: The ways of gradients: to the ranks that divide them, and over dp_replicate.
Way = Literal["shard", "replicas"]
#: The code of sync=diloco in columns.
_DILOCO = PLAN_FIELDS["sync"].kind.encode("diloco:1")[0]


def wire_bytes(columns: Columns, numel: Array, own_bytes: Array | float, way: Way = "shard") -> Array:
    """Return bytes on the wire of so many gradients.

    Args:
        columns: the plans.
        numel: how many.
        own_bytes: of each where nothing is encoded.
        way: which one they go.
    """

    def of(wire: WireSpec) -> Array:
        return wire.num_bytes(numel, own_bytes)

    plain, encoded = _of_rows(columns, of), _of_outer(columns, of)
    return np.where(_is_outer(columns, way), encoded, plain)


def replica_bytes(columns: Columns, numel: Array, own_bytes: float) -> Array:
    """Return bytes on the wire over dp_replicate: of gradients, or of weights where replicas meet rarely.

    Args:
        columns: the plans.
        numel: how many.
        own_bytes: of each gradient where nothing is encoded; weights are masters, of 4 bytes.
    """
    encoded = _of_outer(columns, lambda wire: wire.num_bytes(numel, 4.0))
    weights = np.where(columns.compress > 0, encoded, numel * 4.0)
    return np.where(columns.sync > 0, weights, wire_bytes(columns, numel, own_bytes, "replicas"))


def apart_bytes(columns: Columns) -> Array:
    """Return bytes per master that lies beside the weight which differences bring to it, where both are fp32."""
    return np.where(columns.gather == GATHERS.index("diff4"), 4.0, 0.0)


def outer_bytes(columns: Columns) -> Array:
    """Return bytes per master that replicas keep which meet rarely: the anchor, and the momentum of an outer step.

    Where they meet in fragments, also what one of these was when it left, and what travels.
    """
    under_way = np.where(columns.sync_fragments > 0, 8.0 / np.maximum(1, columns.sync_fragments), 0.0)
    return np.where(columns.sync == 0, 0.0, np.where(columns.sync == _DILOCO, 8.0, 4.0) + under_way)


def weight_bytes(columns: Columns, numel: Array, own_bytes: Array | float, *, in_layers: bool = True) -> Array:
    """Return bytes on the wire of so many weights that are gathered, by the plans' `gather`.

    Args:
        columns: the plans.
        numel: how many.
        own_bytes: of each where nothing is encoded.
        in_layers: whether they are of linear layers in blocks, which alone travel in fp8.
    """
    found = numel * own_bytes
    for code in _codes(columns.gather):
        if code and (in_layers or GATHERS[code] != "fp8"):
            found = np.where(columns.gather == code, wire_spec(GATHERS[code]).num_bytes(numel), found)
    return found


def copy_bytes(columns: Columns, own_bytes: float) -> Array:
    """Bytes per gradient of the encoded copy beside what is on its way."""

    def of(wire: WireSpec) -> float:
        return wire.copy_bytes(own_bytes)

    outer = np.where(columns.compress > 0, _of_outer(columns, of), 0.0)
    return np.maximum(_of_rows(columns, of), outer)


def state_bytes(columns: Columns) -> Array:
    """Bytes per gradient of what ranks that send them carry from step to step, the last step's beside the next."""
    sends = columns.dp_replicate * columns.dp_shard * columns.cp > 1
    plain = np.where(sends, 2 * _of_rows(columns, lambda wire: wire.state_bytes), 0.0)
    # Over dp_replicate a rank sends its own part of the sums alone.
    divides = (columns.dp_replicate > 1) & (columns.zero > 0)
    part = np.where(divides, columns.dp_shard * columns.cp, 1)
    outer = 2 * _of_outer(columns, lambda wire: wire.state_bytes) / part
    return plain + np.where((columns.compress > 0) & sends, outer, 0.0)


def low_rank(columns: Columns) -> Array:
    """Return the rank of the matrices that `compress` sends in place of larger ones; 0 where it encodes by value."""
    return _of_outer(columns, lambda wire: np.full(len(columns), float(wire.rank)))


def _is_outer(columns: Columns, way: Way) -> NDArray[np.bool_]:
    """Rows whose `compress` is for this way."""
    return (columns.compress > 0) & ((columns.dp_replicate > 1) == (way == "replicas"))


def _codes(column: NDArray[Any]) -> list[int]:
    """The codes in a column. Nearly always it is one: then nothing is sorted."""
    if len(column) and (column == column[0]).all():
        return [int(column[0])]
    return np.flatnonzero(np.bincount(column)).tolist()


def _of_rows(columns: Columns, of: Callable[[WireSpec], Array | float]) -> Array:
    """Each row's figure, by the wire of its plan."""
    found = np.zeros(len(columns))
    for code in _codes(columns.reduce):
        found = np.where(columns.reduce == code, of(wire_spec(WIRES[code])), found)
    return found


def _of_outer(columns: Columns, of: Callable[[WireSpec], Array | float]) -> Array:
    """The same of `compress`; 0 where there is none."""
    found = np.zeros(len(columns))
    for code in _codes(columns.compress):
        if code:
            found = np.where(columns.compress == code, of(wire_spec(COMPRESSES[code])), found)
    return found
