"""Keeping a rank near its GPU: its share of the cores of the NUMA node, unless somebody has chosen cores already.

torch.distributed.run binds too (`--numa-binding`), but asks for the numactl program and for private functions of torch,
and narrows what taskset or SLURM has set. Memory needs no policy of its own: Linux takes a page from the node of the
core that touches it first, and all threads of the rank run on that node from here on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.mesh.cores.topology import Cores, Topology, said


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """Where a rank shall run. cores: None: where it is. text: for people, what holds and why."""

    cores: Cores | None
    text: str


def choose_cores(
    topology: Topology, allowed: Cores, gpus: Sequence[str], local_rank: int, *, apart: bool = False
) -> CoreChoice:
    """Return the cores of a rank: its share of those of its GPU's NUMA node.

    Args:
        topology: of this machine.
        allowed: the cores that this process may use now.
        gpus: PCI ids of the GPUs of this machine's ranks, by local rank.
        local_rank: of this one.
        apart: whether each rank may have a control group of its own, as under srun: its cores were chosen for it then.
    """
    nodes, given = topology.nodes(), topology.online() if apart else topology.given()
    if len(nodes) < 2:
        return CoreChoice(None, "not bound to cores: the machine has one NUMA node")
    if allowed < given:
        return CoreChoice(None, f"on cores {said(allowed)} as they were set, not bound by Weft")
    beside = [topology.node_of(gpu) for gpu in gpus]
    node = beside[local_rank]
    if node is None or not (near := nodes.get(node, Cores()) & allowed):
        where = "the system does not say where it hangs" if node is None else f"no core of NUMA node {node} is allowed"
        return CoreChoice(None, f"not bound to cores: GPU {gpus[local_rank]}: {where}")
    sharing = [rank for rank, other in enumerate(beside) if other == node]
    cores = _share(topology, near, sharing.index(local_rank), len(sharing))
    return CoreChoice(cores, f"bound to cores {said(cores)} of NUMA node {node}, where GPU {gpus[local_rank]} hangs")


def _share(topology: Topology, cores: Cores, place: int, count: int) -> Cores:
    """The place-th of `count` parts, in whole physical cores; all of them where there are too few."""
    physical = sorted({tuple(sorted(topology.threads_of(core) & cores)) for core in cores})
    if len(physical) < count:
        return cores
    first, last = (len(physical) * at // count for at in (place, place + 1))
    return Cores(core for threads in physical[first:last] for core in threads)


def bind(cores: Cores) -> None:
    """Let this process and what it starts run on these cores only: threads that were placed elsewhere stay there.

    OSError where the system does not allow it.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    for task in Path("/proc/self/task").iterdir():
        try:
            if os.sched_getaffinity(int(task.name)) == before:
                os.sched_setaffinity(int(task.name), cores)
        except OSError:
            continue  # it has ended meanwhile


def cores_of_rank(num_ranks: int) -> int:
    """Return how many cores this rank has for itself: its share of them all, or those that it alone was given.

    num_ranks: on this machine.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 1) // num_ranks)
    own = os.sched_getaffinity(0)
    try:
        is_narrowed = own < os.sched_getaffinity(os.getppid())
    except OSError:
        is_narrowed = False
    return len(own) if is_narrowed else max(1, len(own) // num_ranks)
