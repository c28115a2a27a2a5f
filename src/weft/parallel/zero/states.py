"""What both engines need to join optimizer states over ranks: a table of who has which, and formats by name.

Ranks do not know what states the others have, so they first exchange a table of them: per parameter and key the owner,
shape and format, and the value itself where it is a single number (step counters).
"""

from __future__ import annotations

import json
from typing import Any

import torch

from weft.comm import all_gather, all_reduce
from weft.errors import CheckpointError
from weft.mesh import Axis

#: One state of one parameter: owner on the shard axis, shape ("cut" where it is divided as the parameter is), format,
#: and the value of a single number.
StateEntry = dict[str, Any]
#: Formats by the name that `str(dtype)` gives.
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def exchange(
    mine: dict[str, dict[str, StateEntry]], axis: Axis, device: torch.device
) -> dict[str, dict[str, StateEntry]]:
    """The tables of all ranks as one; of several ranks with the same entry the first. A collective over the axis."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=device), axis, op="max"))
    padded = torch.nn.functional.pad(text, (0, longest - text.numel()), value=ord(" "))
    joined: dict[str, dict[str, StateEntry]] = {}
    for row in all_gather(padded, axis).view(axis.size, -1).cpu():
        for name, entries in json.loads(bytes(row.tolist())).items():
            for key, entry in entries.items():
                joined.setdefault(name, {}).setdefault(key, entry)
    return joined


def untrained(full_name: str) -> CheckpointError:
    """The error for a saved state, such as "head.weight/exp_avg", whose parameter the optimizer does not have."""
    return CheckpointError(
        f"optimizer state {full_name!r}: this optimizer does not train that parameter. "
        f"Resume with the optimizer and the frozen parameters of the run that saved it."
    )


def not_joinable(full_name: str, shape: torch.Size) -> CheckpointError:
    """The error for the state of a divided parameter that is not shaped as the parameter is."""
    return CheckpointError(
        f"optimizer state {full_name!r}: its shape {tuple(shape)} is not the parameter's, so it cannot be joined. "
        f"Say elementwise=False on the optimizer."
    )
