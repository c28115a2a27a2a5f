"""Tensors by name from all stages of a pipeline, on every rank, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from weft.comm import broadcast
from weft.errors import CheckpointError
from weft.mesh import Axis
from weft.parallel.zero.states import DTYPES

#: Bytes of what a stage says before each tensor: name, shape, format.
HEADER_BYTES = 1024


def across_stages(
    pairs: Iterator[tuple[str, torch.Tensor]], stages: Axis, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """What each stage yields, one stage after another, each name once. A collective over the stages' axis."""
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
        header = _header(told).to(device)
        said = json.loads(bytes(broadcast(header, stages, stage).tolist()))
        if said is None:
            return
        whole = torch.empty(said["shape"], dtype=DTYPES[said["dtype"]], device=device)
        if tensor is not None:
            whole.copy_(tensor)
        yield said["name"], broadcast(whole, stages, stage)


def _header(told: dict[str, object] | None) -> torch.Tensor:
    text = json.dumps(told).encode()
    if len(text) > HEADER_BYTES:
        raise CheckpointError(f"tensor {str(told)[:60]}...: its name is too long. Use at most 900 characters.")
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)
