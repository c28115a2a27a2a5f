"""Simulated time: each rank's dependency graph, a roofline clock, and one clock for several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools.gpu_sim.counts import line_of
from tools.gpu_sim.races import DEFAULT

#: A joint operation of several ranks: the group, (sender, receiver) or None, and its index among these operations.
Meeting = tuple[str, tuple[int, int] | None, int]


@dataclass(slots=True, eq=False)
class Node:
    """Work that takes `seconds` once all of `after` are done."""

    of: Notes
    after: list[Node] = field(default_factory=list["Node"])
    seconds: float = 0.0


class Moment(float):
    """A time on the clock of a single rank, and the node that ends at it."""

    node: Node | None = None

    @classmethod
    def at(cls, seconds: float, node: Node | None) -> Moment:
        """Return a moment with its node."""
        made = cls(seconds)
        made.node = node
        return made


class Notes:
    """The dependency graph of one rank in launch order. It has no times, because they depend on other ranks.

    `meetings` maps joint operations to the nodes at which this rank is ready and done. `waits` lists the default
    stream's waits: the node before, the awaited node, and the reason.
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
        """Add work to a stream.

        Args:
            stream: number of the stream.
            seconds: duration of the work.
            host_s: time of the host for the launch.
            meets: group and (sender, receiver), for joint operations with other ranks.
        """
        self._host = self._node(self._host, seconds=host_s)
        ready = self._node(self._free[stream], self._host)
        self._free[stream] = done = self._node(ready, seconds=seconds)
        if meets is not None:
            self.meetings[*meets, self._calls[meets]] = ready, done
            self._calls[meets] += 1

    def moment(self, stream: int) -> Node:
        """Return the end of a stream's work so far."""
        return self._node(self._free[stream], self._host)

    def order(self, stream: int, until: Node, why: str) -> None:
        """Make a stream wait for a node.

        Args:
            stream: number of the stream.
            until: the node to wait for.
            why: reason to record with the wait; empty to record nothing.
        """
        if until.of is not self:
            return  # from the previous step, which is done
        before = self.moment(stream)
        self._free[stream] = self._node(self._free[stream], until)
        if why:
            self.waits.append((before, until, why))

    def wait(self, until: Node | None) -> None:
        """Make the host wait for a node, or for all streams if None."""
        ends = list(self._free.values()) if until is None else [until] if until.of is self else []
        self._host = self._node(self._host, *ends)

    def _node(self, *after: Node, seconds: float = 0.0) -> Node:
        self.nodes.append(Node(self, list(after), seconds))
        return self.nodes[-1]


# A roofline clock for each stream and for the host. It gives orders of magnitude and comparisons of two designs.

#: Host seconds per eager operation, and per collective.
LAUNCH_S, COLLECTIVE_LAUNCH_S = 6e-6, 40e-6
#: Host seconds per graph.
GRAPH_LAUNCH_S = 10e-6
#: Minimum seconds of a kernel.
KERNEL_S = 2.5e-6
#: Rates of bf16 matmuls, memory, host link (one direction) and network, and the latency of a message.
FLOPS, MEMORY_BYTES_PER_S, LINK_BYTES_PER_S, BUS_BYTES_PER_S, BUS_S = 6e14, 2.6e12, 25e9, 300e9, 25e-6


class RooflineClock:
    """Simulated time in seconds.

    Attributes:
        host: time of the host.
        start: begin of the measurement.
        free: time at which each stream has done its work.
        busy: working time of each stream.
        idle: waiting time of the default stream by reason.
        notes: dependency graph for `joint_times`, or None to skip it.
    """

    def __init__(self) -> None:
        self.host = self.start = 0.0
        self.free: defaultdict[int, float] = defaultdict(float)
        self.busy: defaultdict[int, float] = defaultdict(float)
        self.idle: defaultdict[str, float] = defaultdict(float)
        self.notes: Notes | None = None

    def begin(self) -> None:
        """Start the measurement when all earlier work is done. The host may already be ahead of that."""
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
        """Add work to a stream.

        Args:
            stream: number of the stream.
            seconds: duration of the work.
            host_s: time of the host for the launch.
            meets: group and (sender, receiver), for joint operations with other ranks.
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
        """Return the time of an event that is recorded on `stream` now."""
        return Moment.at(max(self.free[stream], self.host), self.notes and self.notes.moment(stream))

    def order(self, stream: int, moment: Moment) -> None:
        """Make a stream wait for a moment."""
        if self.notes is not None and moment.node is not None:
            self.notes.order(stream, moment.node, line_of() if stream == DEFAULT else "")
        if stream == DEFAULT and moment > max(self.free[stream], self.host):
            self.idle[f"waits for another stream @ {line_of()}"] += moment - max(self.free[stream], self.host)
        self.free[stream] = max(self.free[stream], moment)

    def wait(self, moment: float) -> None:
        """Make the host wait for a moment."""
        if self.notes is not None:
            self.notes.wait(moment.node if isinstance(moment, Moment) else None)
        self.host = max(self.host, moment)

    @property
    def end(self) -> float:
        """The time at which all work is done."""
        return max([self.host, *self.free.values()])


def kernel_s(num_bytes: int, flops: float) -> float:
    """Return the seconds of one kernel."""
    return max(KERNEL_S, num_bytes / MEMORY_BYTES_PER_S, flops / FLOPS)


def collective_s(kind: str, num_bytes: int, num_ranks: int) -> float:
    """Return the seconds of one collective.

    Args:
        kind: torch's name of the collective.
        num_bytes: maximum bytes per rank.
        num_ranks: number of participating ranks.
    """
    passes = 2 if "allreduce" in kind else 1
    return BUS_S + passes * num_bytes * (num_ranks - 1) / num_ranks / BUS_BYTES_PER_S


# One clock for several ranks. A joint operation begins when all of its ranks are ready, like NCCL's kernels.


@dataclass(frozen=True, slots=True)
class Timed:
    """A rank's step on the common clock.

    Attributes:
        step_s: duration of the step.
        idle_s: waiting time of the default stream by reason.
        stuck: operations that never complete, in a deadlock of the ranks.
    """

    step_s: float
    idle_s: dict[str, float]
    stuck: tuple[str, ...] = ()


def joint_times(ranks: Sequence[Notes]) -> list[Timed]:
    """Return the duration of each rank's step, if all begin at the same time."""
    ended = _ends([node for notes in ranks for node in notes.nodes], _met(ranks))
    return [_timed(notes, ended) for notes in ranks]


def _met(ranks: Sequence[Notes]) -> dict[Node, list[Node]]:
    """Map the end node of each joint operation to the nodes at which its ranks are ready."""
    ready: defaultdict[Meeting, list[Node]] = defaultdict(list)
    for notes in ranks:
        for meeting, (is_ready, _) in notes.meetings.items():
            ready[meeting].append(is_ready)
    return {done: ready[meeting] for notes in ranks for meeting, (_, done) in notes.meetings.items()}


def _ends(nodes: Iterable[Node], met: dict[Node, list[Node]]) -> dict[Node, float]:
    """Return the end time of each node, without nodes in a dependency cycle and those that depend on them."""
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
