"""What one rank does for all: files are written and looked for once, and all ranks learn how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from weft.comm import all_reduce, broadcast
from weft.errors import CheckpointError, WeftError
from weft.mesh import Mesh


def on_first(mesh: Mesh, act: Callable[[], Any]) -> Any:
    """The JSON value that the first rank's `act` returns, on all ranks. What it raises, all raise. A collective."""
    said, failure = None, None
    if mesh.rank == 0:
        try:
            said = {"value": act()}
        except Exception as error:
            failure = error
            told = str(error) if isinstance(error, WeftError) else f"rank 0: {type(error).__name__}: {error}"
            said = {"error": told}
    said = _tell(mesh, said)
    if failure is not None:
        raise failure
    if "error" in said:
        raise CheckpointError(said["error"])
    return said["value"]


def on_each(mesh: Mesh, act: Callable[[], Any]) -> Any:
    """What `act` returns on this rank, where no rank fails: else all raise, so that none waits. A collective."""
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
        raise CheckpointError(f"rank {mesh.world_size - worst} could not do what the other ranks did; it says why.")
    return value


def _tell(mesh: Mesh, value: Any) -> Any:
    """A JSON value of the first rank, on all."""
    text = json.dumps(value).encode()
    length = int(broadcast(torch.tensor([len(text)], device=mesh.device), mesh.world))
    sent = torch.zeros(length, dtype=torch.uint8, device=mesh.device)
    if mesh.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return json.loads(bytes(broadcast(sent, mesh.world).tolist()))
