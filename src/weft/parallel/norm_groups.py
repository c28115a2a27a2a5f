"""Batch norm over fixed groups of samples, the same under every plan.

torch's batch norm takes the statistics of the samples that it happens to see: those of one microbatch on one rank. Here
a global batch is divided into groups of consecutive samples, and each sample is normalised with the statistics of its
group, wherever the group's samples lie. A group on one rank costs what torch's own costs; one that spans ranks is
summed over just these ranks, with one collective forward and one back (as the synchronised batch norm of torch does
over all). Running statistics move once a step, by the mean over the step's groups.

Letters: N rows, C channels, G groups, K ranks that share groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.comm import Pending, all_gather, all_reduce, start_all_reduce
from weft.errors import ModelError
from weft.mesh import Axis, Mesh
from weft.models import BATCH_NORMS
from weft.parallel.randomness import SampleNumbers
from weft.private_torch import Function, uncompiled
from weft.spec import shares
from weft.structure import become, repeated_blocks

_ATTRIBUTE = "_weft_norm_groups"


@dataclass(frozen=True, slots=True)
class Cut:
    """How the groups of one microbatch lie.

    index: of the microbatch in the step. samples: this rank's. first: the number of the first group that has samples in
    it. num_groups: in the microbatch, over the ranks of `axis`. axis: the ranks that share groups; None: none do.
    ends_alone: the last group of the global batch is one sample.
    """

    index: int
    samples: SampleNumbers
    first: int
    num_groups: int
    axis: Axis | None
    ends_alone: bool = False


class NormGroups:
    """The batch norms of one model on one rank, whose statistics are those of groups of `size` samples."""

    def __init__(self, mesh: Mesh, size: int):
        self.size = size
        self.norms: list[nn.Module] = []
        self._mesh = mesh
        self._cut: Cut | None = None
        #: Of each norm, by microbatch: sums of means and variances over the groups that begin on this rank, and how
        #: many these are, (2C + 1,).
        self._seen: dict[int, dict[int, Tensor]] = {}
        self._pending: Pending | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NormGroups:
        return self  # a copy of the model runs on the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    # --- where the model is ---

    @contextlib.contextmanager
    def microbatch(self, samples: SampleNumbers, index: int) -> Iterator[None]:
        """While inside, the model is given these samples of the global batch.

        Raises:
            ModelError: where a group has samples in another microbatch.
        """
        with self._at(self._cut_of(samples, index)):
            yield

    def travelling(self) -> AbstractContextManager[None]:
        """Return what a later replay of what is computed now must run inside of."""
        return self._at(self._cut)

    @contextlib.contextmanager
    def _at(self, cut: Cut | None) -> Iterator[None]:
        before, self._cut = self._cut, cut
        try:
            yield
        finally:
            self._cut = before

    @property
    def cut(self) -> Cut:
        """How groups lie in what is computed now."""
        if self._cut is None:
            raise ModelError(
                f"norm_group={self.size}: a model in training needs to know which samples it is given, and only "
                "run.train_step tells it. Call run.train_step, or leave norm_group out in a loop of your own."
            )
        return self._cut

    def _cut_of(self, samples: SampleNumbers, index: int) -> Cut:
        size, data, parts = self.size, self._mesh.data, self._mesh.plan.microbatches_per_step
        numbers, num_ranks = samples.numbers, data.size
        count = len(numbers) * num_ranks * parts if samples.total is None else samples.total
        runs = shares.share_out(count, num_ranks * parts)[index * num_ranks : (index + 1) * num_ranks]
        start, stop = runs[0].start, runs[-1].stop
        own = runs[data.rank]
        if list(numbers) != list(own):
            return self._own_alone(samples, index, count)
        if not _on_borders(range(start, stop), size, count):
            raise ModelError(
                f"norm_group={size}: a microbatch holds samples {start} to {stop - 1} of the global batch over all "
                f"ranks, and a group must lie in one microbatch. Use a norm_group that divides {stop - start}, or "
                f"fewer microbatches."
            )
        alone = count % size == 1 or size == 1
        if all(_on_borders(run, size, count) for run in runs):
            return Cut(index, samples, own.start // size, max(1, -(-len(own) // size)), None, alone)
        axis = self._sharing(len(own), count % (num_ranks * parts) == 0)
        among = (
            runs if axis is data else [runs[data.rank // axis.size * axis.size + place] for place in range(axis.size)]
        )
        first = among[0].start // size
        return Cut(index, samples, first, -(-(among[-1].stop - first * size) // size), axis, alone)

    def _own_alone(self, samples: SampleNumbers, index: int, count: int) -> Cut:
        """Of samples that lie elsewhere than Weft puts them: fine where they are whole groups."""
        numbers = samples.numbers
        is_run = list(numbers) == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
        if not is_run or not _on_borders(range(numbers[0], numbers[-1] + 1), self.size, count):
            raise ModelError(
                f"norm_group={self.size}: this rank's microbatch holds parts of groups, and Weft does not know where "
                "the other parts are. Pass the DataLoader through run.shard, which deals out samples in order."
            )
        return Cut(index, samples, numbers[0] // self.size, -(-len(numbers) // self.size), None)

    def _sharing(self, rows: int, is_even: bool) -> Axis:
        """The ranks among which groups lie: as few as there are where all ranks have equally many samples."""
        data, plan = self._mesh.data, self._mesh.plan
        if is_even and rows and self.size % rows == 0 and data.size % (ranks := self.size // rows) == 0:
            inner = plan.dp_shard
            names = (f"dp_shard/{ranks}",) if inner % ranks == 0 else (f"dp_replicate/{ranks // inner}", "dp_shard")
            first = data.rank // ranks * ranks
            if (inner % ranks == 0 or ranks % inner == 0) and self._mesh.ranks_over(names) == data.ranks[
                first : first + ranks
            ]:
                return self._mesh[names]
        return data

    # --- running statistics ---

    def see(self, norm: nn.Module, mean_GC: Tensor, var_GC: Tensor) -> None:
        """Take the statistics of a norm's groups in this microbatch; a replay brings the same once more."""
        cut = self.cut
        found = torch.cat([mean_GC, var_GC, mean_GC.new_ones(len(mean_GC), 1)], 1).double()
        begins = _begins(cut, self.size)
        if not all(begins):
            found = found * found.new_tensor(begins)[:, None]
        self._seen.setdefault(id(norm), {})[cut.index] = found.sum(0)

    def begin(self) -> None:
        """Begin a step."""
        self._seen.clear()
        self._pending = None

    def start(self) -> None:
        """Begin to add up the ranks' statistics, after the last backward. All ranks call it."""
        parts: list[Tensor] = []
        for norm in self._moving():
            none = torch.zeros(2 * norm.num_features + 1, dtype=torch.float64, device=self._mesh.device)
            parts.append(sum(self._seen.get(id(norm), {}).values(), none))
        if parts:
            self._pending = start_all_reduce(torch.cat(parts), self._mesh.data)

    @torch.no_grad()
    def finish(self, *, moved: bool | Tensor) -> None:
        """Move the running statistics at the end of a step where the weights moved. A skipped step leaves them.

        moved: a 0-d bool of the device where the host does not know it yet.
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
        """The norms whose running statistics move: the same on all ranks."""
        return [norm for norm in self.norms if norm.training and norm.track_running_stats]


def _move(norm: Any, found: Tensor, moved: bool | Tensor) -> None:
    """As torch moves them: by `momentum`, or to the mean over all steps where it is None."""
    num = found[-1]
    is_moved = (num > 0) & moved  # a norm that no group went through stays as it is
    norm.num_batches_tracked += is_moved
    factor = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.clamp(min=1).double()
    means = (found[:-1] / num.clamp(min=1)).view(2, -1)
    for running, mean in zip((norm.running_mean, norm.running_var), means, strict=True):
        running.copy_(torch.where(is_moved, running + (mean.to(running.dtype) - running) * factor, running))


def _on_borders(run: range, size: int, count: int) -> bool:
    """Whether a run of samples is whole groups; the last group of a batch may be smaller."""
    return not run or (run.start % size == 0 and (run.stop % size == 0 or run.stop == count))


def _begins(cut: Cut, size: int) -> list[float]:
    """For each group of a microbatch, 1 where its first sample is this rank's: there it is counted."""
    numbers = cut.samples.numbers
    if not numbers:
        return [0.0] * cut.num_groups
    own = range(numbers[0], numbers[-1] + 1)
    return [float((cut.first + group) * size in own) for group in range(cut.num_groups)]


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
    norm._check_input_dim(x)
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


def _rows_of_groups(cut: Cut, size: int, count: int) -> tuple[int, ...]:
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


class _Both:
    """Two states that a replay needs."""

    def __init__(self, *states: Any):
        self._states = states

    @contextlib.contextmanager
    def _inside(self, contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield

    def travelling(self) -> AbstractContextManager[None]:
        """Return what a replay runs inside of."""
        return self._inside([state.travelling() for state in self._states])


def group_norms(model: nn.Module, mesh: Mesh, size: int) -> NormGroups | None:
    """Let the model's batch norms take the statistics of groups of `size` samples, in place. None: it has none.

    Call it when the model has been cut, after dropout was made to follow positions and before recompute.

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
            block._weft_travels = groups if state is None else _Both(state, groups)  # type: ignore[assignment]
    setattr(model, _ATTRIBUTE, groups)
    return groups


def norm_groups_of(model: nn.Module) -> NormGroups | None:
    """Return what `group_norms` made for this model."""
    return getattr(model, _ATTRIBUTE, None)
