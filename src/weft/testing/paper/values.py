"""Values of small tensors of the device, where they follow from what the host sent: ids, counts, positions, borders.

A tensor of the device that has one carries a real tensor of the host beside it, and each operation whose inputs all do
is done on those too. Views share memory there as they do here. What is written from an unknown tensor is unknown; in a
tensor of few floats that is NaN in those elements alone, so that a count beside a loss stays known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from weft.testing.paper.tensors import leaves, on_device

#: Most elements of a tensor whose values are kept: of whole numbers, and of others.
_MOST_WHOLE, _MOST_OTHER = 1 << 16, 16
_FIELD = "_paper_value"


class _Known:
    """value: on the host. memory: shared by all that share memory; empty when it was overwritten by unknown values."""

    def __init__(self, value: torch.Tensor, memory: list[bool]) -> None:
        self.value = value
        self.memory = memory


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What the tensor holds, on the host; None where nobody knows."""
    known: _Known | None = tensor.__dict__.get(_FIELD)
    return known.value if known is not None and known.memory else None


def give(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """From here on the tensor of the device holds `value`, if it is small."""
    known: _Known | None = tensor.__dict__.get(_FIELD)
    owns_all = tensor.nbytes == tensor.untyped_storage().nbytes()
    if known is not None and (known.memory or owns_all):
        known.value.copy_(value)
        known.memory[:] = [True]
    elif owns_all and _is_small(tensor):
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(value)
        setattr(tensor, _FIELD, _Known(copy, [True]))
    else:
        forget([tensor])


def reserve(tensor: torch.Tensor) -> None:
    """Nobody knows what the tensor holds; what is written through a view of it will be known to the others."""
    if on_device(tensor) and _is_small(tensor) and not tensor.dtype.is_floating_point:
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        setattr(tensor, _FIELD, _Known(memory, []))


def forget(tensors: list[torch.Tensor]) -> None:
    """Their memory was written, nobody knows with what."""
    for tensor in tensors:
        known: _Known | None = tensor.__dict__.get(_FIELD)
        if known is None:
            continue
        if known.value.dtype.is_floating_point:
            known.value.fill_(torch.nan)
        else:
            known.memory.clear()


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, writes: list[torch.Tensor]) -> None:
    """Do on values what was done on tensors of the device."""
    inputs = [x for x in leaves((args, kwargs)) if on_device(x)]
    outs = [x for x in leaves(out) if on_device(x)]
    is_view = getattr(func, "is_view", False) and all(_FIELD in x.__dict__ for x in inputs)
    if not is_view and not _follows(func, inputs, outs):
        forget(writes)
        return
    to_host = _memory_on_host if is_view else on_host
    real = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    sources = [x.__dict__[_FIELD] for x in inputs if _FIELD in x.__dict__]
    for tensor, value in zip(leaves(out), leaves(real), strict=True):
        if on_device(tensor) and _FIELD not in tensor.__dict__:
            memory = next((one.memory for one in sources if _share(one.value, value)), [True])
            setattr(tensor, _FIELD, _Known(value, memory))


def _follows(func: Any, inputs: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
    """Whether the results are known where the inputs are."""
    values = [value_of(x) for x in inputs]
    if {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags) or not all(map(_is_small, outs)):
        return False
    if inputs and all(value is None for value in values):
        return False
    if not all(_is_small_float(x) for x, value in zip(inputs, values, strict=True) if value is None):
        return False
    unknown = any(value is None or (value.dtype.is_floating_point and value.isnan().any()) for value in values)
    return not unknown or all(x.dtype.is_floating_point for x in outs)


def _is_small_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.numel() <= _MOST_OTHER


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _is_small(tensor: torch.Tensor) -> bool:
    most = _MOST_OTHER if tensor.dtype.is_floating_point or tensor.is_complex() else _MOST_WHOLE
    return tensor.numel() <= most


def _memory_on_host(part: Any) -> Any:
    """As `on_host`, for what only looks at memory, whether or not its values are known."""
    return part.__dict__[_FIELD].value if isinstance(part, torch.Tensor) and on_device(part) else on_host(part)


def on_host(part: Any) -> Any:
    """An argument as the same operation on values takes it."""
    if isinstance(part, torch.Tensor):
        if not on_device(part):
            return part
        held = value_of(part)
        return torch.full(part.shape, torch.nan, dtype=part.dtype) if held is None else held
    return torch.device("cpu") if isinstance(part, torch.device) and part.type == "cuda" else part
