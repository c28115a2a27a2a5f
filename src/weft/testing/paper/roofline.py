"""A clock for each stream and for the host, by a roofline. Good for orders of magnitude and for comparing two designs.

The constants are guesses of what one H100 reaches and of what an eager operation costs the host; no GPU has
confirmed them.
"""

from __future__ import annotations

from collections import defaultdict

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
    """Simulated seconds. host: now. start: of what is measured. free: when each stream has done what it was given.

    idle: of the default stream, by reason.
    """

    def __init__(self) -> None:
        self.host = self.start = 0.0
        self.free: defaultdict[int, float] = defaultdict(float)
        self.busy: defaultdict[int, float] = defaultdict(float)
        self.idle: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Measure from where all that was given before is done: the host may be ahead of it."""
        self.start = self.end
        self.busy.clear()
        self.idle.clear()

    def launch(self, stream: int, seconds: float, host_s: float = LAUNCH_S) -> None:
        """Give a stream something to do."""
        self.host += host_s
        free = self.free[stream]
        if stream == DEFAULT and self.host > free:
            self.idle["waits for the host"] += self.host - free
        self.free[stream] = max(free, self.host) + seconds
        self.busy[stream] += seconds

    def moment(self, stream: int) -> float:
        """When an event that is recorded now on `stream` comes."""
        return max(self.free[stream], self.host)

    def order(self, stream: int, moment: float) -> None:
        """A stream goes on after a moment."""
        if stream == DEFAULT and moment > max(self.free[stream], self.host):
            self.idle[f"waits for another stream @ {line_of()}"] += moment - max(self.free[stream], self.host)
        self.free[stream] = max(self.free[stream], moment)

    def wait(self, moment: float) -> None:
        """The host waits."""
        self.host = max(self.host, moment)

    @property
    def end(self) -> float:
        """When all is done."""
        return max([self.host, *self.free.values()])


def kernel_s(num_bytes: int, flops: float) -> float:
    """Seconds of one kernel."""
    return max(KERNEL_S, num_bytes / MEMORY_BYTES_PER_S, flops / FLOPS)


def collective_s(kind: str, num_bytes: int, num_ranks: int) -> float:
    """Seconds of one collective in which each rank holds num_bytes at most."""
    passes = 2 if "allreduce" in kind else 1
    return BUS_S + passes * num_bytes * (num_ranks - 1) / num_ranks / BUS_BYTES_PER_S
