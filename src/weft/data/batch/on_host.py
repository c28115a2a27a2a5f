"""What tensors of a device hold, where the host knows it: those that it moved there, and parts of them.

So indices can be checked, and borders of documents found, without a wait for the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.private_torch import version_of, viewed

_ATTRIBUTE = "_weft_host_values"


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
    offset = values.storage_offset() + tensor.storage_offset() - whole.storage_offset()
    return values.as_strided(tensor.shape, tensor.stride(), offset)
