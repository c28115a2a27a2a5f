"""A clock for each stream and for the host, by a roofline. Good for orders of magnitude and for comparing two designs.

The constants are guesses of what one H100 reaches and of what an eager operation costs the host; no GPU has
confirmed them.
"""

from __future__ import annotations

from collections import defaultdict

from weft.testing.paper.clock.notes import Moment, Notes
from weft.testing.paper.counts import line_of
from weft.testing.paper.races import DEFAULT

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
    times, for `timed_together`; None: not kept.
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
