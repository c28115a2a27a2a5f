"""An axis whose calls take the transport that was measured to be the faster for their operation and size.

All ranks of the axis hold the same table, which its first rank told them, so they choose alike; and no transport
changes a bit of a result.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.comm.links import Link, Operation
from weft.planner.measured.link_times import Ways


class ChosenLink:
    """Carries each operation over one of several links.

    Args:
        links: by transport.
        fixed: the transport of what was not measured.
        size: ranks of the axis.
        ways: what was measured.
        reason: why links were chosen so, in words.
    """

    self_driven = False

    def __init__(self, links: Mapping[str, Link], fixed: str, size: int, ways: Ways, reason: str):
        self.reason = reason
        #: The transports that calls take, that of the fixed rule first.
        self.transport = " or ".join(dict.fromkeys([fixed, *(name for way in ways.best.values() for _, name in way)]))
        self._links, self._fixed, self._size, self._ways = links, fixed, size, ways
        self._carried: dict[Operation, Link] = {}
        #: What all calls so far should have taken by measurement, in seconds.
        self.planned_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return any(link.busy for link in self._links.values())

    def start(self, operation: Operation) -> None:
        """Begin the operation on its link."""
        num_bytes = operation.out.nbytes * (self._size if operation.kind == "reduce_scatter" else 1)
        transport = self._ways.transport(operation.kind, num_bytes, self._fixed)
        self.planned_s += self._ways.seconds(operation.kind, num_bytes, transport)
        self._carried = {one: link for one, link in self._carried.items() if not one.finished}
        self._carried[operation] = self._links[transport]
        self._links[transport].start(operation)

    def advance(self) -> bool:
        """Carry on all links; True when something moved."""
        moved = [link.advance() for link in self._links.values() if link.busy]
        return any(moved)

    def block(self, operation: Operation) -> bool:
        """Wait in the operation's link, where nothing is under way on the others; False where it cannot."""
        own = self._carried[operation]
        if any(link is not own and not one.finished for one, link in self._carried.items()):
            return False
        return own.block(operation)

    def late(self) -> tuple[int, ...]:
        """Return the ranks that one of the links waits for."""
        return tuple(sorted({rank for link in self._links.values() for rank in link.late()}))

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise what the operation's link raises."""
        if operation in self._carried:
            self._carried[operation].look(operation, waited_s)
