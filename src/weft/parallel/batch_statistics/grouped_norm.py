"""The arithmetic of batch norm over groups: by torch's kernel where a group is whole, else with sums over its ranks.

Letters: N rows, C channels, G groups, K ranks that share groups.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        parts = x.to(dtype).split(rows)
        own = torch.stack([_moments(part, is_counted) for part in parts])  # (G, 1 + 2C)
        all_KG = all_gather(own.contiguous(), axis).view(axis.size, *own.shape)
        num_KG, mean_KGC, m2_KGC = all_KG[..., :1], *all_KG[..., 1:].chunk(2, -1)
        num_G = num_KG.sum(0).clamp(min=1)
        mean_GC = (num_KG * mean_KGC).sum(0) / num_G
        m2_GC = (m2_KGC + num_KG * (mean_KGC - mean_GC) ** 2).sum(0)
        var_GC = m2_GC / num_G
        wide = [None if one is None else one.to(dtype) for one in (weight, bias)]
        out = _join([
            F.batch_norm(part, mean, var, *wide, training=False, eps=eps)
            for part, mean, var in zip(parts, mean_GC, var_GC, strict=True)
        ])  # fmt: skip
        ctx.save_for_backward(x, weight, mean_GC, torch.rsqrt(var_GC + eps), num_G)
        ctx.rows, ctx.axis, ctx.is_counted, ctx.has_bias = rows, axis, is_counted, bias is not None
        unbiased_GC = m2_GC / (num_G - 1).clamp(min=1)
        ctx.mark_non_differentiable(mean_GC, unbiased_GC)
        return out.to(x.dtype), mean_GC, unbiased_GC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean_GC, scale_GC, num_G = ctx.saved_tensors
        dtype = mean_GC.dtype
        whole = list(zip(grads[0].to(dtype).split(ctx.rows), x.to(dtype).split(ctx.rows), strict=True))
        # Of each group here: sums of the gradient, and of its product with what the norm made of x. (G, 2, C)
        sums = torch.stack([
            _sums(grad, part, mean, scale)
            for (grad, part), mean, scale in zip(whole, mean_GC, scale_GC, strict=True)
        ])  # fmt: skip
        grad_bias, grad_weight = sums.sum(0).unbind(0)
        slope = torch.ones_like(mean_GC[0]) if weight is None else weight.to(dtype)
        first, second = (all_reduce(sums * slope, ctx.axis) / num_G[:, None]).unbind(1)
        if not ctx.is_counted:  # a stand-in's rows are in no group's statistics
            first, second = torch.zeros_like(first), torch.zeros_like(second)
        # scale (slope grad - first - hat second), as one line over grad and one over x.
        bend_GC = -scale_GC.square() * second
        lines = zip(whole, scale_GC * slope, bend_GC, -mean_GC * bend_GC - scale_GC * first, strict=True)
        found = _join([_line(part, bend, shift).add_(_line(grad, up, None)) for (grad, part), up, bend, shift in lines])
        return (
            found.to(x.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            *[None] * 4,
        )


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _line(x: Tensor, slope_C: Tensor, shift_C: Tensor | None) -> Tensor:
    """x slope + shift for each channel, in one pass: torch's kernel of a norm that is frozen at mean 0, variance 1."""
    return F.batch_norm(x, torch.zeros_like(slope_C), torch.ones_like(slope_C), slope_C, shift_C, eps=0.0)


def _sums(grad: Tensor, x: Tensor, mean_C: Tensor, scale_C: Tensor) -> Tensor:
    """Sums of `grad` and of grad (x - mean) scale for each channel, (2, C)."""
    if not len(x):
        return torch.stack([torch.zeros_like(mean_C)] * 2)
    backward = torch.ops.aten.native_batch_norm_backward
    _, of_weight, of_bias = backward(grad, x, None, None, None, mean_C, scale_C, True, 0.0, [False, True, True])
    return torch.stack([of_bias, of_weight])


def _moments(x: Tensor, is_counted: bool) -> Tensor:
    """(N, C, ...) to the number of values, mean and sum of squared distances of each channel, (1 + 2C,)."""
    num = x.numel() // x.shape[1] if is_counted else 0
    if not num:
        return x.new_zeros(1 + 2 * x.shape[1])
    if x.device.type == "cpu":  # where var_mean takes three times as long
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        var, mean = torch.var_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction=0)
    return torch.cat([x.new_full((1,), num), mean, var * num])


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
