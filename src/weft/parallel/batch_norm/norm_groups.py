"""Batch norm over fixed groups of samples, which are consecutive in the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.comm.collectives import all_gather, all_reduce, start_all_reduce
from weft.comm.mesh import Axis, Mesh
from weft.comm.pending import Pending
from weft.config import partitioning as shares
from weft.errors import ModelError
from weft.models.initialize import BATCH_NORMS
from weft.models.inspect.blocks import repeated_blocks, replace_class
from weft.parallel.batch_norm.batch_norm_calls import affine, batch_norm_call, is_plain_forward, refuse_own_statistics
from weft.parallel.random.streams import SampleNumbers
from weft.private_torch import Function, uncompiled


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """Layout of the groups of one microbatch.

    Attributes:
        index: index of the microbatch in the step.
        samples: this rank's samples.
        first: index of the first group with samples in the microbatch.
        num_groups: number of groups in the microbatch, over the ranks of `axis`.
        axis: ranks that share groups, or None if each group is on one rank.
        ends_alone: True if the last group of the global batch has a single sample.
        runs: samples of each rank of `axis`, or only of this rank.
    """

    index: int
    samples: SampleNumbers
    first: int
    num_groups: int
    axis: Axis | None
    ends_alone: bool = False
    runs: tuple[range, ...] = ()


class SampleGroups:
    """Splits a global batch into groups of `size` samples. The last group of a batch may be smaller.

    Error messages contain `said` (the setting with its value) and `name` (the setting's name).

    Raises:
        ModelError: if the plan's ranks have unequal shares.
    """

    def __init__(self, mesh: Mesh, size: int, said: str, name: str):
        if mesh.plan.shares:
            raise ModelError(f"{said}: groups of samples are built for equal parts of ranks. Leave shares out.")
        self.size, self._mesh, self._said, self._name = size, mesh, said, name

    def split_of(self, samples: SampleNumbers, index: int) -> GroupSplit:
        """Return the layout of a microbatch's groups.

        Raises ModelError if a group has samples in another microbatch, or if the caller distributed the samples and
        this rank has only a part of a group.
        """
        size, data, parts = self.size, self._mesh.data, self._mesh.plan.microbatches_per_step
        numbers, num_ranks = samples.numbers, data.size
        count = len(numbers) * num_ranks * parts if samples.total is None else samples.total
        runs = shares.share_out(count, num_ranks * parts)[index * num_ranks : (index + 1) * num_ranks]
        start, stop = runs[0].start, runs[-1].stop
        own = runs[data.rank]
        if list(numbers) != list(own):
            return self._check_own_samples(samples, index, count)
        if not _on_borders(range(start, stop), size, count):
            raise ModelError(
                f"{self._said}: a microbatch holds samples {start} to {stop - 1} of the global batch over all ranks, "
                f"and a group must be in one microbatch. Use a {self._name} that divides {stop - start}, or fewer "
                "microbatches."
            )
        alone = count % size == 1 or size == 1
        if all(_on_borders(run, size, count) for run in runs):
            return GroupSplit(index, samples, own.start // size, max(1, -(-len(own) // size)), None, alone, (own,))
        axis = self._sharing(len(own), count % (num_ranks * parts) == 0)
        start = data.rank // axis.size * axis.size
        among = runs if axis is data else runs[start : start + axis.size]
        first = among[0].start // size
        return GroupSplit(index, samples, first, -(-(among[-1].stop - first * size) // size), axis, alone, tuple(among))

    def _check_own_samples(self, samples: SampleNumbers, index: int, count: int) -> GroupSplit:
        """Return the layout for samples that the caller distributed, or raise ModelError for incomplete groups."""
        numbers = samples.numbers
        own = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
        if not numbers or list(numbers) != list(own) or not _on_borders(own, self.size, count):
            raise ModelError(
                f"{self._said}: this rank's microbatch has parts of groups, and the other parts are unknown. Pass "
                "the DataLoader through run.shard, which divides samples in order."
            )
        return GroupSplit(index, samples, numbers[0] // self.size, -(-len(numbers) // self.size), None, runs=(own,))

    def _sharing(self, rows: int, is_even: bool) -> Axis:
        """Return the smallest axis whose ranks together have complete groups.

        Returns the full data axis if no axis fits, or if ranks have different numbers of samples.
        """
        data, plan = self._mesh.data, self._mesh.plan
        if rows * data.size == self.size:
            return data
        if is_even and rows and self.size % rows == 0 and data.size % (ranks := self.size // rows) == 0:
            inner = plan.dp_shard
            names = (f"dp_shard/{ranks}",) if inner % ranks == 0 else (f"dp_replicate/{ranks // inner}", "dp_shard")
            first = data.rank // ranks * ranks
            if (inner % ranks == 0 or ranks % inner == 0) and self._mesh.ranks_over(names) == data.ranks[
                first : first + ranks
            ]:
                return self._mesh[names]
        return data


def _on_borders(run: range, size: int, count: int) -> bool:
    """Return True if a range of samples consists of complete groups. The last group of a batch may be smaller."""
    return not run or (run.start % size == 0 and (run.stop % size == 0 or run.stop == count))


# Batch norm over fixed groups of samples, equal under every plan.

ATTRIBUTE = "_weft_norm_groups"


class NormGroups:
    """Batch norms of one model on one rank, with statistics over groups of `size` samples."""

    def __init__(self, mesh: Mesh, size: int):
        self.size = size
        self._groups = SampleGroups(mesh, size, f"norm_group={size}", "norm_group")
        self.norms: list[nn.Module] = []
        self._mesh = mesh
        self._current: GroupSplit | None = None
        #: For each norm and microbatch, (2C + 1,): sums of means and of variances over the groups whose first sample is
        #: on this rank, and the number of these groups.
        self._seen: dict[int, dict[int, Tensor]] = {}
        self._pending: Pending | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NormGroups:
        return self  # a copy of the model runs on the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    # --- current microbatch ---

    @contextlib.contextmanager
    def microbatch(self, samples: SampleNumbers, index: int) -> Iterator[None]:
        """Set, within the context, the samples of the microbatch. Raises ModelError if a group is incomplete."""
        with self._at(self._groups.split_of(samples, index)):
            yield

    def travelling(self) -> AbstractContextManager[None]:
        """Return a context for a later recomputation of the current forward, with the same groups of samples."""
        return self._at(self._current)

    @contextlib.contextmanager
    def _at(self, cut: GroupSplit | None) -> Iterator[None]:
        before, self._current = self._current, cut
        try:
            yield
        finally:
            self._current = before

    @property
    def split(self) -> GroupSplit:
        if self._current is None:
            raise ModelError(
                f"norm_group={self.size}: in training, only run.train_step passes the sample numbers to the model. "
                "Call run.train_step, or leave norm_group out in your own loop."
            )
        return self._current

    # --- running statistics ---

    def see(self, norm: nn.Module, mean_GC: Tensor, var_GC: Tensor) -> None:
        """Store a norm's statistics in this microbatch: sums over the groups whose first sample is on this rank.

        Recomputation stores the same values again. mean_GC, var_GC: mean and unbiased variance of each group.
        """
        cut = self.split
        found = torch.cat([mean_GC, var_GC, mean_GC.new_ones(len(mean_GC), 1)], 1).double()
        # A group counts on the rank that has its first sample.
        numbers = cut.samples.numbers
        own = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
        begins = [float((cut.first + group) * self.size in own) for group in range(cut.num_groups)]
        if not all(begins):
            found = found * found.new_tensor(begins)[:, None]
        self._seen.setdefault(id(norm), {})[cut.index] = found.sum(0)

    def begin(self, scale: float | Tensor = 1.0) -> None:
        """Begin a step: drop the statistics of an earlier one. `scale` is ignored."""
        del scale
        self._seen.clear()
        self._pending = None

    def start(self) -> None:
        """Start the all_reduce of the ranks' statistics, after the last backward. All ranks call it."""
        parts: list[Tensor] = []
        for norm in self._moving():
            none = torch.zeros(2 * norm.num_features + 1, dtype=torch.float64, device=self._mesh.device)
            parts.append(sum(self._seen.get(id(norm), {}).values(), none))
        if parts:
            self._pending = start_all_reduce(torch.cat(parts), self._mesh.data)

    @torch.no_grad()
    def finish(self, *, moved: bool | Tensor) -> None:
        """Update the running statistics at the end of a step, unless the step was skipped.

        moved: True if the weights changed; a 0-d bool on the device if the host does not have the decision yet.
        """
        if self._pending is None:
            return
        norms = self._moving()
        found = self._pending.wait().split([2 * norm.num_features + 1 for norm in norms])
        self._pending = None
        for norm, one in zip(norms, found, strict=True):
            if moved is not False:
                _move(norm, one, moved)

    def _moving(self) -> list[Any]:
        """Return the norms whose running statistics are updated, the same on all ranks."""
        return [norm for norm in self.norms if norm.training and norm.track_running_stats]


def _move(norm: Any, found: Tensor, moved: bool | Tensor) -> None:
    """Update running statistics by `momentum`, or to the mean over all steps if it is None, and count the step.

    found: the sums of `NormGroups.see` over all ranks. moved: if it is False, or there was no group, nothing changes.
    """
    num = found[-1]
    is_moved = (num > 0) & moved  # a norm without any group is unchanged
    norm.num_batches_tracked += is_moved & getattr(norm, "_weft_counts", True)  # some subclasses do not count
    factor = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.clamp(min=1).double()
    means = (found[:-1] / num.clamp(min=1)).view(2, -1)
    for running, mean in zip((norm.running_mean, norm.running_var), means, strict=True):
        running.copy_(torch.where(is_moved, running + (mean.to(running.dtype) - running) * factor, running))


class TwoStates:
    """Combines two objects, so that a recomputation enters the `travelling` contexts of both."""

    def __init__(self, *states: Any):
        self._states = states

    @contextlib.contextmanager
    def _inside(self, contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield

    def travelling(self) -> AbstractContextManager[None]:
        return self._inside([state.travelling() for state in self._states])


def norm_groups_of(model: nn.Module) -> NormGroups | None:
    """Return the result of `group_norms` for this model, or None."""
    return getattr(model, ATTRIBUTE, None)


# Batch norm over groups: with torch's kernel if a group is on one rank, otherwise with sums over its ranks.


class GroupedBatchNorm(nn.Module):
    """nn.BatchNorm1d, 2d or 3d whose statistics cover groups of samples."""

    _weft_groups: NormGroups

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, (N, C, ...). Return the same shape."""
        groups, norm = self._weft_groups, cast("nn.BatchNorm2d", self)
        # Frozen statistics are used as in eval mode. A norm that was unpickled without a mesh is a plain batch norm.
        if not self.training or groups is None:
            return super().forward(x)
        return _normalise(self, groups, x, norm.weight, norm.bias, norm.eps, norm.track_running_stats)


class GroupedCalls(nn.Module):
    """A batch norm whose class overrides forward. In training, its batch_norm calls use statistics of sample groups."""

    _weft_groups: NormGroups
    _weft_is_checked: bool

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        groups: NormGroups | None = self._weft_groups
        if not self.training or groups is None:
            return super().forward(*args, **kwargs)
        if not self._weft_is_checked:
            refuse_own_statistics(self, super().forward, args, kwargs)
            self._weft_is_checked = True
        with _own_counts(self), _GroupedFunctions(self, groups):
            return super().forward(*args, **kwargs)


@uncompiled
def _normalise(
    norm: Any, groups: NormGroups, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, moves: bool
) -> Tensor:
    cut = groups.split
    if cut.axis is None and cut.samples.is_empty:  # a placeholder, whose rows are not counted
        return affine(x, weight, bias)
    rows = _rows_of_groups(cut, groups.size, x.shape[0])
    if cut.ends_alone and 1 in rows and x[0].numel() == x.shape[1]:
        raise ModelError(
            f"norm_group={groups.size}: a group of the global batch is one sample, with one value per channel, which "
            "has no variance. Use a global batch that is a multiple of norm_group, and drop_last=True in the loader."
        )
    if cut.axis is None:
        outputs = [_plain(part, weight, bias, eps) for part in x.split(rows)]
        out = torch.cat([one for one, _, _ in outputs]) if len(outputs) > 1 else outputs[0][0]
        mean, var = (torch.stack([one[place] for one in outputs]) for place in (1, 2))
    else:
        is_counted = not cut.samples.is_empty
        out, mean, var = _Shared.apply(x, weight, bias, rows, cut.axis, eps, is_counted)
    if moves:
        groups.see(norm, mean.detach(), var.detach())
    return out


def _plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize one group on this rank with torch's kernel. Return the result, its mean and its unbiased variance."""
    own = {"dtype": torch.float64 if x.dtype is torch.float64 else torch.float32, "device": x.device}
    mean, var = torch.zeros(x.shape[1], **own), torch.ones(x.shape[1], **own)
    return F.batch_norm(x, mean, var, weight, bias, True, 1.0, eps), mean, var


def _rows_of_groups(cut: GroupSplit, size: int, count: int) -> tuple[int, ...]:
    """Return the number of local rows of each group, out of `count` rows.

    Without samples (a placeholder), all rows belong to the first group. Raises ModelError if the number of rows of each
    sample is unknown.
    """
    numbers = cut.samples.numbers
    if not numbers:
        return (count,) + (0,) * (cut.num_groups - 1)  # a placeholder: normalized with some group, not counted
    per_sample = cut.samples.rows_of_each(count)
    if per_sample is None:
        raise ModelError(
            f"norm_group={size}: a batch norm got {count} rows for {len(numbers)} samples, so the rows of each "
            "sample are unknown. Use the same number of rows for every sample, or GroupNorm."
        )
    rows = [0] * cut.num_groups
    for number, many in zip(numbers, per_sample, strict=True):
        rows[number // size - cut.first] += many
    return tuple(rows)


class _Shared(Function):
    """Batch norm of groups that several ranks share: mean and variance by the parallel formula of Chan et al. 1979."""

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
        # For each local group, the sums of the gradient and of gradient * normalized x. (G, 2, C)
        sums = torch.stack([
            _sums(grad, part, mean, scale)
            for (grad, part), mean, scale in zip(whole, mean_GC, scale_GC, strict=True)
        ])  # fmt: skip
        grad_bias, grad_weight = sums.sum(0).unbind(0)
        slope = torch.ones_like(mean_GC[0]) if weight is None else weight.to(dtype)
        first, second = (all_reduce(sums * slope, ctx.axis) / num_G[:, None]).unbind(1)
        if not ctx.is_counted:  # a placeholder's rows are not part of any statistics
            first, second = torch.zeros_like(first), torch.zeros_like(second)
        # grad_x = scale (slope grad - first - x_hat second), computed as an affine function of grad plus one of x.
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
    """Compute x slope + shift per channel in one kernel: torch's batch norm with mean 0 and variance 1."""
    return F.batch_norm(x, torch.zeros_like(slope_C), torch.ones_like(slope_C), slope_C, shift_C, eps=0.0)


def _sums(grad: Tensor, x: Tensor, mean_C: Tensor, scale_C: Tensor) -> Tensor:
    """Return sums of `grad` and of grad (x - mean) scale for each channel, (2, C)."""
    if not len(x):
        return torch.stack([torch.zeros_like(mean_C)] * 2)
    backward = torch.ops.aten.native_batch_norm_backward
    _, of_weight, of_bias = backward(grad, x, None, None, None, mean_C, scale_C, True, 0.0, [False, True, True])
    return torch.stack([of_bias, of_weight])


def _moments(x: Tensor, is_counted: bool) -> Tensor:
    """Return number of values, means and sums of squared deviations of the channels of x (N, C, ...): (1 + 2C,).

    Returns zeros if x is empty or `is_counted` is False.
    """
    num = x.numel() // x.shape[1] if is_counted else 0
    if not num:
        return x.new_zeros(1 + 2 * x.shape[1])
    if x.device.type == "cpu":  # var_mean takes three times as long there
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        var, mean = torch.var_mean(x, [dim for dim in range(x.ndim) if dim != 1], correction=0)
    return torch.cat([x.new_full((1,), num), mean, var * num])


class _GroupedFunctions(TorchFunctionMode):
    """Mode in which one module's calls to torch's batch_norm functions use statistics of groups of samples."""

    def __init__(self, norm: Any, groups: NormGroups):
        super().__init__()
        self._norm, self._groups = norm, groups

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = batch_norm_call(func, args, kwargs or {})
        if call is None or not call.training:
            return func(*args, **kwargs or {})
        call.check(self._norm)
        moves = call.running_mean is not None
        return _normalise(self._norm, self._groups, call.input, call.weight, call.bias, call.eps, moves)


@contextlib.contextmanager
def _own_counts(norm: Any) -> Iterator[None]:
    """Restore num_batches_tracked after forward, and store in `norm._weft_counts` whether forward changed it."""
    counter: Tensor | None = norm.num_batches_tracked
    count = None if counter is None else counter.clone()
    try:
        yield
    finally:
        if counter is not None and count is not None:
            norm._weft_counts = not torch.equal(norm.num_batches_tracked, count)
            norm.num_batches_tracked = counter
            counter.copy_(count)


def group_norms(model: nn.Module, mesh: Mesh, size: int) -> NormGroups | None:
    """Make the model's batch norms use statistics of groups of `size` samples. Changes the model.

    If a subclass overrides forward, its forward still runs, and only the statistics of its batch_norm calls change.
    Returns None for a model without batch norms. Raises ModelError for a size below 1.

    Call it after the model was sharded and after `drop_by_position`, before recompute.
    """
    if size < 1:
        raise ModelError(f"norm_group={size}: it is a number of samples. Use 1 or more, such as 32.")
    found = {path: module for path, module in model.named_modules() if isinstance(module, BATCH_NORMS)}
    if not found:
        return None
    groups = NormGroups(mesh, size)
    for path, module in found.items():
        if is_plain_forward(module):
            replace_class(module, GroupedBatchNorm, groups=groups)
        else:
            replace_class(module, GroupedCalls, groups=groups, is_checked=False, counts=True, path=path)
        groups.norms.append(module)
    for block in (repeated_blocks(model) or {"": model}).values():
        if any(isinstance(module, (GroupedBatchNorm, GroupedCalls)) for module in block.modules()):
            state = getattr(block, "_weft_travels", None)
            travels = groups if state is None else TwoStates(state, groups)
            setattr(block, "_weft_travels", travels)  # noqa: B010 - an attribute that nn.Module does not declare
    setattr(model, ATTRIBUTE, groups)
    return groups
