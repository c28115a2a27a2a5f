"""Number formats that NCCL takes, and what travels in the place of others.

torch raises for the rest ("Unconvertible NCCL type"). Its fp8 formats depend on the releases of NCCL and torch, so they
count as others here.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: In every release that Weft runs on. bool travels as uint8.
NCCL_FORMATS = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor as flat bytes: what is only moved may have any type."""
    return tensor.view(-1).view(torch.uint8)


def as_moved(tensor: Tensor) -> Tensor:
    """Return what travels of a contiguous tensor that is only moved: itself, or its bytes."""
    return tensor if tensor.dtype in NCCL_FORMATS else as_bytes(tensor)


def as_added(tensor: Tensor) -> Tensor:
    """Return what travels of a contiguous tensor that is added up: itself, or its real and imaginary parts."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
