"""The arithmetic of batch norm over groups: by torch's kernel where a group is whole, else with sums over its ranks.

Letters: N rows, C channels, G groups, K ranks that share groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.comm import all_gather, all_reduce
from weft.errors import ModelError
from weft.mesh import Axis, Mesh
from weft.models import BATCH_NORMS
from weft.parallel.batch_statistics.norm_groups import ATTRIBUTE, GroupCut, NormGroups, TwoStates
from weft.private_torch import Function, uncompiled
from weft.structure import become, repeated_blocks


class GroupedBatchNorm(nn.Module):
    """nn.BatchNorm1d, 2d or 3d over groups of samples."""

    _weft_groups: NormGroups

    def forward(self, x: Tensor) -> Tensor:
        """Same shape. x: (N, C, ...)."""
        groups = self._weft_groups
        # Frozen statistics are those of evaluation; what was unpickled away from its ranks is a plain norm.
        if not self.training or groups is None:
            return super().forward(x)
        return _normalise(self, groups, x)


@uncompiled
def _normalise(norm: Any, groups: NormGroups, x: Tensor) -> Tensor:
    cut = groups.cut
    if cut.axis is None and cut.samples.is_empty:  # a stand-in: its rows count for nothing, whatever they are
        return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), norm.weight, norm.bias)
    rows = _rows_of_groups(cut, groups.size, x.shape[0])
    if cut.ends_alone and 1 in rows and x[0].numel() == x.shape[1]:
        raise ModelError(
            f"norm_group={groups.size}: a group of the global batch is one sample, with one value per channel, which "
            "has no variance. Use a global batch that is a multiple of norm_group, and drop_last=True in the loader."
        )
    if cut.axis is None:
        outputs = [_plain(norm, part) for part in x.split(rows)]
        out = torch.cat([one for one, _, _ in outputs]) if len(outputs) > 1 else outputs[0][0]
        mean, var = (torch.stack([one[place] for one in outputs]) for place in (1, 2))
    else:
        is_counted = not cut.samples.is_empty
        out, mean, var = _Shared.apply(x, norm.weight, norm.bias, rows, cut.axis, norm.eps, is_counted)
    if norm.track_running_stats:
        groups.see(norm, mean.detach(), var.detach())
    return out


def _plain(norm: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One whole group by torch's own kernel; with its mean and variance, as running statistics take them."""
    own = {"dtype": torch.float64 if x.dtype is torch.float64 else torch.float32, "device": x.device}
    mean, var = torch.zeros(norm.num_features, **own), torch.ones(norm.num_features, **own)
    return F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps), mean, var


def _rows_of_groups(cut: GroupCut, size: int, count: int) -> tuple[int, ...]:
    """How many of `count` rows each group has here."""
    numbers = cut.samples.numbers
    if not numbers:
        return (count,) + (0,) * (cut.num_groups - 1)  # a stand-in, which is normalised with some group and not counted
    per_sample = cut.samples.rows_of_each(count)
    if per_sample is None:
        raise ModelError(
            f"norm_group={size}: a batch norm got {count} rows for {len(numbers)} samples, and Weft cannot tell which "
            "belong to which. Give every sample equally many rows, or normalise with GroupNorm."
        )
    rows = [0] * cut.num_groups
    for number, many in zip(numbers, per_sample, strict=True):
        rows[number // size - cut.first] += many
    return tuple(rows)


class _Shared(Function):
    """Groups that lie on the ranks of an axis: mean and variance by the parallel formula of Chan et al. 1979."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: tuple[int, ...],
        axis: Axis,
        eps: float,
        is_counted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        wide = x.to(dtype)
        own = torch.stack([_moments(part, is_counted) for part in wide.split(rows)])  # (G, 1 + 2C)
        all_KG = all_gather(own.contiguous(), axis).view(axis.size, *own.shape)
        num_KG, mean_KGC, m2_KGC = all_KG[..., :1], *all_KG[..., 1:].chunk(2, -1)
        num_G = num_KG.sum(0).clamp(min=1)
        mean_GC = (num_KG * mean_KGC).sum(0) / num_G
        m2_GC = (m2_KGC + num_KG * (mean_KGC - mean_GC) ** 2).sum(0)
        scale_GC = torch.rsqrt(m2_GC / num_G + eps)
        hat = (wide - _spread(mean_GC, rows, x)) * _spread(scale_GC, rows, x)
        out = hat if weight is None else hat * _channels(weight, x).to(dtype)
        out = out if bias is None else out + _channels(bias, x).to(dtype)
        ctx.save_for_backward(x, weight, mean_GC, scale_GC, num_G)
        ctx.rows, ctx.axis, ctx.is_counted, ctx.has_bias = rows, axis, is_counted, bias is not None
        unbiased_GC = m2_GC / (num_G - 1).clamp(min=1)
        ctx.mark_non_differentiable(mean_GC, unbiased_GC)
        return out.to(x.dtype), mean_GC, unbiased_GC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean_GC, scale_GC, num_G = ctx.saved_tensors
        rows, dtype = ctx.rows, mean_GC.dtype
        grad, inner = grads[0].to(dtype), [dim for dim in range(x.ndim) if dim != 1]
        scale = _spread(scale_GC, rows, x)
        hat = (x.to(dtype) - _spread(mean_GC, rows, x)) * scale
        grad_weight = None if weight is None else (grad * hat).sum(inner).to(weight.dtype)
        grad_bias = grad.sum(inner).to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        if weight is not None:
            grad = grad * _channels(weight, x).to(dtype)
        parts = zip(grad.split(rows), (grad * hat).split(rows), strict=True)
        sums = torch.stack([torch.stack([one.sum(inner), other.sum(inner)]) for one, other in parts])  # (G, 2, C)
        mean_G2C = all_reduce(sums, ctx.axis) / num_G[:, None]
        if ctx.is_counted:  # a stand-in's rows are in no group's statistics
            first, second = mean_G2C.unbind(1)
            grad = grad - _spread(first, rows, x) - hat * _spread(second, rows, x)
        return (grad * scale).to(x.dtype), grad_weight, grad_bias, None, None, None, None


def _moments(x: Tensor, is_counted: bool) -> Tensor:
    """(N, C, ...) to the number of values, mean and sum of squared distances of each channel, (1 + 2C,)."""
    num = x.numel() // x.shape[1] if is_counted else 0
    if not num:
        return x.new_zeros(1 + 2 * x.shape[1])
    var, mean = torch.var_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction=0)
    return torch.cat([x.new_full((1,), num), mean, var * num])


def _spread(per_GC: Tensor, rows: Sequence[int], x: Tensor) -> Tensor:
    """Values of each group for each row of x, to be broadcast: (1 or N, C, 1, ...)."""
    if len(rows) > 1:
        per_GC = per_GC[_group_of_rows(tuple(rows)).to(x.device)]
    return per_GC.view(*per_GC.shape, *[1] * (x.ndim - 2))


@lru_cache(maxsize=64)
def _group_of_rows(rows: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))


def _channels(per_C: Tensor, x: Tensor) -> Tensor:
    return per_C.view(1, -1, *[1] * (x.ndim - 2))


def group_norms(model: nn.Module, mesh: Mesh, size: int) -> NormGroups | None:
    """Let the model's batch norms take the statistics of groups of `size` samples, in place. None: it has none.

    Call it when the model has been cut, after dropout was made to follow positions and before recompute.

    Args:
        model: with or without batch norms.
        mesh: of the ranks.
        size: samples of a group.

    Raises:
        ModelError: for a size below 1.
    """
    if size < 1:
        raise ModelError(f"norm_group={size}: it is a number of samples. Use 1 or more, such as 32.")
    found = {path: module for path, module in model.named_modules() if isinstance(module, BATCH_NORMS)}
    if not found:
        return None
    groups = NormGroups(mesh, size)
    for module in found.values():
        become(module, GroupedBatchNorm, groups=groups)
        groups.norms.append(module)
    for block in (repeated_blocks(model) or {"": model}).values():
        if any(isinstance(module, GroupedBatchNorm) for module in block.modules()):
            state = getattr(block, "_weft_travels", None)
            travels = groups if state is None else TwoStates(state, groups)
            setattr(block, "_weft_travels", travels)  # noqa: B010 - a name of `become`, which no module declares
    setattr(model, ATTRIBUTE, groups)
    return groups
