"""Which transport each call of an axis takes by measurement, and how long that takes there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What was measured of axes of one layout, so that it can be told to other ranks as JSON.

    best: operation -> (bytes from which on, transport), in rising order of bytes. laws: operation -> transport ->
    coefficients of 1, sqrt(bytes), bytes, in seconds. gains: for people, where a way is not the fixed one.
    """

    best: Mapping[str, Sequence[tuple[int, str]]]
    laws: Mapping[str, Mapping[str, Sequence[float]]]
    gains: Sequence[str]

    def transport(self, op: str, num_bytes: int, fixed: str) -> str:
        """Return the transport of a call.

        Args:
            op: the operation.
            num_bytes: of the whole buffer, of which shards are parts.
            fixed: the transport of what was not measured.
        """
        found = fixed
        for least, transport in self.best.get(op, ()):
            found = transport if num_bytes >= least else found
        return found

    def seconds(self, op: str, num_bytes: int, transport: str) -> float:
        """Return what a call takes by measurement; 0 where that was not measured.

        Args:
            op: the operation.
            num_bytes: of the whole buffer.
            transport: that carries it.
        """
        law = self.laws.get(op, {}).get(transport)
        return law[0] + law[1] * math.sqrt(num_bytes) + law[2] * num_bytes if law else 0.0
