"""The mesh of ranks: axes, joined axes and groups, and where each rank stands on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Axis",
    "ENDS",
    "LIMIT_S",
    "Mesh",
    "Pulse",
    "Wait",
    "Waited",
    "build_mesh",
    "join_group",
    "join_ranks",
    "leave_ranks",
    "loopback_store",
    "members_of",
    "open_store",
    "pick_device",
    "library_settings",
]

if TYPE_CHECKING:
    from weft.mesh.axis import Axis, Waited
    from weft.mesh.gpu_settings import library_settings, pick_device
    from weft.mesh.mesh import (
        ENDS,
        LIMIT_S,
        Mesh,
        build_mesh,
        join_group,
        join_ranks,
        leave_ranks,
        loopback_store,
        open_store,
    )
    from weft.mesh.places import members_of
    from weft.mesh.pulse import Pulse, Wait

__getattr__ = loads(
    __name__,
    {
        "Axis": ".axis",
        "ENDS": ".mesh",
        "LIMIT_S": ".mesh",
        "Mesh": ".mesh",
        "Pulse": ".pulse",
        "Wait": ".pulse",
        "Waited": ".axis",
        "build_mesh": ".mesh",
        "join_group": ".mesh",
        "join_ranks": ".mesh",
        "leave_ranks": ".mesh",
        "loopback_store": ".mesh",
        "members_of": ".places",
        "open_store": ".mesh",
        "pick_device": ".gpu_settings",
        "library_settings": ".gpu_settings",
    },
)
