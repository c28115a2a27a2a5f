"""Numbers that the host knows, on their way into memory that recordings read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send_numbers(numbers: Sequence[object] | Tensor, into: Tensor) -> None:
    """Put numbers into a tensor, in the order of the device's work; the host does not wait.

    Args:
        numbers: as many as the tensor has, nested as it is, or a tensor of the host.
        into: of any device.
    """
    given = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=into.dtype)
    if into.device.type == "cuda":
        # torch keeps pinned memory from being given away again before the copy was made.
        into.copy_(given.pin_memory(), non_blocking=True)
    else:
        into.copy_(given)
