"""This rank in its process group: device and cores, mesh, count of sent bytes, and hang detection."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from weft.checkpoint.folders import RankGroup
from weft.comm.collectives import barrier
from weft.comm.gpu_settings import CoreChoice, Topology, bind, choose_cores, format_cores, pick_device
from weft.comm.hang_watch import Watch, hang_event
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh, join_ranks, leave_ranks
from weft.comm.store import StoreChannel, share_store_key
from weft.devices import access
from weft.env import RankEnv
from weft.train.engine import EngineJob
from weft.train.states.state_io import rank_group
from weft.units import parse_seconds


class JoinedRank:
    """Joins the ranks of a job, and detects hangs until it is closed."""

    def __init__(self, job: EngineJob):
        launch = job.config.launch
        device = device_of_rank(launch.device, launch.numa, job.place)
        if job.place is not None:
            join_ranks(job.place, device, parse_seconds(launch.timeout), job.store, job.tell)
        if dist.is_initialized():
            # Under torchrun the folder's texts were sent through the store before messages could be signed.
            share_store_key(job.store_key, repr((str(job.folder.path), sorted(job.folder.texts.items()))).encode())
        self.ledger, plan = Ledger(), job.plan
        if job.world is not None:
            plan = plan.replace(dp_replicate=1, sync="step", compress="none")
        self.mesh = build_mesh(plan, device, self.ledger.record, launch.route, launch.links or "auto")
        if job.world is not None:
            self.mesh.reader = self.mesh.reader.in_replica(job.world.replica, job.plan)
        self.group = rank_group(self.mesh)
        self._watch = Watch(
            self.mesh,
            job.tell,
            warn_after_s=None if launch.warn_after == "auto" else parse_seconds(launch.warn_after),
            limit_s=parse_seconds(launch.timeout),
            limit_name=f"launch.timeout={launch.timeout}",
            where_stacks=f"{job.folder.logs}/rank_*.log",
            owns_process=job.place is not None,
            on_report=lambda state, found: job.record(hang_event(state, found)),
        )

    def background_group(self) -> RankGroup:
        """Return a group of all ranks for background threads, which communicates over the rendezvous store."""
        rank, number = self.mesh.rank, self.mesh.world_size
        if number == 1:
            return RankGroup()
        channel = StoreChannel(rank, number)
        return RankGroup(rank, number, channel.on_first, channel.gather)

    def wait(self) -> None:
        """Wait for all ranks, with hang detection, before this rank disconnects."""
        barrier(self.mesh.world)

    def close(self) -> None:
        """End hang detection."""
        self._watch.close()

    def leave(self) -> None:
        """Disconnect from the other ranks. Not called after an error: they may be in a collective."""
        leave_ranks()


def device_of_rank(kind: str, numa: bool, place: RankEnv | None) -> torch.device:
    """Return the device of this rank. With `numa`, bind the process to cores near its GPU.

    Prints the binding to stderr, which is the rank's log in `weft train`. Raises PlanError if there is no such device.

    Args:
        place: rank environment of this process; None for a single process.
    """
    device = pick_device(kind, place.local_rank if place is not None else 0)
    if access.has_cuda_kernels(device) and numa:
        print(f"rank {place.rank if place is not None else 0}: {stay_near_gpu(place).text}", file=sys.stderr)
    return device


def stay_near_gpu(place: RankEnv | None) -> CoreChoice:
    """Bind this process to its share of the cores of its GPU's NUMA node, unless cores were already chosen.

    Limits torch's threads to the number of these cores. Returns the binding; its `cores` are None, with the reason in
    `text`, if the process was not bound.

    Args:
        place: rank environment of this process; None for a single process.
    """
    if sys.platform != "linux":
        return CoreChoice(None, f"not bound to cores: {sys.platform} offers no way")
    local_rank, count = (place.local_rank, place.local_world_size) if place is not None else (0, 1)
    apart = place is not None and place.starter == "slurm"
    choice = choose_cores(
        Topology(), frozenset(os.sched_getaffinity(0)), access.pci_ids(count), local_rank, apart=apart
    )
    if choice.cores is None:
        return choice
    try:
        bind(choice.cores)
    except OSError as error:
        return CoreChoice(
            None, f"not bound to cores: the system refuses cores {format_cores(choice.cores)} ({error.strerror})"
        )
    # More threads than cores would slow each other down.
    torch.set_num_threads(min(torch.get_num_threads(), len(choice.cores)))
    return choice
