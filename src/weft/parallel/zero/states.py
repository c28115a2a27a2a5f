"""Exchange of states between ranks, for both ZeRO engines: optimizer states, wire format states, and full tensors.

A rank does not know which optimizer states other ranks have, so ranks first exchange a table (`exchange`). It contains,
per parameter and key, the owner, shape and dtype, and the value itself if it is a single number (step counters).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from weft.comm.collectives import broadcast, gather_json
from weft.comm.mesh import Axis
from weft.comm.wire.low_rank import BASIS
from weft.errors import CheckpointError
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import DataParallel

#: One state of one parameter: owner on the shard axis, shape ("cut" if it is sharded like the parameter), dtype, and
#: the value if it is a single number.
StateEntry = dict[str, Any]
#: dtypes by the name that `str(dtype)` returns.
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def broadcast_buffers(buffers: Iterable[tuple[torch.Tensor, Axis]]) -> None:
    """Copy each buffer from the first rank of its axis. All ranks must call it."""
    for buffer, axis in buffers:
        sent = broadcast(buffer.detach().contiguous(), axis)
        if sent.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(sent)


def exchange(
    mine: dict[str, dict[str, StateEntry]], axis: Axis, device: torch.device
) -> dict[str, dict[str, StateEntry]]:
    """Combine the tables of all ranks. Collective over the axis.

    mine: this rank's states, by parameter and key. If several ranks have an entry, the first rank's is kept.
    """
    joined: dict[str, dict[str, StateEntry]] = {}
    for table in gather_json(mine, axis, device):
        for name, entries in table.items():
            for key, entry in entries.items():
                joined.setdefault(name, {}).setdefault(key, entry)
    return joined


def untrained(full_name: str) -> CheckpointError:
    """Build the error for a saved state, such as "head.weight/exp_avg", of a parameter that the optimizer lacks."""
    return CheckpointError(
        f"optimizer state {full_name!r}: this optimizer does not train that parameter. "
        f"Resume with the optimizer and the frozen parameters of the run that saved it."
    )


def not_joinable(full_name: str, shape: torch.Size) -> CheckpointError:
    """Build the error for a sharded parameter's state whose shape differs from the parameter's."""
    return CheckpointError(
        f"optimizer state {full_name!r}: its shape {tuple(shape)} is not the parameter's, so it cannot be joined. "
        f"Say elementwise=False on the optimizer."
    )


# States that wire formats keep from step to step, in checkpoints: each rank's tensors, valid only for the plan that
# saved them.

#: Key of the plan that saved the other tensors, as bytes of its text.
_PLAN = "plan"
#: Key of the number of applied steps, for wire formats that round randomly or start later. Valid under any plan.
_TURN = "turn"


def local_wire_state(engine: DataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's state of compressed communication as (`rank/tensor/role/name`, tensor).

    The step count follows if the encoding depends on it, and the plan if there are tensors.
    """
    mesh, states = engine.axes.mesh, engine.coders.states()
    yield from ((f"{mesh.rank}/{name}", tensor) for name, tensor in states.items())
    if engine.coders.counts_turns:
        yield _TURN, torch.tensor([engine.coders.turn], dtype=torch.int64)
    if states:
        yield _PLAN, torch.frombuffer(bytearray(str(mesh.plan).encode()), dtype=torch.uint8).clone()


def load_carried(engine: DataParallel, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Load this rank's tensors of `local_wire_state`. Return a message if they are dropped, else [].

    The step count fits any plan. The other tensors are dropped if another plan saved them, without a message if all of
    them are low-rank bases, which are optional.
    """
    coders, mesh = engine.coders, engine.axes.mesh
    coders.forget()
    if _TURN in tensors:
        coders.take_turn(int(tensors[_TURN]))
    saved = bytes(tensors[_PLAN].tolist()).decode() if _PLAN in tensors else ""
    if saved and saved != str(mesh.plan):
        if all(name in (_TURN, _PLAN) or f"/{BASIS}/" in name for name in tensors):
            return []  # only low-rank bases, which are optional
        return [
            f"the rounding errors of reduce under '{saved}' are dropped: this plan is '{mesh.plan}', and it starts "
            "without them"
        ]
    start = f"{mesh.rank}/"
    found = {name.removeprefix(start): tensors[name] for name in tensors if name.startswith(start)}
    coders.load({name: tensor.to(mesh.device, copy=True) for name, tensor in found.items()})
    return []


# Named tensors of all pipeline stages, sent to every rank one at a time.

#: Size in bytes of the header that a stage sends before each tensor: name, shape, dtype.
HEADER_BYTES = 1024


def across_stages(
    pairs: Iterator[tuple[str, torch.Tensor]], stages: Axis, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all stages, stage by stage, each name once. Collective over the pp axis.

    With several stages, raises CheckpointError on the stage that has a tensor with a name of more than about 900
    characters.
    """
    if stages.size == 1:
        yield from pairs
        return
    seen: set[str] = set()
    for stage in range(stages.size):
        for name, tensor in _of_stage(pairs, stage, stages, device):
            if name not in seen:
                seen.add(name)
                yield name, tensor


def _of_stage(
    pairs: Iterator[tuple[str, torch.Tensor]], stage: int, stages: Axis, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    while True:
        name, tensor = next(pairs, (None, None)) if stage == stages.rank else (None, None)
        told = None if tensor is None else {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
        text = json.dumps(told).encode()
        if len(text) > HEADER_BYTES:
            raise CheckpointError(f"tensor {str(told)[:60]}...: its name is too long. Use at most 900 characters.")
        header = torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8).to(device)
        said = json.loads(bytes(broadcast(header, stages, stage).tolist()))
        if said is None:
            return
        whole = torch.empty(said["shape"], dtype=DTYPES[said["dtype"]], device=device)
        if tensor is not None:
            whole.copy_(tensor)
        yield said["name"], broadcast(whole, stages, stage)


# Error feedback in checkpoints: rounding errors of gradients that replicas add in the next step, by parameter name.

#: Separates a parameter's name from the residual's owner: the index of a replica, or the owner of a part of the sum.
MIDDLE = "/residual."


def replicas_in(source: StateSource) -> int:
    """Return the number of replicas with a residual in a checkpoint."""
    return len({name.rpartition(MIDDLE)[2] for name in source.entries} - {"owner"})


def read_residual(like: FlatSlice, source: StateSource, whose: tuple[str, ...] = ()) -> None:
    """Add a residual from a checkpoint to a flat slice, for the slice's elements.

    like: flat slice named `parameter/residual.OWNER`, to whose memory the residual is added. whose: owners to read;
    empty reads the sum over all owners.
    """
    param = like.name.rpartition(MIDDLE)[0]
    for name in source.entries:
        owner, middle, one = name.rpartition(MIDDLE)
        if middle and owner == param and (not whose or one in whose):
            found = torch.empty_like(like.flat)
            replace(like, name=name, flat=found, home=None).fill(source)
            like.flat.add_(found)
