"""Local SGD between replicas in separate process groups: joining the other replicas, and the step to resume from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weft.checkpoint.folders import RankGroup
from weft.comm.mesh import Mesh
from weft.comm.replica_client import ReplicaGroup
from weft.comm.replica_rendezvous import address_towards
from weft.parallel.replicas.elastic_local_sgd import attach_elastic_diloco
from weft.parallel.state.gradients import data_parallel
from weft.train.engine import EngineJob, ReplicaWorld, StepResult
from weft.train.step.train_step import TrainStep
from weft.units import counted, parse_seconds


class OtherWorlds:
    """Connection of this replica's ranks to the other replicas."""

    def __init__(self, job: EngineJob, world: ReplicaWorld, mesh: Mesh, model: nn.Module, ranks: RankGroup):
        self._job, self.world = job, world
        timeout_s = parse_seconds(job.config.launch.meeting_timeout)
        self.party = ReplicaGroup(
            mesh, world.replica, world.meet_at, address_towards(world.meet_at), timeout_s, world.key, ranks.on_first,
            ranks.gather, self._log if mesh.rank == 0 else lambda line: None,
        )  # fmt: skip
        self.sync = attach_elastic_diloco(model, data_parallel(model), mesh, job.plan, self.party)
        train = job.config.train
        most = "" if train.global_cost is None else f" train.global_cost={train.global_cost:g}"
        self.sync.terms = f" seed={job.config.seed} train.global_batch={train.global_batch}{most}"

    def stop_with(self, step: TrainStep) -> None:
        """Make this rank stop waiting for other replicas as soon as a stop is requested on `step`."""
        asked = weakref.ref(step)  # model and groups must be freed before the ranks disconnect
        self.party.wants_out = lambda: (step := asked()) is not None and step.wants_stop

    @property
    def over(self) -> Mapping[str, Any] | None:
        """Result of the other replicas if they ended training without this one, else None."""
        return self.sync.over

    def before_step(self, number: int) -> None:
        """Note the start of a step. `number` is the number of steps done before."""
        self.sync.step = number

    def after_step(self, result: StepResult) -> StepResult:
        """Record the loss for the other replicas, and return the result with the outcome of the outer step, if any."""
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
        """Join the other replicas before the first step, if they wait. Return the step to continue from.

        Returns None if a stop was requested while waiting.
        """
        self.sync.step = step
        self.sync.rejoin()
        return None if self.sync.owes_meeting else self.sync.step

    def state(self) -> dict[str, Any]:
        """Return the JSON state of this replica for a checkpoint."""
        sync, plan = self.sync, self._job.plan
        anchor = {"meetings": sync.meetings, "token": sync.token, "owes_meeting": sync.owes_meeting}
        return {"plan": str(plan), "replica": {"place": sync.place, "of": sync.replicas, **anchor}}

    def lines(self) -> Sequence[str]:
        """Return lines about the replica and its schedule of outer steps, for the start of a run."""
        sync = self.sync
        every = counted(sync.every, "step")
        return [
            (
                f"replica {sync.place} of {sync.replicas}, synchronizes with the others every {every} at "
                f"{self.world.meet_at}"
            )
        ]

    def end(self) -> None:
        """Notify the other replicas that this one has ended."""
        self.party.end(str(self._job.folder.path.absolute()))

    def close(self) -> None:
        self.party.close()

    def _log(self, line: str) -> None:
        self._job.tell(line)
        self._job.record({"event": "warning", "step": self.sync.step, "text": line})
