"""Work that one rank does for all ranks, such as file access; and the state of local SGD replicas in checkpoints."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import Checkpoint
from weft.comm.collectives import all_gather, all_reduce, broadcast
from weft.comm.mesh import Mesh
from weft.errors import CheckpointError, WeftError
from weft.parallel.replicas.elastic_local_sgd import ElasticDiLoCo
from weft.parallel.replicas.local_sgd import RareSync, StreamedSync, rare_sync
from weft.parallel.state.flat_slices import FlatSlice, StateSource, read_full
from weft.parallel.state.gradients import DataParallel, data_parallel


def on_first(mesh: Mesh, act: Callable[[], Any]) -> Any:
    """Run `act` on rank 0 and return its JSON value on all ranks. All ranks must call it.

    Raises:
        CheckpointError: on the other ranks, with the message of the error that `act` raised on rank 0. Rank 0 raises
            the error itself.
    """
    said, failure = None, None
    if mesh.rank == 0:
        try:
            said = {"value": act()}
        except BaseException as error:  # including interrupts, because the others wait for a message
            failure = error
            told = str(error) if isinstance(error, WeftError) else f"rank 0: {type(error).__name__}: {error}"
            said = {"error": told}
    said = _broadcast(mesh, said)
    if failure is not None:
        raise failure
    if "error" in said:
        raise CheckpointError(said["error"])
    return said["value"]


def gather(mesh: Mesh, record: bytes) -> list[bytes]:
    """Return the bytes of all ranks, in rank order, on every rank. All ranks must call it."""
    if mesh.world_size == 1:  # skip the collective on a single rank
        return [record]
    text = torch.frombuffer(bytearray(record + b"."), dtype=torch.uint8).to(mesh.device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=mesh.device), mesh.world, op="max"))
    padded = torch.nn.functional.pad(text, (0, longest - text.numel()), value=ord(" "))
    rows = all_gather(padded, mesh.world).view(mesh.world_size, -1).cpu().numpy()
    return [row.tobytes().rstrip(b" ")[:-1] for row in rows]


def rank_group(mesh: Mesh) -> RankGroup:
    """Return the group of all ranks with this mesh's collectives, for checkpoints."""
    act: Callable[[Callable[[], Any]], Any] = functools.partial(on_first, mesh)
    return RankGroup(mesh.rank, mesh.world_size, act, functools.partial(gather, mesh))


def on_each(mesh: Mesh, act: Callable[[], Any]) -> Any:
    """Run `act` on every rank and return its result. If it fails on any rank, all raise. All ranks must call it.

    Raises:
        CheckpointError: if `act` raised on another rank, which it names. This rank's own error is raised unchanged.
    """
    value, failure = None, None
    try:
        value = act()
    except Exception as error:
        failure = error
    failed = torch.tensor([mesh.world_size - mesh.rank if failure else 0], device=mesh.device)
    worst = int(all_reduce(failed, mesh.world, op="max"))
    if failure is not None:
        raise failure
    if worst:
        raise CheckpointError(
            f"rank {mesh.world_size - worst} failed where the other ranks succeeded; its log has the reason."
        )
    return value


def _broadcast(mesh: Mesh, value: Any) -> Any:
    text = json.dumps(value).encode()
    if mesh.world_size == 1:
        return json.loads(text)
    length = int(broadcast(torch.tensor([len(text)], device=mesh.device), mesh.world))
    sent = torch.zeros(length, dtype=torch.uint8, device=mesh.device)
    if mesh.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return json.loads(bytes(broadcast(sent, mesh.world).tolist()))


# Checkpoints of local SGD replicas.

COUNTS, _OWN = "counts", "replicas"


class OpensGroup(Protocol):
    """Function that opens a group of a checkpoint, or only its tensors whose names begin with `start`."""

    def __call__(self, checkpoint: Checkpoint, group: str, start: str = "") -> StateSource: ...


def replica_slices(
    sync: RareSync, engine: DataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, FlatSlice]]:
    """Yield the flat slices of this rank for a checkpoint, each with its group. Local; no communication.

    Args:
        optimizer: an optimizer that a train step manages.
    """
    if sync.place == 0 or sync.is_apart:
        anchors = {one.name: one for one in sync.anchors()}
        yield from (("model", anchors.get(one.name, one)) for one in engine.model_slices())
        yield from (("outer", one) for one in sync.momenta())
        yield from (("optimizer", one) for one in engine.state_slices(optimizer))
    else:
        yield from ((_OWN, _within(f"{sync.place}/optimizer", one)) for one in engine.state_slices(optimizer))
    if sync.differs:
        yield from ((_OWN, _within(f"{sync.place}/model", one)) for one in sync.master_slices())
    yield from ((_OWN, _within(f"{sync.place}/owed", one)) for one in sync.residual_slices())
    if isinstance(sync, StreamedSync):
        yield from ((_OWN, _within(f"{sync.place}/sent", one)) for one in sync.sent())


def _within(group: str, one: FlatSlice) -> FlatSlice:
    return replace(one, name=f"{group}/{one.name}")


@dataclass(frozen=True, slots=True)
class SavedReplicas:
    """The state of local SGD replicas in a checkpoint. `opens` opens a group of the checkpoint."""

    checkpoint: Checkpoint
    opens: OpensGroup

    def has_all_of(self, sync: RareSync) -> bool:
        """Return True if the checkpoint has all state that only the replica of `sync` needs."""
        if self.by_one is not None:
            return sync.is_apart and self.by_one["place"] == sync.place
        return self.counts()[2] == sync.replicas

    def counts(self) -> tuple[int, int, int]:
        """Return (steps since the last outer step, outer steps, replicas), or (0, 0, 1) without replicas."""
        if not self.checkpoint.entries("sync"):
            return 0, 0, 1
        since, meetings, replicas = read_full(self.opens(self.checkpoint, "sync"), COUNTS).tolist()
        return since, meetings, replicas

    def has_own_weights(self, place: int) -> bool:
        """Return True if the checkpoint has weights of the replica with index `place`, in addition to the anchor."""
        return any(name.startswith(f"{place}/model/") for name in self.checkpoint.entries(_OWN))

    @property
    def by_one(self) -> Mapping[str, Any] | None:
        """State of the replica that saved the checkpoint alone, or None if all saved it together."""
        return self.checkpoint.state.get("replica")


def resume_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedReplicas
) -> tuple[list[str], StateSource]:
    """Restore the replicas of a checkpoint whose "model" group is already loaded. All ranks call it.

    Returns messages about lost state, and the `StateSource` from which to load the optimizer's states.
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
    # If the checkpoint's run synchronized in every step, outer steps still happen at multiples of H.
    sync.since = since if replicas > 1 else checkpoint.step % sync.every
    sync.meetings = meetings
    if isinstance(sync, ElasticDiLoCo):
        sync.owes_meeting = saved.by_one is not None and bool(saved.by_one["owes_meeting"])
        sync.began_with(checkpoint.step, sync.token_of_anchor() if saved.by_one is None else saved.by_one["token"])
    is_whole = saved.has_all_of(sync)
    whose = [f"{place}/owed/" for place in ([sync.place] if is_whole else range(replicas))]
    sync.load_residual(saved.opens(checkpoint, _OWN), whose, 1 if is_whole else replicas)
    if not is_whole:
        return ([] if replicas == 1 else [_lost(saved)]), states
    if saved.has_own_weights(sync.place):
        weights = saved.opens(checkpoint, _OWN, f"{sync.place}/model/")
        for one in sync.master_slices():
            one.fill(weights)
        engine.publish()
        sync.differs = True
    if isinstance(sync, StreamedSync):
        sync.since %= sync.every
        sync.send_again(saved.opens(checkpoint, _OWN), f"{sync.place}/sent/")
    return [], states if sync.place == 0 or saved.by_one else saved.opens(checkpoint, _OWN, f"{sync.place}/optimizer/")


def _lost(saved: SavedReplicas, more: str = "") -> str:
    since, _, replicas = saved.counts()
    steps = f"in the {f'{since} steps' if since > 1 else 'step'} since" if since else "since then"
    learnt = [f"what each of them learnt {steps}"] * (since > 0 or saved.has_own_weights(0))
    parts = [*learnt, *([more] if more else []), "the optimizer states of all but the first"]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    start = f"the run continues from the weights of the last synchronization of {replicas} replicas"
    return f"{start}. {listed[0].upper()}{listed[1:]} are lost."
