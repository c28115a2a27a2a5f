"""Detection of writes to parameters in forward that would be lost, and of parameters that share memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.errors import ModelError
from weft.private_torch import uncompiled, version_of

#: Integers by their bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Contents(NamedTuple):
    """State of a parameter that a write changes.

    total: the sum of its bits as integers, which also shows writes through `.data`. torch does not count those.
    """

    version: int
    address: int
    total: int

    @classmethod
    @torch.no_grad()
    def of(cls, param: torch.Tensor) -> Contents:
        """Return the state of a parameter, or of this rank's shard."""
        local = param.to_local() if isinstance(param, DTensor) else param
        is_plain = type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta
        total = local.detach().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64) if is_plain else 0
        return cls(version_of(param), local.data_ptr(), int(total))


class ForwardWrites:
    """Checks a model's first training forward for writes to parameters whose masters are elsewhere.

    An update computes new weights from the masters, so such writes would be lost.

    params: parameters with separate masters, by name. why: the setting that makes masters, such as "precision=bf16".
    """

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter], why: str):
        self._params, self._why = params, why
        self._before: dict[str, Contents] | None = None
        self._handles = [
            model.register_forward_pre_hook(uncompiled(self._enter)),
            model.register_forward_hook(uncompiled(self._leave), always_call=True),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardWrites, (nn.Module(), {}, "")  # copies have other parameters

    def _enter(self, model: nn.Module, args: Any) -> None:
        del args
        if model.training and torch.is_grad_enabled():
            self._before = {name: Contents.of(param) for name, param in self._params.items()}

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        del model, args
        before, self._before = self._before, None
        if before is None or output is None:  # None: forward raised
            return
        for name, was in before.items():
            if Contents.of(self._params[name]) != was:
                raise ModelError(
                    f"parameter {name}: forward writes to it, and {self._why} updates it from a master copy, so the "
                    "values are lost. Write to parameters between steps, use a parametrization, or leave out "
                    f"{self._why}."
                )
        for handle in self._handles:
            handle.remove()


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise ModelError if two different parameters have elements in the same memory.

    Each would get its own memory, and they would no longer be equal.
    """
    regions: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        plain = type(param) is nn.Parameter and param.layout is torch.strided and not param.is_meta and param.numel()
        if plain and not param.is_quantized:
            start = int(param.storage_offset())
            end = start + 1 + sum(int(size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
            width = param.element_size()
            place = start * width, end * width, name, param
            regions.setdefault(param.untyped_storage().data_ptr(), []).append(place)
    for found in regions.values():
        found.sort(key=lambda one: one[:3])
        for number, (_, end, name, param) in enumerate(found):
            for start, _, other_name, other in found[number + 1 :]:
                if start >= end:
                    break
                if _overlap(param, other):
                    raise ModelError(
                        f"model: parameters {name} and {other_name} are different objects in the same memory, and each "
                        f"would get its own values. Use one object for both, as in b.weight = a.weight."
                    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one storage have a common byte. Columns of a matrix lie between each other."""
    marks = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        width = tensor.element_size()
        strides = [*(step * width for step in tensor.stride()), 1]
        return marks.as_strided([*tensor.shape, width], strides, tensor.storage_offset() * width)

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())
