"""A loss that compares the samples of fixed groups with each other, equal under every plan that keeps groups together.

Contrastive losses see other samples, so the number of devices changes what is learned where each compares its own.
Here the global batch is divided into groups of consecutive samples, as `norm_group` does, and each sample is compared
with its group. A group that spans ranks is gathered over these, with one collective forward and one back.

N samples of this rank's microbatch, M of its groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.comm.autograd import gather_from
from weft.errors import ModelError, PlanError
from weft.mesh import Mesh
from weft.parallel.batch_statistics import SampleGroups
from weft.parallel.randomness import SampleNumbers
from weft.train.step.whole_batch import Compare, Features

#: (sum of losses, their number).
Summed = tuple[torch.Tensor, torch.Tensor | int]


class GroupLoss:
    """A loss of features, (N, ...) each, which a train step gives those of whole groups. As a function: of one batch.

    Args:
        size: samples of a group; the last of a batch may be smaller.
        compare: sums the losses of some samples, compared with all of a group.
    """

    def __init__(self, size: int, compare: Compare):
        if size < 2:
            raise ModelError(f"group_loss({size}): a sample is compared with the others of its group. Use 2 or more.")
        self.size, self.compare = size, compare
        self._groups: SampleGroups | None = None

    def over(self, mesh: Mesh) -> GroupLoss:
        """Return the same for the ranks of a mesh.

        Raises:
            PlanError: for cut sequences, of which no rank has whole samples.
        """
        if mesh.plan.cp > 1:
            raise PlanError(
                f"cp={mesh.plan.cp}: the loss compares features of whole samples, and cp gives each rank a part of "
                "each. Use cp=1."
            )
        found = GroupLoss(self.size, self.compare)
        found._groups = SampleGroups(mesh, self.size, f"group_loss({self.size})", "size")
        return found

    def __call__(self, output: Any, batch: Any, samples: SampleNumbers | None = None, index: int = 0) -> Summed:
        """Return the sum of the losses of this rank's samples, and their number.

        Args:
            output: features, or a tuple of them.
            batch: as a loss function gets it; it is not looked at.
            samples: of the global batch; None: the batch is all there is.
            index: of the microbatch in the step. A collective where groups span ranks.
        """
        del batch
        features: Features = [output] if isinstance(output, torch.Tensor) else list(output)
        if samples is None or self._groups is None:
            return self._compared(features, features, range(len(features[0])), range(len(features[0])))
        cut = self._groups.cut_of(samples, index)
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
        """Each group's losses. mine: numbers of this rank's samples; there: of those of `every`."""
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
    """Make a loss function of one that compares samples, each with those of its group of the global batch.

    The function gets the features of some samples, those of their whole group, and where the former stand among these;
    it returns the sum of the former's losses, and their number. What the model returns are the features, with a row for
    each sample.

    Args:
        size: samples of a group, which must not be divided over microbatches.
    """
    return lambda compare: GroupLoss(size, compare)


def _gathered(own: torch.Tensor, counts: list[int], axis: Any) -> torch.Tensor:
    """Rows of all ranks, in order; each rank's gradients are sums over what all ranks made of its rows."""
    most = max(counts)
    missing = most - len(own)
    filled = torch.cat([own, own.new_zeros((missing, *own.shape[1:]))]) if missing else own
    every = gather_from(filled, axis, 0)
    if min(counts) == most:
        return every
    return torch.cat([every[rank * most : rank * most + count] for rank, count in enumerate(counts)])
