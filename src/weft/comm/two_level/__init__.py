"""Two levels, first within each host, then between hosts; which ranks share one; and ways chosen by measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["ChosenLink", "Hosts", "TwoLevelLink", "measured_ways", "meet_hosts", "share_memory"]

if TYPE_CHECKING:
    from weft.comm.two_level.chosen_link import ChosenLink
    from weft.comm.two_level.hear_ways import measured_ways
    from weft.comm.two_level.hosts import Hosts, meet_hosts, share_memory
    from weft.comm.two_level.two_level_link import TwoLevelLink

__getattr__ = loads(
    __name__,
    {
        "ChosenLink": ".chosen_link",
        "Hosts": ".hosts",
        "TwoLevelLink": ".two_level_link",
        "measured_ways": ".hear_ways",
        "meet_hosts": ".hosts",
        "share_memory": ".hosts",
    },
)
