"""Replicas that are worlds of their own: a meeting takes those who are there, and counts for all of them or for none.

A replica alone decides nothing. It asks where all leave word (`weft.comm`), exchanges with the members
into memory of its own, and takes the result over only once it hears that the meeting counts. So

    away            the others go on without it; its anchor is older then, and at the next meeting it gives nothing and
                    takes anchor, momentum and step from those whose anchor is the newest
    cut off         it trains on, and meets when it reaches the others again
    failed          nothing has changed; those who come again meet again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.mesh import Axis, Mesh
from weft.comm.replica_client import Call, ReplicaGroup
from weft.config.plan import Plan
from weft.errors import CommError
from weft.parallel.local_sgd import RareSync, keep_sync
from weft.parallel.state.flat_slices import FlatSlice
from weft.parallel.state.gradients import DataParallel

#: Meetings begun for one turn: where each fails, the replica trains on until the next turn.
_ATTEMPTS = 3
_MASK = 2**62 - 1


@dataclass(slots=True)
class _Found:
    """What an exchange gave for one run of tensors; anchor, momentum: where they came from another replica."""

    delta: torch.Tensor
    anchor: torch.Tensor | None = None
    momentum: torch.Tensor | None = None


class ElasticDiLoCo(RareSync):
    """The meetings of one replica with others that are worlds of their own.

    step: steps done; who leaves some out sets it before each. goes_to: the step to go on from, where others were
    further at a meeting. over: what is known of the others, where they have ended without this replica. owes_meeting:
    the last step was to end with a meeting, which this replica left because it was asked to stop. terms: what else must
    be the same on all replicas, in words.

    Args:
        model: parallelized over the mesh of this replica.
        engine: of the model.
        mesh: of this replica.
        plan: of all replicas.
        party: this rank's.
    """

    is_apart = True

    def __init__(self, model: nn.Module, engine: DataParallel, mesh: Mesh, plan: Plan, party: ReplicaGroup):
        super().__init__(model, engine, mesh, plan)
        self.party = party
        self.replicas, self.place = plan.dp_replicate, party.replica
        self.token = self.step = 0
        self.goes_to: int | None = None
        self.over: dict[str, object] | None = None
        self.owes_meeting = False
        self.terms = ""
        self._is_first = True
        self._away: list[int] = []  # who brought nothing to the last meeting

    @property
    def is_due(self) -> bool:
        """Whether the step under way ends with a meeting; one that was missed is left out until the next turn."""
        return self.meets_now or (self.since + 1) % self.every == 0

    def begin(self) -> None:
        """Start from the weights as they are: those of all replicas come from one seed, or from one folder."""
        if not self._runs:
            self.take_anchor()
            self.began_with(0, self.token_of_anchor())

    def token_of_anchor(self) -> int:
        """Return a token made of the anchor: who has other weights takes those of the others. All ranks call it."""
        own = sum(int(run.anchor.view(torch.int32).sum(dtype=torch.int64)) for run in self._runs)
        whole = all_reduce(torch.tensor([own], dtype=torch.int64, device=self.mesh.device), self.mesh.world)
        return int(whole) & _MASK

    def began_with(self, step: int, token: int) -> None:
        """Take a step and an anchor to stand at.

        Args:
            step: steps done.
            token: names the anchor; equal of equal ones alone.
        """
        self.step, self.token = step, token
        self._say()

    @torch.no_grad()
    def rejoin(self) -> None:
        """Meet before the first step, where a meeting is owed or others have a newer anchor. All ranks call it.

        What a replica would learn from an older anchor counts for nothing, so it waits for a meeting instead.
        """
        self._is_first, self.goes_to = False, None
        with self.mesh.pulse.doing("waits for the other replicas to begin"):
            self.party.begin()
        if self.party.is_behind() or self.owes_meeting:
            self._sync()

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step, and meet where that is due. All ranks of the replica call it after the weights are published.

        Raises:
            CommError: where this replica's weights are not finite, or another one trains another model.
        """
        is_due, self.meets_now, self.goes_to = self.is_due, False, None
        self.since, self.differs = self.since + 1, True
        self.step += 1
        self._say()
        if self._is_first:  # one that starts again may find the others further on: what it learns counts for nothing
            self._is_first = False
            is_due = self.party.is_behind() or is_due
        if is_due:
            self._sync()

    def _say(self) -> None:
        self.party.figures = {**self.party.figures, "number": self.meetings, "token": self.token, "step": self.step}

    def _sync(self) -> None:
        self.owes_meeting = False
        self._engine.arrive()
        held = self.held()
        self._refuse_unfit(held)
        with self.mesh.pulse.doing("meets the other replicas"):
            self._sync_others(held)

    def _sync_others(self, held: Sequence[FlatSlice]) -> None:
        holds = f"{len(held)} tensors of {sum(one.flat.numel() for one in held)} elements on its first rank"
        outer = f"outer_lr={self.outer_lr:g} outer_momentum={self.outer_momentum:g}"
        layout = f"{holds} ({self.plan} {outer}{self.terms})"
        for _ in range(_ATTEMPTS):
            call = self.party.meet(layout)
            if not isinstance(call, Call):
                self.over = call if call["do"] == "over" else None
                self.owes_meeting = call["do"] == "leave"
                self.party.says(f"step {self.step}: no meeting ({call.get('why') or 'the other replicas have ended'})")
                return
            found = self._exchange(call)
            if self.party.finalize(call, found is not None) and found is not None:
                self._commit(call, found)
                return
            self.party.says(f"step {self.step}: a meeting of replicas {call.members} failed, and nothing was changed")

    def _exchange(self, call: Call) -> list[_Found] | None:
        """What the members' exchange gives, in memory of its own; None where it failed."""
        try:
            with self.party.axis(call) as axis:
                return self._receive(call, axis)
        except (OSError, CommError) as error:
            self.party.says(f"step {self.step}: {error}")
            return None

    def _receive(self, call: Call, axis: Axis) -> list[_Found]:
        gives = self.party.replica in call.givers
        source = None if call.givers == call.members else call.members.index(call.givers[0])
        if self._coders is not None:
            self._coders.take_turn(call.number - 1)  # meetings before this one, as replicas of one world count
        held, found = self.held(), list[_Found]()
        for run in self._runs:
            here, one = run.among(held), _Found(torch.zeros_like(run.anchor))
            if source is not None:
                one.anchor = broadcast(run.anchor.clone(), axis, source)
                one.momentum = None if run.momentum is None else broadcast(run.momentum.clone(), axis, source)
            if gives:
                one.delta = run.anchor - torch.cat([each.flat for each in here])
            all_reduce(one.delta, axis, wire=self._coder(run, here))
            one.delta.div_(len(call.givers))
            found.append(one)
        return found

    def _commit(self, call: Call, found: list[_Found]) -> None:
        held = self.held()
        for run, one in zip(self._runs, found, strict=True):
            here = run.among(held)
            if one.anchor is not None:
                run.anchor.copy_(one.anchor)
            if one.momentum is not None and run.momentum is not None:
                run.momentum.copy_(one.momentum)
            self._step(run, one.delta, averages=self._is_buffer(here))
            self._put(here, run)
        self._engine.publish()
        self.since, self.meetings, self.token, self.differs = 0, call.number, call.token, False
        self._notify_all(call)
        if call.step != self.step:
            self.goes_to = self.step = call.step
        self._say()

    def _notify_all(self, call: Call) -> None:
        """A line for people, where other replicas learnt what counts than at the meeting before."""
        away = sorted({*range(self.replicas)} - {*call.givers})
        if self.party.replica in away:
            self.party.says(f"step {self.step}: joined the others again at step {call.step}, with their weights")
        elif away != self._away and away:
            several, others = "s" if len(away) > 1 else "", ", ".join(map(str, away))
            self.party.says(f"step {self.step}: meetings go on without replica{several} {others}")
        elif away != self._away:
            self.party.says(f"step {self.step}: all replicas take part in meetings again")
        self._away = away


def attach_elastic_diloco(
    model: nn.Module, engine: DataParallel, mesh: Mesh, plan: Plan, party: ReplicaGroup
) -> ElasticDiLoCo:
    """Keep with a model that its replicas are worlds of their own, which meet as the plan says; returns the meetings.

    Args:
        model: parallelized over the mesh of this replica.
        engine: of the model.
        mesh: of this replica.
        plan: of all replicas.
        party: this rank's.
    """
    sync = ElasticDiLoCo(model, engine, mesh, plan, party)
    keep_sync(model, sync)
    return sync
