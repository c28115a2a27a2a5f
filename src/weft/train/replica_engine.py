"""What the engine asks of other replicas where each is a world of its own: meetings, and where to go on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weft.comm.mesh import Mesh
from weft.comm.replica_client import ReplicaGroup
from weft.comm.replica_rendezvous import address_towards
from weft.config.plan import Plan
from weft.parallel.elastic_local_sgd import attach_elastic_diloco
from weft.parallel.state.gradients import data_parallel
from weft.train.engine import EngineJob, ReplicaWorld, StepResult
from weft.units import counted, parse_seconds


def plan_within(plan: Plan, world: ReplicaWorld | None) -> Plan:
    """Return the plan of the ranks that train as one world: all of it, or that of one replica.

    Args:
        plan: of all replicas.
        world: which replica this is; None: all are one world.
    """
    return plan if world is None else plan.replace(dp_replicate=1, sync="step", compress="none")


class OtherWorlds:
    """This replica's ranks and the replicas that they meet.

    Args:
        job: of the engine.
        world: which replica this is, and where the others are met.
        mesh: of this replica.
        model: parallelized over it.
        on_first: returns what the first rank of the replica finds, on all of them.
        gather: returns the bytes of each rank of the replica, on all of them.
        stops: whether this rank is asked to stop.
    """

    def __init__(
        self,
        job: EngineJob,
        world: ReplicaWorld,
        mesh: Mesh,
        model: nn.Module,
        on_first: Callable[[Callable[[], Any]], Any],
        gather: Callable[[bytes], list[bytes]],
        stops: Callable[[], bool],
    ):
        self._job, self.world = job, world
        timeout_s = parse_seconds(job.config.launch.meeting_timeout)
        self.party = ReplicaGroup(
            mesh, world.replica, world.meet_at, address_towards(world.meet_at), timeout_s, world.key, on_first, gather,
            self._say if mesh.rank == 0 else lambda line: None,
        )  # fmt: skip
        self.party.wants_out = stops
        self.sync = attach_elastic_diloco(model, data_parallel(model), mesh, job.plan, self.party)
        train = job.config.train
        most = "" if train.global_cost is None else f" train.global_cost={train.global_cost:g}"
        self.sync.terms = f" seed={job.config.seed} train.global_batch={train.global_batch}{most}"

    def before_step(self, number: int) -> None:
        """Hear that a step begins. number: steps done before."""
        self.sync.step = number

    def after_step(self, result: StepResult) -> StepResult:
        """Return what a step of this replica did, with what became of a meeting after it.

        Args:
            result: of this replica alone.
        """
        sync = self.sync
        self.party.figures["loss"] = result.loss
        return replace(
            result,
            wants_stop=result.wants_stop or sync.owes_meeting,
            share=1 / sync.replicas,
            goes_to=sync.goes_to,
            is_over=sync.over is not None,
        )

    def rejoin(self, step: int) -> int | None:
        """Meet the others before the first step, where that is due; the step to go on from. None: asked to stop.

        Args:
            step: steps done.
        """
        self.sync.step = step
        self.sync.rejoin()
        return None if self.sync.owes_meeting else self.sync.step

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint says of this replica beside its arrays."""
        sync, plan = self.sync, self._job.plan
        anchor = {"meetings": sync.meetings, "token": sync.token, "owes_meeting": sync.owes_meeting}
        return {"plan": str(plan), "replica": {"place": sync.place, "of": sync.replicas, **anchor}}

    def lines(self) -> Sequence[str]:
        """Return which replica this is, for the opening of a run."""
        sync = self.sync
        every = counted(sync.every, "step")
        return [f"replica {sync.place} of {sync.replicas}, meets the others every {every} at {self.world.meet_at}"]

    def end(self) -> None:
        """Tell the others that this replica has come to its end."""
        self.party.end(str(self._job.folder.path.absolute()))

    def close(self) -> None:
        """Be heard of no more."""
        self.party.close()

    def _say(self, line: str) -> None:
        self._job.tell(line)
        self._job.on_hang({"event": "warning", "step": self.sync.step, "text": line})
