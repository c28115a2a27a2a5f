"""Gaussian noise that depends on (key, step, parameter, element), so each element has one value under every plan.

The elements of a parameter are numbered as in its full tensor. Each run of `BLOCK` elements has its own Philox stream
(Salmon et al. 2011), whose key is a keyed hash of step and name. A rank computes the blocks that its elements touch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from weft.parallel.state.flat_slices import PlacedPart

#: Elements of one stream.
BLOCK = 2**14


def _block(stream: np.ndarray, block: int, count: int) -> np.ndarray:
    """Return the first `count` standard normal values of a block, float32."""
    return np.random.Generator(np.random.Philox(key=stream, counter=[0, 0, 0, block])).standard_normal(
        count, dtype=np.float32
    )


def _stream_key(key: bytes, step: int, name: str) -> np.ndarray:
    digest = hashlib.blake2b(f"{step}\0{name}".encode(), key=key, digest_size=16, person=b"weft noise").digest()
    return np.frombuffer(digest, dtype=np.uint64)


def noise_at(key: bytes, step: int, name: str, positions: np.ndarray) -> np.ndarray:
    """Return the values of elements of a parameter, float32. positions: int64 positions in the full tensor, (N,)."""
    if not len(positions):
        return np.zeros(0, dtype=np.float32)
    order = None
    if (np.diff(positions) < 0).any():
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
    stream = _stream_key(key, step, name)
    found = np.empty(len(positions), dtype=np.float32)
    start = 0
    while start < len(positions):
        block = int(positions[start]) // BLOCK
        end = int(np.searchsorted(positions, (block + 1) * BLOCK))
        inside = positions[start:end] - block * BLOCK
        found[start:end] = _block(stream, block, int(inside[-1]) + 1)[inside]
        start = end
    if order is None:
        return found
    unsorted = np.empty_like(found)
    unsorted[order] = found
    return unsorted


def _noise_of_range(key: bytes, step: int, name: str, start: int, end: int) -> np.ndarray:
    """Return the values of the elements from `start` to `end` (exclusive)."""
    stream = _stream_key(key, step, name)
    parts = [
        _block(stream, block, min(BLOCK, end - block * BLOCK))[max(0, start - block * BLOCK) :]
        for block in range(start // BLOCK, -(-end // BLOCK))
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@torch.no_grad()
def add_noise(held: Iterable[tuple[nn.Parameter, PlacedPart]], key: bytes, step: int, scale: float) -> None:
    """Add noise to this rank's gradients.

    Args:
        held: the optimizer's parameters on this rank, and their positions in full parameters.
        key: the secret key.
        step: number of steps done before.
        scale: standard deviation.
    """
    for param, place in held:
        count = param.numel()
        if not count:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grad = param.grad
        if place.part.rows is None:
            found = _noise_of_range(key, step, place.name, place.start, place.start + count)
        else:
            found = noise_at(key, step, place.name, place.positions(0, count).cpu().numpy())
        noise = torch.from_numpy(found).to(grad.device, grad.dtype)
        if grad.is_contiguous():
            grad.view(-1).add_(noise, alpha=scale)
        else:  # positions are in memory order
            grad.as_strided((count,), (1,)).add_(noise, alpha=scale)
