"""Replicas that are worlds of their own, and meet: who is there, what each is told, and how their ranks join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Call",
    "MeetingDoor",
    "MeetingLine",
    "MeetingPlace",
    "MeetingRounds",
    "Party",
    "SocketLink",
    "address_towards",
]

if TYPE_CHECKING:
    from weft.comm.peer.meeting.meeting_place import MeetingLine, MeetingPlace, address_towards
    from weft.comm.peer.meeting.party import Call, Party
    from weft.comm.peer.meeting.rounds import MeetingRounds
    from weft.comm.peer.meeting.socket_link import MeetingDoor, SocketLink

__getattr__ = loads(
    __name__,
    {
        "Call": ".party",
        "MeetingDoor": ".socket_link",
        "MeetingLine": ".meeting_place",
        "MeetingPlace": ".meeting_place",
        "MeetingRounds": ".rounds",
        "Party": ".party",
        "SocketLink": ".socket_link",
        "address_towards": ".meeting_place",
    },
)
