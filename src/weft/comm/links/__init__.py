"""Ways to send: shared memory, exchange over gloo, the backend's own. None changes a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "BackendLink",
    "ExchangeLink",
    "Link",
    "NCCL_FORMATS",
    "Operation",
    "Parts",
    "Segment",
    "SharedLink",
    "StagedLink",
    "StreamWait",
    "as_moved",
    "failed",
    "finish",
    "host_mark",
    "unobserved",
    "waited",
]

if TYPE_CHECKING:
    from weft.comm.links.backend import BackendLink, ExchangeLink
    from weft.comm.links.link import Link, Operation, failed, finish, unobserved
    from weft.comm.links.nccl_formats import NCCL_FORMATS, as_moved
    from weft.comm.links.parts import Parts
    from weft.comm.links.segment import Segment, host_mark
    from weft.comm.links.shared import SharedLink
    from weft.comm.links.staged import StagedLink
    from weft.comm.links.stream_wait import StreamWait, waited

__getattr__ = loads(
    __name__,
    {
        "BackendLink": ".backend",
        "ExchangeLink": ".backend",
        "Link": ".link",
        "NCCL_FORMATS": ".nccl_formats",
        "Operation": ".link",
        "Parts": ".parts",
        "Segment": ".segment",
        "SharedLink": ".shared",
        "StagedLink": ".staged",
        "StreamWait": ".stream_wait",
        "as_moved": ".nccl_formats",
        "failed": ".link",
        "finish": ".link",
        "host_mark": ".segment",
        "unobserved": ".link",
        "waited": ".stream_wait",
    },
)
