"""Forward and backward passes whose gradients are clipped sample by sample.

One pass keeps the factors of the weight gradients until the microbatch's backward has ended and its norms are computed.
Two passes compute only the norms in the first backward, and the gradients of the weighted losses in a second one
through the same graph. zero=3 and pipelines also run forward twice: their gradients are reduced inside backward, and
the norms of a sample are computed after all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.monitor.step_times import Meter
from weft.parallel.pipeline.runtime import Pipeline, StepWork, pipeline_of
from weft.privacy.gradients import SampleGradients, sample_losses
from weft.privacy.recorder import GradientRecord, UnknownUse
from weft.privacy.rules import check_batch
from weft.train.batches.microbatches import ForwardFn, samples_in, split_rows
from weft.train.losses import CheckedLoss
from weft.train.step.passes import Accumulate, Work
from weft.train.step.sample_check import check_samples, largest_microbatch

#: Elements of gradients that are held until they are passed to autograd.
_DELIVERED = 2**20


class PrivateAccumulate(Accumulate):
    """Runs one microbatch after another, and accumulates clipped sums.

    Args:
        clip: largest norm of a sample's gradient.
        passes: 1 or 2, or 0 for as few as the plan allows.
    """

    def __init__(
        self, model: nn.Module, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, *, mesh: Mesh, clip: float,
        passes: int,
    ):  # fmt: skip
        super().__init__(model, forward, loss, meter)
        self.gradients = SampleGradients(model, mesh, clip)
        self._is_sharded = mesh.plan.zero == 3
        self.passes = passes or (2 if self._is_sharded or mesh.plan.pp > 1 else 1)
        self._mesh, self._has_run, self._is_checked = mesh, False, False

    def run(self, work: Work) -> None:
        """Run all microbatches. In the first steps, check that samples do not change each other's gradients."""
        if not self._is_checked:
            self._check(work)
        super().run(work)

    def _check(self, work: Work) -> None:
        """Check, in the first step and in the first one with two samples in a microbatch, that samples do not mix.

        All data ranks decide alike, because under zero=3 a forward communicates.

        Raises ModelError if they do, or if a parameter's gradient is computed outside the recorder.
        """
        index = largest_microbatch(work)
        most = torch.tensor([min(2, samples_in(work.microbatches[index]))], device=self._mesh.device)
        has_pair = int(all_reduce(most, self._mesh.data, op="max")) == 2
        if has_pair or not self._has_run:
            check_samples(self.model, work, index, self._mesh.plan.precision, self._compute)
        self._has_run, self._is_checked = True, has_pair

    def _compute(self, work: Work) -> tuple[Tensor, Tensor]:
        record, losses = self._norms(work, 0, check=self.gradients.check_graph)
        return losses, self.gradients.norms([record])[0]

    def run_one(self, work: Work, index: int) -> None:
        """Run one microbatch, after the generators have been seeded."""
        check_batch(work.microbatches[index], samples_in(work.microbatches[index]))
        if self.passes == 1:
            self._run_once(work, index)
        elif not self._is_sharded:
            self._run_backward_twice(work, index)
        else:
            [weights] = self.gradients.weights([self._norms(work, index)[0]])
            work.draws.begin(index)
            self._run_weighted(work, index, weights)

    def _run_once(self, work: Work, index: int) -> None:
        last = index == len(work.microbatches) - 1
        with self.engine.microbatch(last):
            record, losses = self._recorded(work, index, keeps=True, counts=True)
            with self.meter.phase("backward"):
                with self._watching():
                    losses.sum().backward()
                [weights] = self.gradients.weights([record])
                weights = weights * (work.scale * (not work.samples[index].is_empty))
                deliver(record.weighted(weights))

    def _run_backward_twice(self, work: Work, index: int) -> None:
        """Run forward once, backward for the norms, and backward of the weighted losses through the same graph."""
        last = index == len(work.microbatches) - 1
        with self.engine.microbatch(last):
            record, losses = self._recorded(work, index, keeps=False, counts=True)
            with self.meter.phase("backward"):
                with self._watching():
                    losses.sum().backward(retain_graph=True)
                    [weights] = self.gradients.weights([record])
                    found = record.second_backward(self._weighted(work, index, losses, weights))
                deliver(found)

    def _watching(self) -> AbstractContextManager[None]:
        """Return a context for a backward that must not reach parameters."""
        # zero=3 calls the hooks of shards after a reduction, even of no gradients.
        return nullcontext() if self._is_sharded else self.gradients.watching()

    def _norms(
        self, work: Work, index: int, check: Callable[[Tensor], None] | None = None
    ) -> tuple[GradientRecord, Tensor]:
        """Run forward and backward without gradients of parameters. Return the record of the norms, and the losses.

        check: called with the losses before backward.
        """
        # zero=3 gathers parameters in hooks that depend on whether gradients are reduced.
        with self.engine.microbatch(False) if self._is_sharded else nullcontext():
            record, losses = self._recorded(work, index, keeps=False, counts=False)
            if check is not None:
                check(losses)
            with self.meter.phase("backward"), self._watching():
                losses.sum().backward()
        return record, losses

    def _recorded(self, work: Work, index: int, *, keeps: bool, counts: bool) -> tuple[GradientRecord, Tensor]:
        """Run forward in a recorder. Return the record and the loss of each sample.

        counts: True to add the losses to the step's sums.
        """
        batch = work.microbatches[index]
        with self.meter.phase("forward"):
            while True:
                record = self.gradients.record(samples_in(batch), keeps=keeps)
                try:
                    with work.inside(index), self.gradients.recorder(record).recording():
                        output = self.forward(self.model, batch)
                    break
                except UnknownUse as unknown:
                    self.gradients.handle(unknown, may_retry=True)
                    work.draws.begin(index)
            losses = self._losses(work, output, index, counts=counts)
        return record, losses

    def _losses(self, work: Work, output: Any, index: int, *, counts: bool) -> Tensor:
        batch = work.microbatches[index]
        runs = [range(one, one + 1) for one in range(samples_in(batch))]
        losses, sums, numbers = sample_losses(self.loss, output, split_rows(batch, runs))
        if counts and not work.samples[index].is_empty:
            # A sample without a finite loss is left out, so that it cannot end the step for all others.
            is_finite = torch.isfinite(sums)
            total, count = sums.where(is_finite, 0.0).sum(), numbers.where(is_finite, 0.0).sum()
            work.losses[index] = total, count
            work.sums[0] += total
            work.sums[1] += count
        return losses

    def _run_weighted(self, work: Work, index: int, weights: Tensor) -> None:
        last = index == len(work.microbatches) - 1
        with self.engine.microbatch(last), work.inside(index):
            with self.meter.phase("forward"):
                output = self.forward(self.model, work.microbatches[index])
                losses = self._losses(work, output, index, counts=True)
                del output
            with self.meter.phase("backward"):
                self._weighted(work, index, losses, weights).backward()

    def _weighted(self, work: Work, index: int, losses: Tensor, weights: Tensor) -> Tensor:
        factor = work.scale * (not work.samples[index].is_empty)
        return (losses * weights.to(losses.dtype)).where(weights > 0, 0.0).sum() * factor


def deliver(gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Pass gradients to autograd, as if backward had computed them. Small ones are passed together."""
    params: list[nn.Parameter] = []
    grads: list[Tensor] = []
    for param, grad in gradients:
        params.append(param)
        grads.append(grad)
        if sum(one.numel() for one in grads) > _DELIVERED:
            torch.autograd.backward(params, grads)
            params, grads = [], []
    if params:
        torch.autograd.backward(params, grads)


class PrivatePipelined(PrivateAccumulate):
    """Runs the pipeline's schedule twice: for the norms, and for the gradients of the weighted losses."""

    def __init__(self, *args: Any, pipeline: Pipeline, **options: Any):
        super().__init__(*args, **options)
        self._pipeline = pipeline

    def run(self, work: Work) -> None:
        """Run this rank's pipeline stages. All ranks of pp must call it."""
        for batch in work.microbatches:
            check_batch(batch, samples_in(batch))
        index_of = {id(batch): index for index, batch in enumerate(work.microbatches)}
        records: list[list[GradientRecord]] = [[] for _ in work.microbatches]

        def record(model: nn.Module, batch: Any) -> Any:
            made = self.gradients.record(samples_in(batch), keeps=False)
            records[index_of[id(batch)]].append(made)
            with self.gradients.recorder(made).recording():
                return self.forward(model, batch)

        unused = torch.zeros_like(work.sums)
        zero = unused.new_zeros(())
        norms = StepWork(
            work.microbatches, record, record,
            lambda output, batch, index: (self._losses(work, output, index, counts=False).sum(), zero),
            1.0, unused, work.draws.seeds, work.inside,
        )  # fmt: skip
        try:
            is_first, self._is_checked = not self._is_checked, True
            with (
                self._watching() if is_first else nullcontext(),
                self.engine.microbatch(False) if self._is_sharded else nullcontext(),
            ):
                self._pipeline.step(norms, self.meter)
        except UnknownUse as unknown:
            self.gradients.handle(unknown, may_retry=False)
        weights = self._joined(records, work.microbatches)

        def weighted(output: Any, batch: Any, index: int) -> tuple[Tensor, Tensor]:
            losses = self._losses(work, output, index, counts=True)
            return self._weighted(work, index, losses, weights[index]) / work.scale, zero

        stages = StepWork(
            work.microbatches, self.forward, self.forward, weighted, work.scale, torch.zeros_like(work.sums),
            work.draws.seeds, work.inside,
        )  # fmt: skip
        with self.engine.microbatch(last=True):
            self._pipeline.step(stages, self.meter)

    def _joined(self, records: Sequence[Sequence[GradientRecord]], batches: Sequence[Any]) -> list[Tensor]:
        """Return the clipping weights by microbatch. A rank has several records of one if it has several stages."""
        merged: list[GradientRecord] = []
        for of_stages, batch in zip(records, batches, strict=True):
            total = self.gradients.record(samples_in(batch), keeps=False)
            for one in of_stages:
                total.add(one)
            merged.append(total)
        return self.gradients.weights(merged)


def private_passes(
    model: nn.Module, mesh: Mesh, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, *, clip: float,
    passes: int,
) -> PrivateAccumulate:  # fmt: skip
    """Return the passes of a private step under the mesh's plan."""
    options: dict[str, Any] = {"mesh": mesh, "clip": clip, "passes": passes}
    if (pipeline := pipeline_of(model)) is not None:
        return PrivatePipelined(model, forward, loss, meter, pipeline=pipeline, **options)
    return PrivateAccumulate(model, forward, loss, meter, **options)
