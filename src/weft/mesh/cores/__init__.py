"""Which processor cores a rank runs on: those of the NUMA node that its GPU hangs on. Nothing here imports torch."""

from __future__ import annotations

from weft.mesh.cores.binding import CoreChoice, bind, choose_cores, cores_of_rank
from weft.mesh.cores.topology import Topology, said

__all__ = [
    "CoreChoice",
    "Topology",
    "bind",
    "choose_cores",
    "cores_of_rank",
    "said",
]
