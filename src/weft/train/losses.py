"""Losses that compare samples of the global batch or of a group, float32 outputs for losses, and checks of results.

`GlobalBatchLoss` compares each sample with all others. The result is the same under every plan that supports it. Every
rank needs the features of all samples, and a sample's gradient has terms from all ranks. Features are gathered
over ranks and microbatches without their graphs. The loss of a rank's own samples gives gradients of all features,
which are summed over the ranks. Backward then starts from the gradients of the rank's own features. With several
microbatches, a first pass without graphs computes the features, so that only one microbatch's activations are in memory
at a time (GradCache: Gao et al. 2021, arXiv 2101.06983).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from weft.comm.autograd import gather_from
from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import Axis, Mesh
from weft.config.plan import Plan
from weft.data.batches import map_tensors, tensors_in
from weft.data.random_state import seed_generators
from weft.errors import ModelError, PlanError, WeftWarning
from weft.parallel.batch_norm.norm_groups import SampleGroups
from weft.parallel.local_means import is_hugging_face_output, sum_of_hugging_face
from weft.parallel.pipeline.runtime import CountedLoss
from weft.parallel.random.streams import SampleNumbers
from weft.train.batches.microbatches import LABELS

#: Tensors with one row per sample: the output of forward for such a loss.
Features = Sequence[torch.Tensor]
#: (features of some samples, features of all samples, positions of the former in the latter) -> (sum of losses, count).
Compare = Callable[[Features, Features, torch.Tensor], tuple[torch.Tensor, torch.Tensor | int]]
Score = Callable[[Features, Features, torch.Tensor], Mapping[str, torch.Tensor]]


class GlobalBatchLoss:
    """A loss on the features of the global batch, which `TrainStep` gathers. A direct call uses its batch alone.

    Args:
        compare: returns the sum of the losses of some samples, each compared with the whole batch, and their count.
        score: like `compare`, but returns the sums that metrics need, over the whole evaluation set; None for no
            metrics.
    """

    def __init__(self, compare: Compare, score: Score | None = None):
        self.compare, self.score = compare, score

    def __call__(self, output: Features, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the sum of the losses and their count, for a batch that is the whole global batch."""
        del batch
        return self.compare(output, output, torch.arange(len(output[0]), device=output[0].device))

    def compared(self, mesh: Mesh, counts: Sequence[bool], features: Callable[[int], Features]) -> CountedLoss:
        """Return a loss function for microbatches that are parts of the global batch.

        Args:
            mesh: the mesh of the ranks.
            counts: for each microbatch, True if it has samples, False if it is a placeholder.
            features: runs forward on a microbatch by index, for the first pass, which computes all features.
        """
        batch = BatchGradient(self, mesh, len(counts))
        for index in range(len(counts)) if len(counts) > 1 else ():
            with torch.no_grad():
                found = features(index)
            batch.add(found, counts=counts[index])
        return lambda output, microbatch, index: batch.of(output, index, counts=counts[index])


def expect_global_batch(plan: Plan) -> None:
    """Raise an error for plans under which no rank has the features of whole samples before backward.

    Raises:
        PlanError: for pipeline parallelism, sharded sequences, and unequal shares.
    """
    if plan.shares:
        raise PlanError(
            "shares: the loss compares all samples of the global batch, and that is built for equal parts. Leave "
            "shares out."
        )
    if plan.pp > 1:
        raise PlanError(
            f"pp={plan.pp}: the loss compares all samples of the global batch, and a pipeline starts the backward of "
            "one microbatch before the others are there. Use pp=1."
        )
    if plan.cp > 1:
        raise PlanError(
            f"cp={plan.cp}: the loss compares features of full samples, and cp shards each sample. Use cp=1."
        )


class GatheredFeatures:
    """Gathered features of all samples of all ranks, for some microbatches, ordered by microbatch and then by rank.

    Args:
        axis: ranks that read different samples.
    """

    def __init__(self, axis: Axis):
        self._axis = axis
        self._every: list[list[torch.Tensor]] = []
        self._own: list[range] = []
        self._num_rows = 0

    @torch.no_grad()
    def add(self, features: Features, *, counts: bool = True) -> None:
        """Add one microbatch of each rank. All ranks must call it.

        Args:
            counts: False if the microbatch is a placeholder without samples.
        """
        sizes = torch.tensor([len(features[0]) if counts else 0], device=features[0].device)
        rows: list[int] = all_gather(sizes, self._axis).tolist() if self._axis.size > 1 else sizes.tolist()
        first = self._num_rows + sum(rows[: self._axis.rank])
        self._own.append(range(first, first + rows[self._axis.rank]))
        self._num_rows += sum(rows)
        self._every.append([self._gathered(one.detach()[: rows[self._axis.rank]], rows) for one in features])

    def _gathered(self, own: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if self._axis.size == 1:
            return own
        most = max(rows)
        filled = own.new_zeros((most, *own.shape[1:]))
        filled[: len(own)] = own
        every = all_gather(filled, self._axis).view(self._axis.size, most, *own.shape[1:])
        return torch.cat([every[rank, :count] for rank, count in enumerate(rows)])

    def take(self, other: GatheredFeatures) -> None:
        """Add the last microbatch of `other`, which gathers over the same ranks. Local; no communication."""
        own, number = other._own[-1], len(other._every[-1][0])
        moved = self._num_rows - (other._num_rows - number)
        self._own.append(range(own.start + moved, own.stop + moved))
        self._num_rows += number
        self._every.append(other._every[-1])

    @property
    def num_added(self) -> int:
        """Number of microbatches added so far."""
        return len(self._own)

    def compared(self, act: Callable[[Features, Features, torch.Tensor], Any]) -> Any:
        """Return act(features of own samples, features of all samples, positions of own samples)."""
        every, places = [_wide(one) for one in self.every], self.own_positions()
        return act([one[places] for one in every], every, places)

    @property
    def every(self) -> list[torch.Tensor]:
        """The features of all samples."""
        return [torch.cat(parts) for parts in zip(*self._every, strict=True)]

    def sample_positions(self, index: int) -> torch.Tensor:
        """Return the positions, among all samples, of this rank's samples of a microbatch, int64."""
        own = self._own[index]
        return torch.arange(own.start, own.stop, device=self._every[0][0].device)

    def own_positions(self) -> torch.Tensor:
        """Return the positions of all of this rank's samples, int64."""
        return torch.cat([self.sample_positions(index) for index in range(len(self._own))])


class BatchGradient:
    """Computes the gradients of a global batch loss with respect to each microbatch's features, to start backward from.

    Args:
        num_microbatches: microbatches per step. If 1, `of` gathers its features.
    """

    def __init__(self, loss: GlobalBatchLoss, mesh: Mesh, num_microbatches: int):
        self._loss, self._axis = loss, mesh.data
        self._features = GatheredFeatures(mesh.data)
        self._is_single = num_microbatches == 1
        self._grads: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._count: torch.Tensor | int = 0

    def add(self, features: Features, *, counts: bool) -> None:
        """Add the features of the next microbatch. All ranks must call it.

        Args:
            counts: False if the microbatch is a placeholder without samples.
        """
        self._features.add(features, counts=counts)

    def of(self, features: Features, index: int, *, counts: bool) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return a loss sum to start backward from, and a count. All microbatches' sums add up to this rank's losses.

        Args:
            features: features of the microbatch, with their autograd graph.
            index: index of the microbatch in the step.
            counts: False if the microbatch is a placeholder without samples.
        """
        if self._is_single:
            self._features.add(features, counts=counts)
        if self._sum is None:
            self._finalize()
        assert self._sum is not None
        places = self._features.sample_positions(index)
        pulled = features[0].new_zeros(())
        for one, grad in zip(features, self._grads, strict=True):
            if one.requires_grad:
                own = grad[places] if counts else torch.zeros_like(one)
                pulled = pulled + (one.to(own.dtype) * own).sum()
        is_first = index == 0
        value = self._sum if is_first else torch.zeros_like(self._sum)
        return pulled - pulled.detach() + value, self._count if is_first else 0

    def _finalize(self) -> None:
        every = [_wide(one).requires_grad_(one.is_floating_point()) for one in self._features.every]
        places = self._features.own_positions()
        with torch.enable_grad():
            loss_sum, self._count = self._loss.compare([one[places] for one in every], every, places)
            leaves = [one for one in every if one.requires_grad]
            found = iter(torch.autograd.grad(loss_sum, leaves, allow_unused=True))
        self._sum = loss_sum.detach()
        for one in every:
            grad = next(found) if one.requires_grad else None
            whole = torch.zeros_like(one) if grad is None else grad
            self._grads.append(whole if grad is None else all_reduce(whole.contiguous(), self._axis))


def _wide(features: torch.Tensor) -> torch.Tensor:
    narrow = features.is_floating_point() and features.itemsize < 4
    return features.float() if narrow else features.detach().clone()


# A loss that compares samples within fixed groups; equal under every plan that gives a group one microbatch index.

#: (sum of losses, count).
Summed = tuple[torch.Tensor, torch.Tensor | int]


class GroupLoss:
    """A loss on the features, (N, ...) each, of groups of samples. A direct call treats its batch as the global batch.

    Args:
        size: samples per group. The last group of a batch may be smaller.
        compare: returns the sum of the losses of some samples, each compared with its whole group.

    Raises:
        ModelError: if `size` is less than 2.
    """

    def __init__(self, size: int, compare: Compare):
        if size < 2:
            raise ModelError(f"group_loss({size}): a sample is compared with the others of its group. Use 2 or more.")
        self.size, self.compare = size, compare
        self._groups: SampleGroups | None = None

    def over(self, mesh: Mesh) -> GroupLoss:
        """Return the same loss for the ranks of a mesh.

        Raises:
            PlanError: for sharded sequences, because no rank has whole samples.
        """
        if mesh.plan.cp > 1:
            raise PlanError(
                f"cp={mesh.plan.cp}: the loss compares features of full samples, and cp shards each sample. Use cp=1."
            )
        found = GroupLoss(self.size, self.compare)
        found._groups = SampleGroups(mesh, self.size, f"group_loss({self.size})", "size")
        return found

    def __call__(self, output: Any, batch: Any, samples: SampleNumbers | None = None, index: int = 0) -> Summed:
        """Return the sum of the losses of this rank's samples, and their count.

        Args:
            output: features, or a tuple of them.
            batch: the batch as for any loss function; unused.
            samples: sample numbers in the global batch; None if the batch is the whole global batch.
            index: index of the microbatch in the step. The call is a collective if groups span ranks.

        Raises:
            ModelError: if the features do not have one row per sample.
        """
        del batch
        features: Features = [output] if isinstance(output, torch.Tensor) else list(output)
        if samples is None or self._groups is None:
            return self._compared(features, features, range(len(features[0])), range(len(features[0])))
        cut = self._groups.split_of(samples, index)
        if samples.is_empty and cut.axis is None:
            return self.compare(features, features, torch.arange(len(features[0]), device=features[0].device))
        counts = [len(run) for run in cut.runs]
        own = cut.runs[cut.axis.rank] if cut.axis is not None else cut.runs[0]
        if len(features[0]) != len(own) and not samples.is_empty:
            raise ModelError(
                f"group_loss({self.size}): the model gave {len(features[0])} rows of features for {len(own)} samples. "
                "Return a row for each sample."
            )
        every, start = features, own.start
        if cut.axis is not None:
            every = [_gathered(one[: len(own)], counts, cut.axis) for one in features]
            start = cut.runs[0].start
        if not len(own):
            return sum((one.sum() * 0.0 for one in every), features[0].sum() * 0.0), 0
        return self._compared(features, every, own, range(start, start + sum(counts)))

    def _compared(self, own: Features, every: Features, mine: range, there: range) -> Summed:
        """Sum the losses of each group, and return the sum and the count.

        `mine`, `there`: indices of this rank's samples and of those in `every`.
        """
        total: torch.Tensor | None = None
        number: torch.Tensor | int = 0
        for first in range(mine.start // self.size * self.size, mine.stop, self.size):
            group = range(max(first, there.start), min(first + self.size, there.stop))
            some = range(max(first, mine.start), min(first + self.size, mine.stop))
            places = torch.arange(some.start - group.start, some.stop - group.start, device=own[0].device)
            found, count = self.compare(
                [one[some.start - mine.start : some.stop - mine.start] for one in own],
                [one[group.start - there.start : group.stop - there.start] for one in every],
                places,
            )
            total, number = found if total is None else total + found, number + count
        assert total is not None
        return total, number


def group_loss(size: int) -> Callable[[Compare], GroupLoss]:
    """Make a loss function from a function that compares samples with their group (a decorator).

    The function gets the features of some samples, the features of their whole group, and the positions of the former
    in the latter. It returns the sum of the former's losses and their count. The features are the model's output, with
    one row per sample.

    Args:
        size: samples per group. The samples of a group may be on several ranks, but must have one microbatch index.
    """
    return lambda compare: GroupLoss(size, compare)


def _gathered(own: torch.Tensor, counts: list[int], axis: Any) -> torch.Tensor:
    """Gather the rows of all ranks, in rank order, with gradients, which are summed over all ranks."""
    most = max(counts)
    missing = most - len(own)
    filled = torch.cat([own, own.new_zeros((missing, *own.shape[1:]))]) if missing else own
    every = gather_from(filled, axis, 0)
    if min(counts) == most:
        return every
    return torch.cat([every[rank * most : rank * most + count] for rank, count in enumerate(counts)])


# Conversion of outputs to float32 for a user's loss function, and checks of its results with one-sentence errors.

#: (output, batch) -> (sum of the losses, number of tokens or samples in the sum).
LossFn = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor | int]]

_FORM = 'return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])'
_WANTED = "Weft divides once, over all ranks and microbatches, so it needs the sum of the losses and how many there are"
_HALVES = (torch.bfloat16, torch.float16)


def in_float32(output: Any) -> Any:
    """Return a model's output with its bfloat16 and float16 tensors in float32.

    Searches tuples, lists, mappings, dataclasses and Hugging Face outputs. Other objects are returned unchanged.
    """
    if any(one.dtype in _HALVES for one in tensors_in(output)):
        return map_tensors(lambda one: one.float() if one.dtype in _HALVES else one, output)
    return output


def needs_float32(loss_fn: Any, plan: Plan) -> bool:
    """Return True if a loss function gets outputs in float32: under bf16, fp16 or fp8, unless it is Weft's own."""
    if plan.precision not in ("bf16", "fp16", "fp8"):
        return False
    return not is_own_code(loss_fn)


def is_own_code(function: Any) -> bool:
    """Return True if a loss or forward function is Weft's own and contains no class or function of the user."""
    compared = getattr(function, "compare", None)  # the function inside a loss over groups
    found = function if compared is None else compared
    while isinstance(found, functools.partial):
        found = found.func
    owner = getattr(found, "__self__", None)
    homes = [getattr(found, "__module__", None) or type(found).__module__]
    homes += [] if owner is None else [type(owner).__module__]
    return all(home.partition(".")[0] == "weft" for home in homes)


def give_float32(model: nn.Module) -> None:
    """Add a hook that converts a model's bf16 and fp16 outputs to float32, for losses in a custom training loop."""
    model.register_forward_hook(_convert_output)


def _convert_output(model: nn.Module, args: Any, output: Any) -> Any:
    del model, args
    return in_float32(output)


class CheckedLoss:
    """Wraps a loss function (output, batch) -> (sum of the losses, count), and checks its results.

    Args:
        loss_fn: the function to check.
        mesh: the mesh of the ranks; None if the batch is the whole global batch.
        warns_of_means: warn if the function returns a mean. Set on one rank, if several ranks or microbatches have
            samples.
    """

    def __init__(self, loss_fn: LossFn, mesh: Mesh | None = None, *, warns_of_means: bool):
        self.loss_fn = loss_fn.over(mesh) if isinstance(loss_fn, GroupLoss) and mesh is not None else loss_fn
        self._widens = mesh is not None and needs_float32(loss_fn, mesh.plan)
        self._warns = warns_of_means

    @property
    def compares(self) -> bool:
        """True if the loss compares samples with each other: `GlobalBatchLoss` and `GroupLoss`."""
        return isinstance(self.loss_fn, GlobalBatchLoss | GroupLoss)

    def of_step(
        self, samples: Sequence[SampleNumbers], found: dict[int, Summed], seed: int | None = None
    ) -> CountedLoss:
        """Return a function (output, microbatch, index) -> (sum of the losses, count).

        For a placeholder without samples, the sum, its gradients and the count are zero.

        Args:
            samples: samples of each microbatch.
            found: dict to which the sum and count of each microbatch with samples are added, by index.
            seed: seed of the generators for the backward after each loss; None to leave them unchanged.
        """

        def loss(output: Any, microbatch: Any, index: int) -> Summed:
            loss_sum, number = self(output, microbatch, samples[index], index)
            if seed is not None:
                seed_generators(seed)
            if not samples[index].numbers:  # a placeholder
                return loss_sum * 0.0, 0
            found[index] = (loss_sum.detach(), number)
            return loss_sum, number

        return loss

    def __call__(
        self, output: Any, batch: Any, samples: SampleNumbers | None = None, index: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the sum and the count for a microbatch. Only a loss over groups gets `samples` and `index`.

        Raises:
            ModelError: if the function returns anything except a 0-d tensor and a count, or if the tensor has no
                gradient although gradients are enabled.
        """
        if self._widens:
            output = in_float32(output)
        try:
            if isinstance(self.loss_fn, GroupLoss):
                returned = self.loss_fn(output, batch, samples, index)
            else:
                returned = self.loss_fn(output, batch)
        except (AttributeError, TypeError) as error:
            if "NoneType" in str(error) and _lacks_loss(output, batch):
                _refuse_none(output)
            raise
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            _refuse(f"it returned {_described(returned)}")
        loss_sum, number = returned
        if loss_sum is None and _lacks_loss(output, batch):
            _refuse_none(output)
        _check_sum(loss_sum)
        if number.ndim if isinstance(number, torch.Tensor) else not isinstance(number, int | float):
            _refuse(f"the number of losses that it returned is {_described(number)}")
        is_own = self._warns and isinstance(output, dict) and loss_sum is output.get("loss")
        if is_own and is_hugging_face_output(output):
            self._warn_of_mean(output)
        return loss_sum, number

    def _warn_of_mean(self, output: Any) -> None:
        self._warns = False  # warn once
        warnings.warn(
            "loss_fn: it returns output.loss, a mean over the tokens of one rank's microbatch, and Weft expects "
            "their sum. The result equals one device's only if all microbatches have the same number of tokens. "
            f"Write\n{sum_of_hugging_face(output)}",
            WeftWarning,
            stacklevel=6,  # the caller of the step
        )


def _check_sum(loss_sum: Any) -> None:
    if not isinstance(loss_sum, torch.Tensor):
        _refuse(f"the sum of the losses that it returned is {_described(loss_sum)}")
    if loss_sum.ndim:
        raise ModelError(
            f"loss_fn: the losses that it returned are a tensor of shape {tuple(loss_sum.shape)}, and Weft needs their "
            f"sum. Return losses.sum() and their number."
        )
    if not loss_sum.requires_grad and torch.is_grad_enabled():
        raise ModelError(
            "loss_fn: the sum that it returned has no gradient, because of .item(), .detach() or no_grad, or it "
            "does not depend on the model's trained parameters. Return the sum computed from the model's output."
        )


def _lacks_loss(output: Any, batch: Any) -> bool:
    has_labels = isinstance(batch, Mapping) and LABELS in batch
    return has_labels and is_hugging_face_output(output) and output.get("loss") is None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"one tensor of shape {tuple(value.shape)}" if value.ndim else "one number, like a mean"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _refuse(found: str) -> NoReturn:
    raise ModelError(f"loss_fn: {found}. {_WANTED}. Write e.g.\n    {_FORM}")


def _refuse_none(output: Any) -> NoReturn:
    raise ModelError(
        f"loss_fn: output.loss is None, because a train step keeps the batch's labels from the model: its own loss "
        f"would be a mean over one rank's tokens. {_WANTED}. Write\n{sum_of_hugging_face(output)}"
    )
