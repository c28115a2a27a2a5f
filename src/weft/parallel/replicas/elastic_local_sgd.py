"""Local SGD over replicas that are separate jobs: an outer step includes the available replicas, or fails for all.

A replica asks the coordinator (`weft.comm.replica_rendezvous`) which replicas take part in an outer step, exchanges
weights with them into separate buffers, and applies the result only when the coordinator confirms the outer step.
Cases of a replica:

    away            the others continue without it. Its anchor is then outdated: in the next outer step it contributes
                    nothing, and receives anchor, momentum and step from a replica with the newest anchor
    disconnected    it continues to train, and synchronizes when it reaches the others again
    failed          if the exchange fails on any replica, no weights change, and the available replicas try again
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
from weft.parallel.replicas.local_sgd import RareSync, keep_sync, put_anchor
from weft.parallel.state.flat_slices import FlatSlice
from weft.parallel.state.gradients import DataParallel

#: Attempts per outer step. If all fail, the replica trains until the next one is due.
_ATTEMPTS = 3
_MASK = 2**62 - 1


@dataclass(slots=True)
class _Found:
    """Result of an exchange for one bundle. anchor, momentum: set if they were copied from another replica."""

    delta: torch.Tensor
    anchor: torch.Tensor | None = None
    momentum: torch.Tensor | None = None


class ElasticDiLoCo(RareSync):
    """Outer steps of one replica with others that are separate jobs.

    Attributes:
        step: number of steps done. A caller that skips steps sets it before each step.
        goes_to: number of steps done at which training continues if the other replicas were at another step, else None.
        over: the coordinator's answer if a replica with a newer anchor has ended its run, else None.
        owes_meeting: True if an outer step was left out, because this replica was requested to stop.
        token: identifies the anchor; replicas have equal tokens only if their anchors are equal.
        terms: further settings that must be equal on all replicas, as text.
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
        self._away: list[int] = []  # replicas without a contribution to the last outer step

    @property
    def is_due(self) -> bool:
        """True if the current step ends with an outer step. If it fails, the replica trains until the next is due."""
        return self.meets_now or (self.since + 1) % self.every == 0

    def begin(self) -> None:
        """Set the anchor to the current weights, at step 0. Does nothing if the anchor is already set.

        The weights are not exchanged, so all replicas must have the same: from one seed, or loaded from one folder.
        """
        if not self._runs:
            self.take_anchor()
            self.began_with(0, self.token_of_anchor())

    def token_of_anchor(self) -> int:
        """Return a checksum of the anchor, for use as `token` at the start. All ranks call it."""
        own = sum(int(run.anchor.view(torch.int32).sum(dtype=torch.int64)) for run in self._runs)
        whole = all_reduce(torch.tensor([own], dtype=torch.int64, device=self.mesh.device), self.mesh.world)
        return int(whole) & _MASK

    def began_with(self, step: int, token: int) -> None:
        """Set the number of steps done and the anchor's token at the start, and report them to the coordinator."""
        self.step, self.token = step, token
        self._log()

    @torch.no_grad()
    def rejoin(self) -> None:
        """Wait for the other replicas to begin, then run an outer step if one is missing. All ranks call it.

        One is missing if `owes_meeting`, or if another replica has a newer anchor: the results of training from an
        outdated anchor would be discarded. Call it before the first step. Raises the errors of `after_step`.
        """
        self._is_first, self.goes_to = False, None
        with self.mesh.pulse.doing("waits for the other replicas to begin"):
            self.party.begin()
        if self.party.is_behind() or self.owes_meeting:
            self._sync()

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step, and run the outer step if it is due. All ranks of the replica call it after publishing weights.

        If `rejoin` was not called before, it is also due in the first step if another replica has a newer anchor.

        In a due outer step, raises CommError if this replica's weights are not finite, or another replica has a
        different model, plan or outer optimizer, and ConfigError if the coordinator has another key.
        """
        is_due, self.meets_now, self.goes_to = self.is_due, False, None
        self.since, self.differs = self.since + 1, True
        self.step += 1
        self._log()
        if self._is_first:  # after a restart, the others may be ahead, and this step would be discarded
            self._is_first = False
            is_due = self.party.is_behind() or is_due
        if is_due:
            self._sync()

    def _log(self) -> None:
        self.party.figures = {**self.party.figures, "number": self.meetings, "token": self.token, "step": self.step}

    def _sync(self) -> None:
        self.owes_meeting = False
        self._engine.wait_for_weights()
        held = self.master_slices()
        self._refuse_unfit(held)
        with self.mesh.pulse.doing("synchronizes with the other replicas"):
            self._sync_others(held)

    def _sync_others(self, held: Sequence[FlatSlice]) -> None:
        holds = f"{len(held)} tensors of {sum(one.flat.numel() for one in held)} elements on its first rank"
        outer = f"outer_lr={self.outer_lr:g} outer_momentum={self.outer_momentum:g}"
        layout = f"{holds} ({self.plan} {outer}{self.terms})"
        for _ in range(_ATTEMPTS):
            call = self.party.wait_for_round(layout)
            if not isinstance(call, Call):
                self.over = call if call["do"] == "over" else None
                self.owes_meeting = call["do"] == "leave"
                self.party.says(
                    f"step {self.step}: no synchronization ({call.get('why') or 'the other replicas have ended'})"
                )
                return
            found = self._exchange(call)
            if self.party.finalize(call, found is not None) and found is not None:
                self._commit(call, found)
                return
            self.party.says(
                f"step {self.step}: a synchronization of replicas {call.members} failed, and nothing was changed"
            )

    def _exchange(self, call: Call) -> list[_Found] | None:
        """Exchange weights with the members of a round. Return the results, or None if the exchange failed."""
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
            self._coders.take_turn(call.number - 1)  # number of earlier outer steps, as in `RareSync`
        held, found = self.master_slices(), list[_Found]()
        for run in self._runs:
            here, one = run.own_tensors(held), _Found(torch.zeros_like(run.anchor))
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
        held = self.master_slices()
        for run, one in zip(self._runs, found, strict=True):
            here = run.own_tensors(held)
            if one.anchor is not None:
                run.anchor.copy_(one.anchor)
            if one.momentum is not None and run.momentum is not None:
                run.momentum.copy_(one.momentum)
            self._step(run, one.delta, averages=self._is_buffer(here))
            put_anchor(here, run)
        self._engine.publish()
        self.since, self.meetings, self.token, self.differs = 0, call.number, call.token, False
        self._log_members(call)
        if call.step != self.step:
            self.goes_to = self.step = call.step
        self._log()

    def _log_members(self, call: Call) -> None:
        """Print a message if the contributing replicas changed since the previous outer step."""
        away = sorted({*range(self.replicas)} - {*call.givers})
        if self.party.replica in away:
            self.party.says(f"step {self.step}: joined the others again at step {call.step}, with their weights")
        elif away != self._away and away:
            several, others = "s" if len(away) > 1 else "", ", ".join(map(str, away))
            self.party.says(f"step {self.step}: synchronizations continue without replica{several} {others}")
        elif away != self._away:
            self.party.says(f"step {self.step}: all replicas take part in meetings again")
        self._away = away


def attach_elastic_diloco(
    model: nn.Module, engine: DataParallel, mesh: Mesh, plan: Plan, party: ReplicaGroup
) -> ElasticDiLoCo:
    """Give a model an `ElasticDiLoCo`, for replicas that are separate jobs, and return it."""
    sync = ElasticDiLoCo(model, engine, mesh, plan, party)
    keep_sync(model, sync)
    return sync
