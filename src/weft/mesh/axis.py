"""An axis of the mesh, as one rank sees it, and what is told of the collectives over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from weft.mesh.pulse import Pulse


class Waited(Protocol):
    """How long a device's stream waited, which is known later."""

    def seconds(self) -> float:
        """Return the seconds; the host waits until they are known."""
        ...


class RecordsCall(Protocol):
    """Told of each collective."""

    def __call__(
        self, axis: str, operation: str, num_bytes: int, seconds: float | Waited, sent_bytes: int, off_host_bytes: int
    ) -> None:
        """Hear of one call.

        Args:
            axis: its name.
            operation: such as "all_reduce".
            num_bytes: of the tensor on this rank, as it travels.
            seconds: that the computation waited.
            sent_bytes: that this rank handed to others.
            off_host_bytes: what of them left its host.
        """
        ...


def ignore(
    axis: str, operation: str, num_bytes: int, seconds: float | Waited, sent_bytes: int, off_host_bytes: int
) -> None:
    """The record of a mesh that nobody counts."""


#: How bytes go between hosts: the better way, every rank to every rank, or first within each host. No number depends
#: on it.
ROUTES = ("auto", "flat", "two_level")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, or several joined, seen from this rank.

    rank: this rank's index on the axis. ranks: global ranks of the group, in order of the axis.
    group: torch's process group; None where size is 1. used: of joined axes, the names of those with several ranks.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    record: RecordsCall = field(default=ignore, repr=False, compare=False)
    #: What comm keeps between calls, for as long as the mesh lives: one dict, shared by all axes of a mesh.
    links: dict[tuple[object, ...], object] = field(
        default_factory=dict[tuple[object, ...], object], repr=False, compare=False
    )
    #: Where this rank stands, for the thread that watches: one for all axes of a mesh.
    pulse: Pulse = field(default_factory=Pulse, repr=False, compare=False)
    #: Collectives under way that have a second stage to begin; one list, shared by all axes of a mesh.
    staged: list[Any] = field(default_factory=list[Any], repr=False, compare=False)
    #: What graphs of torch.compile call in the place of collectives over it, by name: `comm.operators` puts it here.
    operators: dict[str, object] = field(default_factory=dict[str, object], repr=False, compare=False)
    #: How bytes go between hosts: one of ROUTES.
    route: str = field(default="auto", repr=False, compare=False)
    #: Of links that were measured, for route=auto: a file, "auto" for that in the cache folder, or nothing.
    link_profile: str = field(default="", repr=False, compare=False)
    #: The host of each rank, by global rank, of those that have met: one dict, shared by all axes of a mesh.
    hosts: dict[int, bytes] = field(default_factory=dict[int, bytes], repr=False, compare=False)
    used: str = field(default="", repr=False, compare=False)

    @property
    def label(self) -> str:
        """Its name for people: without the axes that have one rank. `name` is the same under every plan."""
        return self.used or self.name
