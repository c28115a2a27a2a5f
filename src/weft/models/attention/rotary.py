"""Rotary positions (Su et al. 2021, arXiv 2104.09864), with the two halves of a head as the pairs that are turned.

B sequences, T tokens, N heads, C width of one head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Llama 3.1 was trained on this many tokens before its context was stretched, and keeps the frequencies that turn
#: more than HIGH times in it; those that turn less than LOW times are divided by rope_scale.
_TRAINED_LEN, _LOW, _HIGH = 8192, 1.0, 4.0


class Rotation(NamedTuple):
    """cos and sin of every token's angles; the sine's first half is negated, as `rotate` wants it."""

    cos_BT1C: Tensor
    sin_BT1C: Tensor


def rotation(positions_BT: Tensor, head_dim: int, theta: float, scale: float, dtype: torch.dtype) -> Rotation:
    """Return the angles of the given positions, made once per forward. Angles are float32, the result has `dtype`.

    Args:
        positions_BT: place of each token in its document.
        head_dim: even.
        theta: base of the frequencies.
        scale: low frequencies are divided by it, as Llama 3.1 does; 1: none are.
        dtype: of cosines and sines.
    """
    frequencies = _frequencies(head_dim, theta, scale, positions_BT.device)
    angles = positions_BT[:, :, None, None].to(torch.float32) * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(x_BTNC: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (x[i], x[i + C/2]) by its angle. Same dtype as x; computed in the rotation's."""
    low, high = x_BTNC.chunk(2, -1)
    swapped_BTNC = torch.cat((high, low), -1)
    return torch.addcmul(x_BTNC * rotation.cos_BT1C, swapped_BTNC, rotation.sin_BT1C).to(x_BTNC.dtype)


def _frequencies(head_dim: int, theta: float, scale: float, device: torch.device) -> Tensor:
    """Radians per position of each pair; (head_dim / 2,) in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scale == 1:
        return frequencies
    turns = _TRAINED_LEN * frequencies / (2 * math.pi)
    keep = ((turns - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return frequencies * keep + frequencies / scale * (1 - keep)
