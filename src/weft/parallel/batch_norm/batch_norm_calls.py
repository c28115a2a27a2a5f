"""Calls to torch's batch_norm functions in batch norms that override forward, and the rules for such classes.

A subclass may add an activation, dropout or casts around torch's normalization. It must not compute statistics of the
batch itself, because they would cover only one microbatch on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.devices import access
from weft.errors import ModelError
from weft.models.inspect.blocks import class_before
from weft.private_torch import tree_leaves, version_of

#: Forwards of torch's classes, which do nothing but normalize.
_PLAIN = (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)
_NAMES = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    torch.native_batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}


@dataclass(slots=True)
class BatchNormCall:
    func: Any
    input: Tensor
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def check(self, norm: Any) -> None:
        """Raise ModelError if the call breaks the rules for `norm`.

        It must not update other tensors than the running statistics of `norm`, update them with another momentum, or be
        a call to torch.native_batch_norm.
        """
        if self.func is torch.native_batch_norm:
            raise _refused(norm, "it calls torch.native_batch_norm, with statistics of one microbatch")
        moves = self.running_mean is not None or self.running_var is not None
        if moves and (self.running_mean is not norm.running_mean or self.running_var is not norm.running_var):
            raise _refused(norm, "it passes statistics to batch_norm that are not its running_mean and running_var")
        if moves and norm.momentum is not None and self.momentum != norm.momentum:
            raise _refused(norm, f"it calls batch_norm with momentum={self.momentum}, not its own {norm.momentum}")


def batch_norm_call(func: Any, args: Any, kwargs: dict[str, Any]) -> BatchNormCall | None:
    """Return the arguments of a call to one of torch's batch_norm functions, or None for any other function."""
    try:
        names = _NAMES.get(func)
    except TypeError:  # an unhashable function
        return None
    if names is None:
        return None
    given = dict(zip(names, args, strict=False)) | {name: value for name, value in kwargs.items() if name in names}
    return BatchNormCall(func, **given)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift each channel, without statistics. x: (N, C, ...)."""
    return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), weight, bias)


def is_plain_forward(norm: nn.Module) -> bool:
    return getattr(class_before(norm), "forward", None) in _PLAIN


@torch.no_grad()
def refuse_own_statistics(norm: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ModelError if samples interact in a subclass's forward outside its calls to batch_norm.

    The forward runs twice, with batch_norm reduced to scale and shift: on the input, and on the input followed by more
    samples. The input's rows must give the same output both times. A forward that updates the running statistics
    itself, takes several tensors, or does not return one row per input row, is an error too. Buffers and generators are
    restored.
    """
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.ndim]
    if len(tensors) != 1 or not args or args[0] is not tensors[0]:
        raise _refused(norm, "its forward has more than one tensor argument")
    x = tensors[0]
    buffers = {name: (buffer, buffer.clone()) for name, buffer in norm.named_buffers(recurse=False)}
    running = [one for one in (norm.running_mean, norm.running_var) if one is not None]
    versions = [version_of(one) for one in running]
    # Larger, shifted samples, whose statistics are far from those in x.
    longer = torch.cat([x, 2 * x + 1])
    try:
        found = []
        for one in (x, longer):
            with access.forked_generators(x.device), _WithoutStatistics():
                torch.manual_seed(0)
                found.append(forward(one, *args[1:], **kwargs))
        moved = versions != [version_of(one) for one in running]
    finally:
        for name, (buffer, value) in buffers.items():
            setattr(norm, name, buffer)
            buffer.copy_(value)
    if moved:
        raise _refused(norm, "it moves running_mean or running_var itself, by the statistics of one microbatch")
    alone, among = found
    if not isinstance(alone, Tensor) or not isinstance(among, Tensor) or len(alone) != len(x):
        raise _refused(norm, "its forward does not return one tensor with a row for each row of its input")
    scale = alone.abs().max().clamp(min=1e-30)
    if not bool((among[: len(x)] - alone).abs().max() <= 1e-3 * scale):
        raise _refused(norm, "it computes statistics of one microbatch")


class _WithoutStatistics(TorchFunctionMode):
    """Mode in which batch_norm in training scales and shifts, but does not normalize."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = batch_norm_call(func, args, kwargs or {})
        if call is None or not call.training or func is torch.native_batch_norm:
            return func(*args, **kwargs or {})
        return affine(call.input, call.weight, call.bias)


def _refused(norm: Any, found: str) -> ModelError:
    path = norm._weft_path or "the model"
    return ModelError(
        f"norm_group={norm._weft_groups.size}: {path} is a {type(norm).__name__}, a batch norm with a custom "
        f"forward: {found}. Use nn.BatchNorm2d or GroupNorm, or leave norm_group out."
    )
