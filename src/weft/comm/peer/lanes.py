"""Lanes: groups of two ranks for what one sends the other, so that one message never waits behind another kind.

NCCL carries the messages of a communicator out one after another, each when both ends are there. On one communicator
an activation on its way down waits behind a gradient on its way up, and two ranks whose orders differ wait for ever.
gloo has no such order, so there the axis's own group serves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from weft.comm.private_torch import backend_of
from weft.mesh import Axis, join_group


class PeerLane(NamedTuple):
    """What one rank sends another: its content, and both places on the axis."""

    content: str
    sender: int
    receiver: int


def join_lanes(axis: Axis, device: torch.device, lanes: Iterable[PeerLane]) -> dict[PeerLane, Axis]:
    """Return, by lane, the sender and the receiver as an axis of two: with a group of its own where that matters.

    Only the two ranks of a lane make its group, whatever the size of the axis. A collective over them.

    Args:
        axis: on which the ranks lie.
        device: of what is sent.
        lanes: those that begin or end on this rank; on both ends alike.
    """
    if axis.group is None:
        return {}
    own_group = backend_of(axis.group, device).name() != "gloo"
    found: dict[PeerLane, Axis] = {}
    for lane in sorted(set(lanes), key=_order):
        ends = tuple(sorted((lane.sender, lane.receiver)))
        ranks = tuple(axis.ranks[end] for end in ends)
        group = axis.group
        if own_group:
            group = join_group(ranks, f"{axis.name} {lane.content} from {axis.ranks[lane.sender]}, of")
        found[lane] = replace(axis, size=2, rank=ends.index(axis.rank), ranks=ranks, group=group)
    return found


def _order(lane: PeerLane) -> tuple[int, PeerLane]:
    """One order for all ranks. Pairs that begin on even places meet first, at the same time, then the others."""
    return min(lane.sender, lane.receiver) % 2, lane
