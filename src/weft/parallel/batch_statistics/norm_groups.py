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
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Pending, start_all_reduce
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.batch_statistics.sample_groups import GroupCut, SampleGroups
from weft.parallel.randomness import SampleNumbers

ATTRIBUTE = "_weft_norm_groups"


class NormGroups:
    """The batch norms of one model on one rank, whose statistics are those of groups of `size` samples."""

    def __init__(self, mesh: Mesh, size: int):
        self.size = size
        self._groups = SampleGroups(mesh, size, f"norm_group={size}", "norm_group")
        self.norms: list[nn.Module] = []
        self._mesh = mesh
        self._cut: GroupCut | None = None
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
        with self._at(self._groups.cut_of(samples, index)):
            yield

    def travelling(self) -> AbstractContextManager[None]:
        """Return what a later replay of what is computed now must run inside of."""
        return self._at(self._cut)

    @contextlib.contextmanager
    def _at(self, cut: GroupCut | None) -> Iterator[None]:
        before, self._cut = self._cut, cut
        try:
            yield
        finally:
            self._cut = before

    @property
    def cut(self) -> GroupCut:
        """How groups lie in what is computed now."""
        if self._cut is None:
            raise ModelError(
                f"norm_group={self.size}: a model in training needs to know which samples it is given, and only "
                "run.train_step tells it. Call run.train_step, or leave norm_group out in a loop of your own."
            )
        return self._cut

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
    norm.num_batches_tracked += is_moved & getattr(norm, "_weft_counts", True)  # some subclasses leave it
    factor = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.clamp(min=1).double()
    means = (found[:-1] / num.clamp(min=1)).view(2, -1)
    for running, mean in zip((norm.running_mean, norm.running_var), means, strict=True):
        running.copy_(torch.where(is_moved, running + (mean.to(running.dtype) - running) * factor, running))


def _begins(cut: GroupCut, size: int) -> list[float]:
    """For each group of a microbatch, 1 where its first sample is this rank's: there it is counted."""
    numbers = cut.samples.numbers
    if not numbers:
        return [0.0] * cut.num_groups
    own = range(numbers[0], numbers[-1] + 1)
    return [float((cut.first + group) * size in own) for group in range(cut.num_groups)]


class TwoStates:
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


def norm_groups_of(model: nn.Module) -> NormGroups | None:
    """Return what `group_norms` made for this model."""
    return getattr(model, ATTRIBUTE, None)
