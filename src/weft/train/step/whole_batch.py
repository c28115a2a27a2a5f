"""A loss that compares each sample with all others of the global batch, equal under every plan and accumulation.

Every rank needs the features of all samples, and a sample's gradient has terms from all ranks. So features are gathered
over ranks and microbatches, without their graphs; the loss of a rank's own samples gives gradients of all features,
which are added up over the ranks; and backward starts from a feature's gradient in place of a loss. With several
microbatches a first pass without graphs finds the features (GradCache: Gao et al. 2021, arXiv 2101.06983), so that only
one microbatch's activations are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.comm import all_gather, all_reduce
from weft.errors import PlanError
from weft.mesh import Axis, Mesh
from weft.parallel.pipeline import CountedLoss
from weft.spec.plan import Plan

#: Tensors with a row for each sample: what a forward gives such a loss.
Features = Sequence[torch.Tensor]
#: (features of some samples, features of all, places of those among these) -> (sum of losses, their number).
Compare = Callable[[Features, Features, torch.Tensor], tuple[torch.Tensor, torch.Tensor | int]]
Score = Callable[[Features, Features, torch.Tensor], Mapping[str, torch.Tensor]]


class WholeBatchLoss:
    """A loss of features, which `TrainStep` gives those of the whole global batch. As a function: of one batch alone.

    Args:
        compare: sums the losses of some samples, compared with all of a batch.
        score: what an evaluation adds up over its samples, each compared with all of the evaluation set; None: nothing.
    """

    def __init__(self, compare: Compare, score: Score | None = None):
        self.compare, self.score = compare, score

    def __call__(self, output: Features, batch: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the sum of the losses and their number, of a batch that is all there is."""
        del batch
        return self.compare(output, output, torch.arange(len(output[0]), device=output[0].device))

    def compared(self, mesh: Mesh, counts: Sequence[bool], features: Callable[[int], Features]) -> CountedLoss:
        """Return the loss of a microbatch as a part of that of the global batch.

        Args:
            mesh: of the ranks.
            counts: of each microbatch whether it has samples, and is no stand-in.
            features: runs forward of one, for a first pass that finds all features.
        """
        batch = BatchGradient(self, mesh, len(counts))
        for index in range(len(counts)) if batch.needs_first_pass else ():
            with torch.no_grad():
                found = features(index)
            batch.add(found, counts=counts[index])
        return lambda output, microbatch, index: batch.of(output, index, counts=counts[index])


def expect_whole_batches(plan: Plan) -> None:
    """Refuse plans under which no rank has the features of whole samples before backward.

    Raises:
        PlanError: for a pipeline, and for cut sequences.
    """
    if plan.pp > 1:
        raise PlanError(
            f"pp={plan.pp}: the loss compares all samples of the global batch, and a pipeline starts the backward of "
            "one microbatch before the others are there. Use pp=1."
        )
    if plan.cp > 1:
        raise PlanError(
            f"cp={plan.cp}: the loss compares features of whole samples, and cp gives each rank a part of each. "
            "Use cp=1."
        )


class GatheredFeatures:
    """Features of all samples of some microbatches of all ranks, in the order of the samples.

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
        """Take one microbatch of each rank. A collective.

        Args:
            features: of this rank's samples.
            counts: whether they are samples, and no stand-in.
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
        """Take the last microbatch of others that were gathered over the same ranks. No collective."""
        own, number = other._own[-1], len(other._every[-1][0])
        moved = self._num_rows - (other._num_rows - number)
        self._own.append(range(own.start + moved, own.stop + moved))
        self._num_rows += number
        self._every.append(other._every[-1])

    @property
    def num_added(self) -> int:
        """The number of microbatches so far."""
        return len(self._own)

    def compared(self, act: Callable[[Features, Features, torch.Tensor], Any]) -> Any:
        """Return what a function of own features, all features and own places gives."""
        every, places = [_wide(one) for one in self.every], self.own_places()
        return act([one[places] for one in every], every, places)

    @property
    def every(self) -> list[torch.Tensor]:
        """The features of all samples."""
        return [torch.cat(parts) for parts in zip(*self._every, strict=True)]

    def places(self, index: int) -> torch.Tensor:
        """Return where this rank's samples of a microbatch stand among all, int64."""
        own = self._own[index]
        return torch.arange(own.start, own.stop, device=self._every[0][0].device)

    def own_places(self) -> torch.Tensor:
        """Return where all of this rank's samples stand, int64."""
        return torch.cat([self.places(index) for index in range(len(self._own))])


class BatchGradient:
    """The loss of a global batch as each microbatch's backward needs it: gradients of its features.

    Args:
        loss: compares samples.
        mesh: of the ranks.
        num_microbatches: of a step; with one, `of` gathers what it is given.
    """

    def __init__(self, loss: WholeBatchLoss, mesh: Mesh, num_microbatches: int):
        self._loss, self._axis = loss, mesh.data
        self._features = GatheredFeatures(mesh.data)
        self._is_single = num_microbatches == 1
        self._grads: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._count: torch.Tensor | int = 0

    @property
    def needs_first_pass(self) -> bool:
        """Whether all microbatches' features are wanted, through `add`, before the first `of`."""
        return not self._is_single

    def add(self, features: Features, *, counts: bool) -> None:
        """Take the features of the next microbatch. A collective.

        Args:
            features: of this rank's samples.
            counts: whether they are samples, and no stand-in.
        """
        self._features.add(features, counts=counts)

    def of(self, features: Features, index: int, *, counts: bool) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return a sum to go backward from, and a count. The sums of all microbatches are this rank's losses.

        Args:
            features: of the microbatch, with their graph.
            index: of the microbatch.
            counts: whether they are samples, and no stand-in.
        """
        if self._is_single:
            self._features.add(features, counts=counts)
        if self._sum is None:
            self._settle()
        assert self._sum is not None
        places = self._features.places(index)
        pulled = features[0].new_zeros(())
        for one, grad in zip(features, self._grads, strict=True):
            if one.requires_grad:
                own = grad[places] if counts else torch.zeros_like(one)
                pulled = pulled + (one.to(own.dtype) * own).sum()
        is_first = index == 0
        value = self._sum if is_first else torch.zeros_like(self._sum)
        return pulled - pulled.detach() + value, self._count if is_first else 0

    def _settle(self) -> None:
        """This rank's losses, and the gradients of all features from all ranks' losses."""
        every = [_wide(one).requires_grad_(one.is_floating_point()) for one in self._features.every]
        places = self._features.own_places()
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
    """Features in a format that losses are computed in, as a leaf."""
    narrow = features.is_floating_point() and features.itemsize < 4
    return features.float() if narrow else features.detach().clone()
