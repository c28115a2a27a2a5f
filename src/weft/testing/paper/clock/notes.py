"""What one rank's host and streams did after what, without times: those depend on other ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

#: What several ranks do at the same time: the group, who sends to whom or nothing, and its number among those.
Meeting = tuple[str, tuple[int, int] | None, int]


@dataclass(slots=True, eq=False)
class Node:
    """Something that takes seconds once all of `after` are done."""

    of: Notes
    after: list[Node] = field(default_factory=list["Node"])
    seconds: float = 0.0


class Moment(float):
    """A moment by the clock of a rank on its own, and the node at whose end it is."""

    node: Node | None = None

    @classmethod
    def at(cls, seconds: float, node: Node | None) -> Moment:
        """Return a moment with its node."""
        made = cls(seconds)
        made.node = node
        return made


class Notes:
    """The nodes of one rank in the order in which its host launched them.

    meetings: by what is done together, the node at which this rank is ready and the one that ends it. waits: of the
    default stream, where it was, until what it waited, and why.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.meetings: dict[Meeting, tuple[Node, Node]] = {}
        self.waits: list[tuple[Node, Node, str]] = []
        self._host = self._node()
        self._free: defaultdict[int, Node] = defaultdict(self._node)
        self._calls: defaultdict[tuple[str, tuple[int, int] | None], int] = defaultdict(int)

    def launch(
        self, stream: int, seconds: float, host_s: float, meets: tuple[str, tuple[int, int] | None] | None = None
    ) -> None:
        """Give a stream something to do.

        Args:
            stream: which.
            seconds: that it takes.
            host_s: that the host takes to launch it.
            meets: its group, and who sends to whom, where other ranks take part.
        """
        self._host = self._node(self._host, seconds=host_s)
        ready = self._node(self._free[stream], self._host)
        self._free[stream] = done = self._node(ready, seconds=seconds)
        if meets is not None:
            self.meetings[*meets, self._calls[meets]] = ready, done
            self._calls[meets] += 1

    def moment(self, stream: int) -> Node:
        """Return the end of what a stream has been given."""
        return self._node(self._free[stream], self._host)

    def order(self, stream: int, until: Node, why: str) -> None:
        """Let a stream go on after a moment.

        Args:
            stream: which.
            until: the moment.
            why: kept with the wait where it is not empty.
        """
        if until.of is not self:
            return  # of the step before, which is done
        before = self.moment(stream)
        self._free[stream] = self._node(self._free[stream], until)
        if why:
            self.waits.append((before, until, why))

    def wait(self, until: Node | None) -> None:
        """Let the host wait; None: for all streams."""
        ends = list(self._free.values()) if until is None else [until] if until.of is self else []
        self._host = self._node(self._host, *ends)

    def _node(self, *after: Node, seconds: float = 0.0) -> Node:
        self.nodes.append(Node(self, list(after), seconds))
        return self.nodes[-1]
