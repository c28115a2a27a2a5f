"""What tensors of a device hold, where the host knows it: those that it moved there, and parts of them.

So indices can be checked, and borders of documents found, without a wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.private_torch import version_of, viewed

_ATTRIBUTE, _CHECKS = "_weft_host_values", "_weft_checks"


def remember_host(tensor: Tensor, values: Tensor) -> None:
    """Say that a tensor of a device holds what `values` on the host does, as long as neither is written to."""
    if tensor.device.type != "cpu" and not tensor.is_inference():
        setattr(tensor, _ATTRIBUTE, (values, version_of(tensor), version_of(values)))


def host_values(tensor: Tensor) -> Tensor | None:
    """Return the same values on the host, without asking the device; None where nobody knows them.

    Of a view of a tensor that was moved, such as a microbatch of a batch, they are a view too.
    """
    if tensor.device.type == "cpu":
        return tensor if type(tensor) is Tensor else None
    whole = tensor if hasattr(tensor, _ATTRIBUTE) else viewed(tensor)
    held: Any = getattr(whole, _ATTRIBUTE, None)
    if whole is None or held is None:
        return None
    values, version, values_version = held
    if version_of(whole) != version or version_of(values) != values_version:
        return None
    if whole is tensor:
        return values
    if values.stride() != whole.stride() or tensor.dtype != whole.dtype:
        return None
    return _same_part(tensor, whole, values)


def _same_part(tensor: Tensor, whole: Tensor, values: Tensor) -> Tensor:
    """What of `values` lies where a view lies in a whole of the same strides."""
    offset = values.storage_offset() + tensor.storage_offset() - whole.storage_offset()
    return values.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(frozen=True, slots=True)
class _Check:
    """Something that looks at the host's values of a part of a tensor."""

    part: Tensor
    look: Callable[[Tensor], None]


def hold_batches(tensor: Tensor) -> None:
    """Say that batches come and go in this tensor: whoever would look at its values leaves a check instead."""
    setattr(tensor, _CHECKS, [])


def leave_check(tensor: Tensor, look: Callable[[Tensor], None]) -> bool:
    """Let every batch be looked at that comes into a tensor, or a view of one; False where none come and go in it.

    Args:
        tensor: that would be looked at now.
        look: is given the values on the host, where it knows them.
    """
    whole = tensor if hasattr(tensor, _CHECKS) else viewed(tensor)
    held: list[_Check] | None = getattr(whole, _CHECKS, None)
    if held is None:
        return False
    held.append(_Check(tensor, look))
    return True


def check_batch(holder: Tensor, given: Tensor) -> None:
    """Look at what comes into a tensor, as its checks do. given: of the same shape."""
    checks: list[_Check] = getattr(holder, _CHECKS, [])
    values = host_values(given) if checks else None
    if values is None:
        return
    if values.stride() != holder.stride():
        values = torch.empty_like(values).copy_(values)  # strides as the holder was given them
    for one in checks:
        one.look(_same_part(one.part, holder, values))
