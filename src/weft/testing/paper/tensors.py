"""Which tensors are of the paper device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

#: The only device there is.
CUDA = torch.device("cuda", 0)


def on_device(tensor: object) -> bool:
    """Whether it is a tensor of the paper device."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)


def is_fake(value: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, FakeTensor)
