"""What one rank's host and streams did after what, without times: those depend on other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.gpu_sim.counts import line_of
from weft.gpu_sim.races import DEFAULT

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


# A clock for each stream and for the host, by a roofline. Good for orders of magnitude and for comparing two
# designs.

#: Host seconds of one eager operation, and of one collective.
LAUNCH_S, COLLECTIVE_LAUNCH_S = 6e-6, 40e-6
#: Of one graph.
GRAPH_LAUNCH_S = 10e-6
#: The shortest kernel, in seconds.
KERNEL_S = 2.5e-6
#: Matrix products in bf16, memory, host link (one way), network between ranks and how long its shortest message takes.
FLOPS, MEMORY_BYTES_PER_S, LINK_BYTES_PER_S, BUS_BYTES_PER_S, BUS_S = 6e14, 2.6e12, 25e9, 300e9, 25e-6


class RooflineClock:
    """Keeps simulated seconds. host: now. start: of what is measured.

    free: when each stream has done what it was given. idle: of the default stream, by reason. notes: the same without
    times, for `joint_times`; None: not kept.
    """

    def __init__(self) -> None:
        self.host = self.start = 0.0
        self.free: defaultdict[int, float] = defaultdict(float)
        self.busy: defaultdict[int, float] = defaultdict(float)
        self.idle: defaultdict[str, float] = defaultdict(float)
        self.notes: Notes | None = None

    def begin(self) -> None:
        """Measure from where all that was given before is done: the host may be ahead of it."""
        self.start = self.end
        self.busy.clear()
        self.idle.clear()
        self.notes = None if self.notes is None else Notes()

    def launch(
        self,
        stream: int,
        seconds: float,
        host_s: float = LAUNCH_S,
        meets: tuple[str, tuple[int, int] | None] | None = None,
    ) -> None:
        """Give a stream something to do.

        Args:
            stream: which.
            seconds: that it takes.
            host_s: that the host takes to launch it.
            meets: its group, and who sends to whom, where other ranks take part.
        """
        if self.notes is not None:
            self.notes.launch(stream, seconds, host_s, meets)
        self.host += host_s
        free = self.free[stream]
        if stream == DEFAULT and self.host > free:
            self.idle["waits for the host"] += self.host - free
        self.free[stream] = max(free, self.host) + seconds
        self.busy[stream] += seconds

    def moment(self, stream: int) -> Moment:
        """Return when an event that is recorded now on `stream` comes."""
        return Moment.at(max(self.free[stream], self.host), self.notes and self.notes.moment(stream))

    def order(self, stream: int, moment: Moment) -> None:
        """Let a stream go on after a moment."""
        if self.notes is not None and moment.node is not None:
            self.notes.order(stream, moment.node, line_of() if stream == DEFAULT else "")
        if stream == DEFAULT and moment > max(self.free[stream], self.host):
            self.idle[f"waits for another stream @ {line_of()}"] += moment - max(self.free[stream], self.host)
        self.free[stream] = max(self.free[stream], moment)

    def wait(self, moment: float) -> None:
        """Let the host wait."""
        if self.notes is not None:
            self.notes.wait(moment.node if isinstance(moment, Moment) else None)
        self.host = max(self.host, moment)

    @property
    def end(self) -> float:
        """When all is done."""
        return max([self.host, *self.free.values()])


def kernel_s(num_bytes: int, flops: float) -> float:
    """Return the seconds of one kernel."""
    return max(KERNEL_S, num_bytes / MEMORY_BYTES_PER_S, flops / FLOPS)


def collective_s(kind: str, num_bytes: int, num_ranks: int) -> float:
    """Return the seconds of one collective.

    Args:
        kind: torch's name for it.
        num_bytes: that each rank holds at most.
        num_ranks: that take part.
    """
    passes = 2 if "allreduce" in kind else 1
    return BUS_S + passes * num_bytes * (num_ranks - 1) / num_ranks / BUS_BYTES_PER_S


# One clock for several ranks: what they do together begins when all of them are ready, as NCCL's kernels do.


@dataclass(frozen=True, slots=True)
class Timed:
    """A rank's step beside the others. idle_s: of its default stream, by what it waited for.

    stuck: what it still waits for in the end, if the ranks wait for each other for ever.
    """

    step_s: float
    idle_s: dict[str, float]
    stuck: tuple[str, ...] = ()


def joint_times(ranks: Sequence[Notes]) -> list[Timed]:
    """Return how long each rank's step takes; all begin at the same time."""
    ended = _ends([node for notes in ranks for node in notes.nodes], _met(ranks))
    return [_timed(notes, ended) for notes in ranks]


def _met(ranks: Sequence[Notes]) -> dict[Node, list[Node]]:
    """By the node that ends what several do, those at which each of them is ready."""
    ready: defaultdict[Meeting, list[Node]] = defaultdict(list)
    for notes in ranks:
        for meeting, (is_ready, _) in notes.meetings.items():
            ready[meeting].append(is_ready)
    return {done: ready[meeting] for notes in ranks for meeting, (_, done) in notes.meetings.items()}


def _ends(nodes: Iterable[Node], met: dict[Node, list[Node]]) -> dict[Node, float]:
    """When each node ends; those that wait for each other in a circle, and what is behind them, are left out."""
    missing: dict[Node, int] = {}
    behind: defaultdict[Node, list[Node]] = defaultdict(list)
    ended: dict[Node, float] = {}
    free: list[Node] = []
    for node in nodes:
        after = met.get(node, node.after)
        missing[node] = len(after)
        for one in after:
            behind[one].append(node)
        if not after:
            free.append(node)
    while free:
        node = free.pop()
        ended[node] = max((ended[one] for one in met.get(node, node.after)), default=0.0) + node.seconds
        for one in behind[node]:
            missing[one] -= 1
            if not missing[one]:
                free.append(one)
    return ended


def _timed(notes: Notes, ended: dict[Node, float]) -> Timed:
    idle: defaultdict[str, float] = defaultdict(float)
    for before, until, why in notes.waits:
        if before in ended and until in ended and ended[until] > ended[before]:
            idle[why] += ended[until] - ended[before]
    stuck = tuple(
        f"{group}: {'all' if ends is None else f'{ends[0]} to {ends[1]}'}, call {number}"
        for (group, ends, number), (ready, done) in notes.meetings.items()
        if ready in ended and done not in ended
    )
    return Timed(max((ended[node] for node in notes.nodes if node in ended), default=0.0), dict(idle), stuck)
