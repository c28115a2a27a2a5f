"""Local SGD between replicas with separate worlds: the rendezvous, and the start and end of a replica's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.object_store import Location, located
from weft.comm.mesh import Mesh
from weft.comm.replica_client import ReplicaGroup
from weft.comm.replica_rendezvous import address_towards
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.parallel.elastic_local_sgd import attach_elastic_diloco
from weft.parallel.state.gradients import data_parallel
from weft.train.checkpointer import Keeper
from weft.train.engine import Engine, EngineJob, ReplicaWorld, StepResult
from weft.train.folder import RunFolder
from weft.train.hooks import Progress
from weft.train.signals import stop_on_signal
from weft.train.trainer import ASKED_TO_STOP, Trainer
from weft.units import counted, parse_seconds


def plan_within(plan: Plan, world: ReplicaWorld | None) -> Plan:
    """Return the plan of the ranks in one world: the full plan, or the one for a single replica.

    Args:
        plan: plan of all replicas.
        world: the replica of these ranks; None if all ranks are one world.
    """
    return plan if world is None else plan.replace(dp_replicate=1, sync="step", compress="none")


class OtherWorlds:
    """Connection of this replica's ranks to the other replicas.

    Args:
        job: the engine's job.
        world: this replica and the address of the rendezvous server.
        mesh: mesh of this replica.
        model: a model that is parallelized over the mesh.
        on_first: runs a function on rank 0 of the replica and returns its result on all ranks.
        gather: returns the bytes of each rank of the replica.
        stops: returns True if a stop of this rank was requested.
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
        """Note the begin of a step. `number` is the steps done before."""
        self.sync.step = number

    def after_step(self, result: StepResult) -> StepResult:
        """Return a step's result with the outcome of an outer step after it.

        Args:
            result: result of this replica alone.
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
        """Join the other replicas before the first step, if they wait. Return the step to continue from.

        Returns None if a stop was requested.

        Args:
            step: steps done.
        """
        self.sync.step = step
        self.sync.rejoin()
        return None if self.sync.owes_meeting else self.sync.step

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint about this replica that is not arrays."""
        sync, plan = self.sync, self._job.plan
        anchor = {"meetings": sync.meetings, "token": sync.token, "owes_meeting": sync.owes_meeting}
        return {"plan": str(plan), "replica": {"place": sync.place, "of": sync.replicas, **anchor}}

    def lines(self) -> Sequence[str]:
        """Return the replica and its schedule of outer steps, for the opening of a run."""
        sync = self.sync
        every = counted(sync.every, "step")
        return [f"replica {sync.place} of {sync.replicas}, meets the others every {every} at {self.world.meet_at}"]

    def end(self) -> None:
        """Send the others the end of this replica."""
        self.party.end(str(self._job.folder.path.absolute()))

    def close(self) -> None:
        """Close the connection."""
        self.party.close()

    def _say(self, line: str) -> None:
        self._job.tell(line)
        self._job.on_hang({"event": "warning", "step": self.sync.step, "text": line})


# A run that is one of several replicas with separate worlds: its start, and its end among the others.


class ReplicaCoordinator:
    """Coordinates a replica's run with the others, through its engine and their folders. All ranks call it together.

    `is_unsaved` is True if no checkpoint of this replica has its initial weights.

    Args:
        folder: folder of this replica.
        config: the run's config.
        engine: engine of this replica.
        is_alone: there are no other replicas, and every method does nothing.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, engine: Engine, *, is_alone: bool = False):
        self.is_unsaved, self._is_alone = False, is_alone
        self._folder, self._config, self._engine = folder, config, engine
        self._joint_parts = RankGroup(engine.rank, engine.plan.world_size, engine.on_first, engine.gather)

    def elsewhere(self, own: int | None) -> Location | None:
        """Return the checkpoint of another replica to resume from, or None to resume from this replica's own.

        Args:
            own: step of this replica's newest checkpoint, or None.
        """
        if self._is_alone or self._config.resume.step:
            return None
        path = self._newest(self._engine.on_first(lambda: newest_of_others(self._folder, own)))
        self.is_unsaved = path is not None
        return path

    def rejoin(self, keeper: Keeper, progress: Progress) -> bool:
        """Join replicas that are further, before the first step. Return False if a stop was requested meanwhile.

        Args:
            keeper: this replica's checkpoints.
            progress: receives the step to continue from.
        """
        if self._is_alone:
            return True
        saved = self._engine.state()
        with stop_on_signal(self._engine):
            step = self._engine.rejoin(progress.step)
        if step is None:
            return False
        self.is_unsaved = self.is_unsaved or self._engine.state() != saved
        if step != progress.step:
            keeper.moved(progress.step, step)
            progress.step = step
        return True

    def end(self, keeper: Keeper, trainer: Trainer, reason: str) -> str:
        """Send the others the end of this replica, or load their model if they have ended. Return the reason.

        Args:
            keeper: this replica's checkpoints.
            trainer: a trainer that has ended and saved.
            reason: why it ended.
        """
        if self._is_alone:
            return reason
        over = self._engine.over
        if over is None:
            if reason != ASKED_TO_STOP and trainer.parting is None:
                self._engine.end()
            return reason
        if not self._take_over(over, keeper, trainer.progress):
            return f"{reason} at step {over['step']}; the machine of replica {over['replica']} has their model"
        return f"{reason}; their model, of step {over['step']}, was taken over"

    def _take_over(self, over: Mapping[str, Any], keeper: Keeper, progress: Progress) -> bool:
        """Load the model of replicas that have ended and save it here, if this machine can read it."""
        engine, where = self._engine, RunFolder(Path(over["where"]))
        path = self._newest(engine.on_first(lambda: _checkpoints_of(where, int(over["token"]))))
        if path is None:
            return False
        keeper.ended(True)
        with engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(path, lazily=True)
            engine.load(checkpoint)
        taken = Progress(**checkpoint.state["progress"])
        keeper.moved(taken.step + 1, taken.step)
        for one in fields(taken):
            setattr(progress, one.name, getattr(taken, one.name))
        keeper.save(progress, True, last=True)
        keeper.ended(True)
        return True

    def _newest(self, root: str | None) -> Location | None:
        found = None if root is None else newest_checkpoint(located(root), together=self._joint_parts)
        return None if found is None else found.path


def newest_of_others(folder: RunFolder, own: int | None) -> str | None:
    """Return the checkpoints folder of another replica to resume from, or None to use the replica's own.

    Args:
        folder: folder of the replica.
        own: step of its newest checkpoint, or None.
    """
    newest: list[tuple[int, str]] = []
    for other in folder.other_replicas():
        if saved := list_checkpoints(other.checkpoints):
            checkpoint = load_checkpoint(saved[-1], lazily=True)
            by_one = checkpoint.state.get("replica")
            # A checkpoint that a replica saved alone is used by another one only as a last resort: they share only the
            # anchor, which before the first outer step is everyone's initial model.
            if (own is None or checkpoint.step > own) if by_one is None else (own is None and by_one["meetings"] > 0):
                newest.append((checkpoint.step, str(other.checkpoints)))
    return max(newest)[1] if newest else None


def _checkpoints_of(folder: RunFolder, token: int) -> str | None:
    """Return the checkpoints folder of an ended replica if its newest checkpoint has the anchor with that token."""
    if not (folder.path / "config.toml").is_file() or not (saved := list_checkpoints(folder.checkpoints)):
        return None
    of_replica = load_checkpoint(saved[-1], lazily=True).state.get("replica") or {}
    return str(folder.checkpoints) if of_replica.get("token") == token else None
