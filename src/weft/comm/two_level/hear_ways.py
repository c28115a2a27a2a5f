"""The ranks of an axis hear from its first one what was measured of links such as theirs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.private_torch import all_reduce, as_bytes, broadcast
from weft.comm.two_level.hosts import Hosts
from weft.errors import ConfigError
from weft.mesh import Axis
from weft.planner.measured import here
from weft.planner.measured.link_times import LinkProfile, Ways

#: The value of Axis.link_profile that stands for the file in the cache folder, where there is one.
AUTO = "auto"


def measured_ways(
    axis: Axis, group: dist.ProcessGroup, hosts: Hosts, fixed: str, usable: tuple[str, ...]
) -> tuple[Ways | None, str]:
    """Return what to take by measurement, and why; or None, and why not (empty: there is no file of measurements).

    All ranks of the axis call this together: the first one reads its file and tells the others, so all hold the same.

    Args:
        axis: the ranks.
        group: of gloo, of these ranks.
        hosts: where they are.
        fixed: the transport of the fixed rule.
        usable: transports that the axis can take.

    Raises:
        ConfigError: on all ranks, where the file named is missing or wrong.
    """
    told: dict[str, Any] = {}
    if axis.rank == 0:
        try:
            told = _look_up(axis, hosts, fixed, usable)
        except ConfigError as error:
            told = {"error": str(error)}
    told = _from_first(axis, group, told)
    if "error" in told:
        raise ConfigError(told["error"])
    return (Ways(**told["ways"]) if "ways" in told else None), str(told.get("why", ""))


def _look_up(axis: Axis, hosts: Hosts, fixed: str, usable: tuple[str, ...]) -> dict[str, Any]:
    path = LinkProfile.default_path() if axis.link_profile == AUTO else Path(axis.link_profile)
    if axis.link_profile == AUTO and not path.exists():
        return {}
    profile = LinkProfile.load(path)
    if changes := profile.machine.differences(here.this_host()):
        return {"why": f"{path} was measured with {'; '.join(changes)}: measure again with weft calibrate --hosts"}
    layout = hosts.layout
    ways = profile.ways(*layout, fixed, usable) if layout else None
    if ways is None:
        words = "ranks spread unevenly" if layout is None else f"{layout[0]} hosts of {layout[1]} ranks"
        return {"why": f"{path} has no measurement of {words}"}
    better = f": {', '.join(ways.gains)}" if ways.gains else ", where no other way was a tenth faster"
    return {"ways": asdict(ways), "why": f"links were measured on {profile.made}{better}"}


def _from_first(axis: Axis, group: dist.ProcessGroup, told: dict[str, Any]) -> dict[str, Any]:
    """What the first rank says."""
    text = json.dumps(told).encode()
    length = torch.tensor([len(text)])
    all_reduce(length, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
    words = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
    broadcast(words, src=axis.ranks[0], group=group, async_op=True).wait()
    return json.loads(as_bytes(words))
