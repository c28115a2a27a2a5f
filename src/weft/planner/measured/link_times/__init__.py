"""Links between ranks that were measured, on one host and between hosts, and which way is better for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["OPS", "LinkProfile", "LinkSample", "Ways"]

if TYPE_CHECKING:
    from weft.planner.measured.link_times.faster import Ways
    from weft.planner.measured.link_times.link_profile import OPS, LinkProfile, LinkSample

__getattr__ = loads(
    __name__,
    {
        "LinkProfile": ".link_profile",
        "LinkSample": ".link_profile",
        "OPS": ".link_profile",
        "Ways": ".faster",
    },
)
