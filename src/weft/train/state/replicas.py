"""Checkpoints of replicas that meet only every so many steps.

    model       the anchor: what all replicas started from at their last meeting, with the first one's whole numbers
    outer       the outer step's momentum, by name of the parameter
    optimizer   the first replica's states
    replicas    what replica r has by itself: `r/optimizer/...`, of all but the first; between meetings `r/model/...`,
                `r/sent/...`, the weights of a fragment that was on its way, as they left; and `r/owed/...`, what it
                left out of what it sent
    sync        `counts`: steps since the last meeting, meetings, replicas

So `model` is a whole model that any plan reads. As many replicas go on exactly, others from the anchor.

A replica that is a world of its own saves the same for itself alone, and says so in the state: `replica` has its
`place`, `of` how many, how many `meetings` its anchor has been through, that one's `token`, and whether it
`owes_meeting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from weft.checkpoint import Checkpoint, SavedPiece
from weft.parallel import DataParallel, data_parallel
from weft.parallel.local_tensors import StateSource, Stretch, read_whole
from weft.parallel.zero import ApartSync, RareSync, StreamedSync, rare_sync

_COUNTS, _OWN = "counts", "replicas"


class OpensGroup(Protocol):
    """Opens a group of a checkpoint, or the tensors of it whose names begin with `start`."""

    def __call__(self, checkpoint: Checkpoint, group: str, start: str = "") -> StateSource: ...


def replica_stretches(
    sync: RareSync, engine: DataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Stretch]]:
    """Yield what this rank holds for a checkpoint, each with its group; no collective.

    Args:
        sync: of the model.
        engine: of the model.
        optimizer: adopted by a step.
    """
    if sync.place == 0 or sync.is_apart:
        anchors = {one.name: one for one in sync.anchors()}
        yield from (("model", anchors.get(one.name, one)) for one in engine.stretches())
        yield from (("outer", one) for one in sync.momenta())
        yield from (("optimizer", one) for one in engine.state_stretches(optimizer))
    else:
        yield from ((_OWN, _within(f"{sync.place}/optimizer", one)) for one in engine.state_stretches(optimizer))
    if sync.differs:
        yield from ((_OWN, _within(f"{sync.place}/model", one)) for one in sync.held())
    yield from ((_OWN, _within(f"{sync.place}/owed", one)) for one in sync.owed())
    if isinstance(sync, StreamedSync):
        yield from ((_OWN, _within(f"{sync.place}/sent", one)) for one in sync.sent())


def counts_here(sync: RareSync) -> Iterator[SavedPiece]:
    """Yield the counts that a checkpoint keeps, on the first rank."""
    if sync.mesh.rank == 0:
        counts = torch.tensor([sync.since, sync.meetings, sync.replicas], dtype=torch.int64)
        yield SavedPiece.whole(f"sync/{_COUNTS}", counts)


def _within(group: str, one: Stretch) -> Stretch:
    return replace(one, name=f"{group}/{one.name}")


@dataclass(frozen=True, slots=True)
class SavedReplicas:
    """What a checkpoint has of replicas. opens: its groups."""

    checkpoint: Checkpoint
    opens: OpensGroup

    def has_all_of(self, sync: RareSync) -> bool:
        """Return whether it has what a replica had by itself.

        Args:
            sync: of the replica.
        """
        if self.by_one is not None:
            return sync.is_apart and self.by_one["place"] == sync.place
        return self.counts()[2] == sync.replicas

    def counts(self) -> tuple[int, int, int]:
        """Return steps since the last meeting, meetings, and replicas; of a checkpoint without any one replica."""
        if not self.checkpoint.entries("sync"):
            return 0, 0, 1
        since, meetings, replicas = read_whole(self.opens(self.checkpoint, "sync"), _COUNTS).tolist()
        return since, meetings, replicas

    def has_own_weights(self, place: int) -> bool:
        """Return whether it has weights of one replica beside the anchor.

        place: of the replica.
        """
        return any(name.startswith(f"{place}/model/") for name in self.checkpoint.entries(_OWN))

    @property
    def by_one(self) -> Mapping[str, Any] | None:
        """What the replica that saved it for itself says of itself; None: all saved together."""
        return self.checkpoint.state.get("replica")


def resume_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedReplicas
) -> tuple[list[str], StateSource]:
    """Go on as the replicas of a checkpoint whose `model` is loaded. All ranks call it.

    Returns lines that say what is lost, and where the optimizer's states are.

    Args:
        model: what `parallelize` returned.
        optimizer: of the model.
        saved: what there is.
    """
    sync, engine, checkpoint = rare_sync(model), data_parallel(model), saved.checkpoint
    since, meetings, replicas = saved.counts()
    states = saved.opens(checkpoint, "optimizer")
    if sync is None:
        return ([] if replicas == 1 else [_lost(saved, "the outer momentum")]), states
    engine.adopt(optimizer)
    sync.take_anchor()
    momenta = saved.opens(checkpoint, "outer")
    with torch.no_grad():
        for one in sync.momenta() if checkpoint.entries("outer") else ():
            one.fill(momenta)
    # A checkpoint of replicas that met in every step: the meetings fall on multiples of H all the same.
    sync.since = since if replicas > 1 else checkpoint.step % sync.every
    sync.meetings = meetings
    if isinstance(sync, ApartSync):
        sync.owes_meeting = saved.by_one is not None and bool(saved.by_one["owes_meeting"])
        sync.began_with(checkpoint.step, sync.token_of_anchor() if saved.by_one is None else saved.by_one["token"])
    is_whole = saved.has_all_of(sync)
    whose = [f"{place}/owed/" for place in ([sync.place] if is_whole else range(replicas))]
    sync.take_owed(saved.opens(checkpoint, _OWN), whose, 1 if is_whole else replicas)
    if not is_whole:
        return ([] if replicas == 1 else [_lost(saved)]), states
    if saved.has_own_weights(sync.place):
        weights = saved.opens(checkpoint, _OWN, f"{sync.place}/model/")
        for one in sync.held():
            one.fill(weights)
        engine.publish()
        sync.differs = True
    if isinstance(sync, StreamedSync):
        sync.since %= sync.every
        sync.send_again(saved.opens(checkpoint, _OWN), f"{sync.place}/sent/")
    return [], states if sync.place == 0 or saved.by_one else saved.opens(checkpoint, _OWN, f"{sync.place}/optimizer/")


def _lost(saved: SavedReplicas, more: str = "") -> str:
    """What does not come along where other replicas go on, as a line for people."""
    since, _, replicas = saved.counts()
    steps = f"in the {f'{since} steps' if since > 1 else 'step'} since" if since else "since then"
    learnt = [f"what each of them learnt {steps}"] * (since > 0 or saved.has_own_weights(0))
    parts = [*learnt, *([more] if more else []), "the optimizer states of all but the first"]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    start = f"the run goes on from the weights of the last meeting of {replicas} replicas"
    return f"{start}. {listed[0].upper()}{listed[1:]} are lost."
