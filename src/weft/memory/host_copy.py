"""Copies of tensors in host memory that is taken once and used again: what a checkpoint is written from meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from weft import env
from weft.errors import CheckpointError
from weft.units import format_bytes

#: Every copy begins at a multiple of so many bytes.
_ALIGNED = 64
#: Of the host's free memory, what copies may take.
_MOST_OF_FREE = 0.8
#: Bytes that the host copies at once: more than a MiB or so libc writes past the cache, which took 1.5 times as long
#: with two ranks on two cores.
_AT_ONCE = 512 * 2**10


class HostCopies:
    """One buffer of a rank, as large as the largest set of tensors that it took: pinned where the device needs it."""

    def __init__(self, device: torch.device):
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors' values as they are now, in memory that the next call writes over.

        Raises:
            CheckpointError: where the host has no room for them.
        """
        places, end = [], 0
        for tensor in tensors:
            places.append(end)
            end += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
        if end > self._buffer.nbytes:
            self._grow(end)
        copies = [
            self._buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        ]
        if self._stream is None:
            _copy(copies, tensors)
        else:
            # Beside what the device computes; the host waits for the copies alone.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                _copy(copies, tensors)
            self._stream.synchronize()
        return copies

    def _grow(self, num_bytes: int) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        place = env.rank_env()
        free = int(psutil.virtual_memory().available * _MOST_OF_FREE) // (place.local_world_size if place else 1)
        if num_bytes > free:
            raise CheckpointError(
                f"checkpoint.background=true: a copy of this rank's part takes {format_bytes(num_bytes)} of host"
                f" memory, and {format_bytes(free)} are free for it. Use checkpoint.background=false."
            )
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


@torch.no_grad()
def _copy(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes > _AT_ONCE:
            size = _AT_ONCE // tensor.element_size()
            for to, own in zip(copy.view(-1).split(size), tensor.view(-1).split(size), strict=True):
                to.copy_(own)
        else:
            copy.copy_(tensor, non_blocking=True)
