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
from weft.devices import access, host_memory
from weft.monitor.step_times import Meter
from weft.parallel.pipeline.runtime import Pipeline, StepWork, pipeline_of
from weft.parallel.random.streams import SampleNumbers
from weft.privacy.gradients import SampleGradients, sample_losses
from weft.privacy.recorder import GradientRecord, UnknownUse
from weft.privacy.rules import check_batch
from weft.privacy.update import PrivateUpdate
from weft.train.batches.microbatches import ForwardFn, samples_in, split_rows
from weft.train.losses import CheckedLoss
from weft.train.step.passes import Accumulate, Work
from weft.train.step.sample_check import check_samples, largest_microbatch

#: Elements of gradients that are held until they are passed to autograd.
_DELIVERED = 2**20


class PrivateAccumulate(Accumulate):
    """Runs one microbatch after another, and accumulates clipped sums.

    Args:
        update: the clipping norm, the number of passes, and the largest draw.
    """

    def __init__(
        self, model: nn.Module, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, *, mesh: Mesh,
        update: PrivateUpdate,
    ):  # fmt: skip
        super().__init__(model, forward, loss, meter)
        self.gradients = SampleGradients(model, mesh, update.privacy.clip)
        self._is_sharded, self._mesh, self._update = mesh.plan.zero == 3, mesh, update
        #: 1 or 2; 0 until the first step chooses by memory.
        self.passes = update.privacy.passes or (2 if self._is_sharded or mesh.plan.pp > 1 else 0)
        self._has_run, self._is_checked = False, False

    def run(self, work: Work) -> None:
        """Run all microbatches. In the first steps, check that samples do not change each other's gradients."""
        if not self._is_checked:
            self._check(work)
        super().run(work)

    def _check(self, work: Work) -> None:
        """Check, in the first step and in the first one with two rows in a microbatch, that rows do not mix.

        All data ranks make the same decision, because a forward under zero=3 runs collectives.

        Raises ModelError if they do, or if a parameter's gradient is computed outside the recorder.
        """
        index = largest_microbatch(work)
        batch, samples = work.microbatches[index], work.samples[index]
        most = torch.tensor([min(2, samples_in(batch))], device=self._mesh.device)
        has_pair = int(all_reduce(most, self._mesh.data, op="max")) == 2

        def compute(few: Work) -> tuple[Tensor, Tensor]:
            record, losses = self._norms(few, 0, keeps=not self.passes, check=self.gradients.check_graph)
            if not self.passes:
                self.passes = self._passes_in(record.kept_bytes / len(losses), batch, samples)
            return losses, self.gradients.norms([record])[0]

        if has_pair or not self._has_run:
            check_samples(self.model, work, index, self._mesh.plan.precision, compute)
        self._has_run, self._is_checked = True, has_pair

    def _passes_in(self, row_bytes: float, batch: Any, samples: SampleNumbers) -> int:
        """Return 1 if one pass fits into memory on every rank, else 2. All ranks call it.

        Its factors for the largest draw must fit into half of the free memory: the other half is for activations.

        Args:
            row_bytes: bytes of the factors of one row.
            batch, samples: a microbatch. A unit of several records has as many rows as in it.
        """
        rows = samples_in(batch) // len(samples.records) if samples.records else 1
        plan, device = self._mesh.plan, self._mesh.device
        units = -(-self._update.most_drawn // (self._mesh.data.size * plan.microbatches_per_step))
        free = access.free_bytes(device)
        if free is None:
            free = host_memory.free_bytes_of_a_rank()
        found = torch.tensor([row_bytes * rows * units > free / 2], dtype=torch.float64, device=device)
        if self._mesh.world_size > 1:
            found = all_reduce(found, self._mesh.world, op="max")
        return 2 if found else 1

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
        self, work: Work, index: int, *, keeps: bool = False, check: Callable[[Tensor], None] | None = None
    ) -> tuple[GradientRecord, Tensor]:
        """Run forward and backward without gradients of parameters. Return the record of the norms, and the losses.

        keeps: keep the factors. check: called with the losses before backward.
        """
        # zero=3 gathers parameters in hooks that depend on whether gradients are reduced.
        with self.engine.microbatch(False) if self._is_sharded else nullcontext():
            record, losses = self._recorded(work, index, keeps=keeps, counts=False)
            if check is not None:
                check(losses)
            with self.meter.phase("backward"), self._watching():
                losses.sum().backward()
        return record, losses

    def _record(self, work: Work, index: int, *, keeps: bool = False) -> GradientRecord:
        """Return an empty record of a microbatch, whose samples have equal numbers of rows if they are units."""
        rows, own = samples_in(work.microbatches[index]), work.samples[index]
        each = rows // len(own.numbers) if own.records else 1
        return self.gradients.record(rows, keeps=keeps, each=each)

    def _recorded(self, work: Work, index: int, *, keeps: bool, counts: bool) -> tuple[GradientRecord, Tensor]:
        """Run forward in a recorder. Return the record and the loss of each row, whose sum over a unit is the unit's.

        counts: True to add the losses to the step's sums.
        """
        batch = work.microbatches[index]
        with self.meter.phase("forward"):
            while True:
                record = self._record(work, index, keeps=keeps)
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
        if work.samples[index].records:
            shares = row_shares(work.samples[index].records, len(losses)).to(sums)
            losses, sums, numbers = losses * shares.to(losses), sums * (shares > 0), numbers * (shares > 0)
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
        weights = weights.repeat_interleave(len(losses) // max(1, len(weights)))
        return (losses * weights.to(losses.dtype)).where(weights > 0, 0.0).sum() * factor


def row_shares(records: Sequence[int], rows: int) -> Tensor:
    """Return the share of each row in its unit's loss, float64 (rows,): 1 / records, and 0 for rows that fill it up."""
    counts = torch.tensor(records, dtype=torch.float64)[:, None]
    return torch.where(torch.arange(rows // len(records)) < counts, 1 / counts, 0.0).flatten()


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
            index = index_of[id(batch)]
            made = self._record(work, index)
            records[index].append(made)
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
        weights = self._joined(records, work)

        def weighted(output: Any, batch: Any, index: int) -> tuple[Tensor, Tensor]:
            losses = self._losses(work, output, index, counts=True)
            return self._weighted(work, index, losses, weights[index]) / work.scale, zero

        stages = StepWork(
            work.microbatches, self.forward, self.forward, weighted, work.scale, torch.zeros_like(work.sums),
            work.draws.seeds, work.inside,
        )  # fmt: skip
        with self.engine.microbatch(last=True):
            self._pipeline.step(stages, self.meter)

    def _joined(self, records: Sequence[Sequence[GradientRecord]], work: Work) -> list[Tensor]:
        """Return the clipping weights by microbatch. A rank has several records of one if it has several stages."""
        merged: list[GradientRecord] = []
        for index, of_stages in enumerate(records):
            total = self._record(work, index)
            for one in of_stages:
                total.add(one)
            merged.append(total)
        return self.gradients.weights(merged)


def private_passes(
    model: nn.Module, mesh: Mesh, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, update: PrivateUpdate
) -> PrivateAccumulate:
    """Return the passes of a private step under the mesh's plan."""
    options: dict[str, Any] = {"mesh": mesh, "update": update}
    if (pipeline := pipeline_of(model)) is not None:
        return PrivatePipelined(model, forward, loss, meter, pipeline=pipeline, **options)
    return PrivateAccumulate(model, forward, loss, meter, **options)
