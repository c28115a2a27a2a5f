"""What one rank does for all: files are written and looked for once, and all ranks learn how it ended."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from weft.checkpoint import Together
from weft.comm import all_gather, all_reduce, broadcast
from weft.errors import CheckpointError, WeftError
from weft.mesh import Mesh


def on_first(mesh: Mesh, act: Callable[[], Any]) -> Any:
    """Return the JSON value that the first rank's `act` returns, on all ranks. A collective.

    Raises:
        CheckpointError: on the other ranks, with the text of what `act` raised on the first.
    """
    said, failure = None, None
    if mesh.rank == 0:
        try:
            said = {"value": act()}
        except BaseException as error:  # an interrupt too: the others wait for word
            failure = error
            told = str(error) if isinstance(error, WeftError) else f"rank 0: {type(error).__name__}: {error}"
            said = {"error": told}
    said = _tell(mesh, said)
    if failure is not None:
        raise failure
    if "error" in said:
        raise CheckpointError(said["error"])
    return said["value"]


def gather(mesh: Mesh, record: bytes) -> list[bytes]:
    """Return the bytes of every rank in their order, on all ranks. A collective."""
    if mesh.world_size == 1:  # no way through the device for nobody
        return [record]
    text = torch.frombuffer(bytearray(record + b"."), dtype=torch.uint8).to(mesh.device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=mesh.device), mesh.world, op="max"))
    padded = torch.nn.functional.pad(text, (0, longest - text.numel()), value=ord(" "))
    rows = all_gather(padded, mesh.world).view(mesh.world_size, -1).cpu().numpy()
    return [row.tobytes().rstrip(b" ")[:-1] for row in rows]


def together(mesh: Mesh) -> Together:
    """Return this rank among all, for what checkpoints ask of the others."""
    act: Callable[[Callable[[], Any]], Any] = functools.partial(on_first, mesh)
    return Together(mesh.rank, mesh.world_size, act, functools.partial(gather, mesh))


def on_each(mesh: Mesh, act: Callable[[], Any]) -> Any:
    """Return what `act` returns on this rank, where no rank fails: else all raise, so that none waits. A collective.

    Raises:
        CheckpointError: where another rank's `act` raised; it names the rank. This rank's own error is raised as it is.
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
            f"rank {mesh.world_size - worst} failed where the other ranks succeeded; its log says why."
        )
    return value


def _tell(mesh: Mesh, value: Any) -> Any:
    """A JSON value of the first rank, on all."""
    text = json.dumps(value).encode()
    if mesh.world_size == 1:
        return json.loads(text)
    length = int(broadcast(torch.tensor([len(text)], device=mesh.device), mesh.world))
    sent = torch.zeros(length, dtype=torch.uint8, device=mesh.device)
    if mesh.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return json.loads(bytes(broadcast(sent, mesh.world).tolist()))
