"""Updates of clients: their files, and the checks before the server uses them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weft.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
#: Records of one client. More would take the whole mean, or not fit into a float.
_MOST_RECORDS = 10**12


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """Result of a client's local training.

    Attributes:
        round: rounds that were done before.
        client: index of the client.
        samples: number of the client's records.
        loss: mean loss of its local steps.
        delta: the server's weights minus the client's, by name, on the CPU.
    """

    round: int
    client: int
    samples: int
    loss: float
    delta: Tensors


def problem_of(
    update: ClientUpdate, round_: int, expected: Collection[int], had: Collection[int], like: Mapping[str, torch.Tensor]
) -> str:
    """Return why the server refuses an update, in one sentence, or "".

    Args:
        update: from a client.
        round_: the server's round.
        expected: the clients of the round.
        had: clients whose updates were used already.
        like: the server's weights.
    """
    name = f"client={update.client}"
    if update.client not in expected:
        return f"{name}: it is no client of round {round_}."
    if update.round != round_:
        return f"{name}: its update is of round {update.round}, and this is round {round_}."
    if update.client in had:
        return f"{name}: it sent a second update in round {round_}."
    if not 1 <= update.samples <= _MOST_RECORDS:
        shown = update.samples if abs(update.samples) < 2**63 else "too many"
        return f"{name}: it reports {shown} records, and an update has 1 to {_MOST_RECORDS}."
    if set(update.delta) != set(like):
        odd = sorted(set(update.delta) ^ set(like))
        return f"{name}: its update has other tensors than the model, such as {odd[0]}."
    for key, tensor in like.items():
        own = update.delta[key]
        if own.shape != tensor.shape or own.dtype != tensor.dtype:
            has, wanted = f"{tuple(own.shape)} {own.dtype}", f"{tuple(tensor.shape)} {tensor.dtype}"
            return f"{name}: {key} is {has}, and the model's is {wanted}."
        if not bool(own.isfinite().all()):
            return f"{name}: {key} has values that are not finite."
    return "" if math.isfinite(update.loss) else f"{name}: its loss is not finite."


def write_tensors(path: Path, tensors: Tensors, about: Mapping[str, Any]) -> None:
    """Replace a file of tensors and JSON values atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, draft, metadata={"weft": json.dumps(about)})
    os.replace(draft, path)


def read_tensors(path: Path, prefix: str = "") -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors whose names start with a prefix, without it, and the JSON values of a file.

    Raises:
        CheckpointError: if the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["weft"])
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  (no mapping)
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}, about
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise CheckpointError(f"{path}: it cannot be read ({why}). Start again in a new folder.") from error


def write_update(path: Path, update: ClientUpdate) -> None:
    """Write a client's update."""
    about = {"round": update.round, "client": update.client, "samples": update.samples, "loss": str(update.loss)}
    write_tensors(path, update.delta, about)


def read_update(path: Path) -> ClientUpdate:
    """Read a client's update. Raises CheckpointError if the file is missing or damaged."""
    delta, about = read_tensors(path)
    try:
        loss = float(about["loss"])
        return ClientUpdate(int(about["round"]), int(about["client"]), int(about["samples"]), loss, delta)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its header is damaged ({error!r}). Remove the file.") from error
