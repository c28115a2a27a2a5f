"""Two levels: sums and gathers first within each host, then between hosts; and which ranks share one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["Hosts", "TwoLevelLink", "meet_hosts", "share_memory"]

if TYPE_CHECKING:
    from weft.comm.two_level.hosts import Hosts, meet_hosts, share_memory
    from weft.comm.two_level.two_level_link import TwoLevelLink

__getattr__ = loads(
    __name__,
    {
        "Hosts": ".hosts",
        "TwoLevelLink": ".two_level_link",
        "meet_hosts": ".hosts",
        "share_memory": ".hosts",
    },
)
