"""One clock for several ranks: what they do together begins when all of them are ready, as NCCL's kernels do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.testing.paper.clock.notes import Meeting, Node, Notes


@dataclass(frozen=True, slots=True)
class Timed:
    """A rank's step beside the others. idle_s: of its default stream, by what it waited for.

    stuck: what it still waits for in the end, if the ranks wait for each other for ever.
    """

    step_s: float
    idle_s: dict[str, float]
    stuck: tuple[str, ...] = ()


def timed_together(ranks: Sequence[Notes]) -> list[Timed]:
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
