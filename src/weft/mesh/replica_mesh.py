"""One replica as a world of its own: the mesh of a rank whose replicas meet only every so many steps.

Its `dp_replicate` has one rank, and its `world` is the ranks of the replica. Ranks keep their global numbers, and groups,
links and hosts are those of the whole mesh.
"""

from __future__ import annotations

from weft.mesh.axis import Axis
from weft.mesh.mesh import Mesh

_APART = "dp_replicate"


class ReplicaMesh(Mesh):
    """The part of a mesh that this rank's replica is. whole: the mesh of all replicas."""

    def __init__(self, whole: Mesh):
        # Not Mesh's own: axes, links and the pulse are those of the whole.
        self.plan = whole.plan.replace(dp_replicate=1, compress="none")
        self.rank, self.device, self.pulse = whole.rank, whole.device, whole.pulse
        self.world_size = self.plan.world_size
        self.whole, self.replica = whole, self

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """The axis of that name, or the joined axis of several, without other replicas."""
        return self.whole[_without(names)]

    def built_axes(self) -> list[Axis]:
        """Return the axes that were asked for so far, those of the whole mesh among them."""
        return self.whole.built_axes()

    def ranks_over(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the global ranks of this replica that differ from this one only along those axes."""
        return self.whole.ranks_over(_without(names))


def replica_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh of this rank's replica; the mesh itself where replicas meet in every step."""
    if mesh.plan.sync == "step":
        return mesh
    if mesh.replica is None:
        mesh.replica = ReplicaMesh(mesh)
    return mesh.replica


def _without(names: str | tuple[str, ...]) -> tuple[str, ...]:
    several = (names,) if isinstance(names, str) else names
    return tuple(name for name in several if name.partition("/")[0] != _APART)
