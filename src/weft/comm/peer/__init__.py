"""From rank to rank: exchanges around an axis, and messages between two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "PeerLane",
    "Message",
    "all_to_all",
    "join_lanes",
    "shift",
    "start_all_to_all",
    "start_receive",
    "start_send",
    "start_shift",
]

if TYPE_CHECKING:
    from weft.comm.peer.exchanges import all_to_all, shift, start_all_to_all, start_shift
    from weft.comm.peer.lanes import PeerLane, join_lanes
    from weft.comm.peer.messages import Message, start_receive, start_send

__getattr__ = loads(
    __name__,
    {
        "PeerLane": ".lanes",
        "Message": ".messages",
        "all_to_all": ".exchanges",
        "join_lanes": ".lanes",
        "shift": ".exchanges",
        "start_all_to_all": ".exchanges",
        "start_receive": ".messages",
        "start_send": ".messages",
        "start_shift": ".exchanges",
    },
)
