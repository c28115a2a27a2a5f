"""One optimizer step, with the same result under every plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.errors import ModelError, WeftWarning
from weft.memory.graph_recorder import Recorder
from weft.monitor.step_times import Meter
from weft.optim.step_decision import LossScale
from weft.parallel.local_means import trust_loss
from weft.parallel.pipeline.runtime import pipeline_of
from weft.parallel.state.gradients import data_parallel
from weft.privacy.update import PrivateUpdate
from weft.train.batches.microbatches import BatchSplit, ForwardFn
from weft.train.losses import CheckedLoss, GlobalBatchLoss, LossFn, expect_global_batch
from weft.train.step.checks import FirstStep, ReplicaWatch, StepCheck
from weft.train.step.errors import explains_failures
from weft.train.step.graphed_passes import Graphed, GraphedPasses, graphed_passes
from weft.train.step.passes import Accumulate, AccumulateCompared, ModelState, Pipelined, Work
from weft.train.step.private_passes import private_passes
from weft.train.step.update import StepMetrics, StepTotals, WeightUpdate


def passes_of(
    model: nn.Module, mesh: Mesh, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, state: ModelState,
    recorder: Recorder | None = None, privacy: PrivateUpdate | None = None,
) -> Accumulate:  # fmt: skip
    """Return the object that runs a step's microbatches. recorder: records graphs for graphs=on; None for CUDA's."""
    basics = model, forward, loss, meter
    if privacy is not None:
        return private_passes(model, mesh, forward, loss, meter, privacy)
    if mesh.plan.graphs:
        return Graphed(*basics, graphed_passes(model, mesh, recorder, compares=loss.compares))
    if (pipeline := pipeline_of(model)) is not None:
        return Pipelined(*basics, pipeline)
    if isinstance(loss.loss_fn, GlobalBatchLoss):
        return AccumulateCompared(*basics, mesh=mesh, compared=loss.loss_fn, state=state)
    return Accumulate(*basics)


class TrainStep:
    """Forward, backward, reduction, clipping and update of a parallelized model.

    Args:
        model: result of `parallelize`.
        optimizer: built on the model's parameters after `parallelize`.
        loss_fn: loss_fn(output, batch) -> (sum of losses, number of tokens or samples).
        mesh: the model's mesh.
        forward: forward(model, batch) -> output; None for the default of `Run.train_step`.
        max_grad_norm: the norm that the full gradient is clipped to; 0 or None disables clipping.
        nominal_tokens: approximate number of tokens in a global batch; it keeps scaled losses in range, and changes no
            result.
        meter: times the phases of steps; None creates one.
        weights_follow: under zero=1 and 2, return from a step before new weights are gathered; in the next forward each
            block waits for its weights. Call `wait_for_weights` before reading parameters in between.
        reads_late: from the second step on, the device decides if a step is applied, and the host does not wait for it;
            None enables it on a GPU.
        recorder: records graphs under graphs=on; None for CUDA graphs.
        check_batch: if True, the first step runs some small forwards to warn of results that depend on how the plan
            divides a batch.
        privacy: clips the gradient of each sample and adds noise; None for ordinary training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        mesh: Mesh,
        *,
        forward: ForwardFn | None = None,
        max_grad_norm: float | None = 0.0,
        nominal_tokens: int | None = None,
        meter: Meter | None = None,
        weights_follow: bool = False,
        reads_late: bool | None = None,
        recorder: Recorder | None = None,
        check_batch: bool = False,
        privacy: PrivateUpdate | None = None,
    ):
        if privacy is not None:
            privacy.attach(model, optimizer, mesh, loss_fn)
            reads_late = False
        #: Noise and account of private steps, or None.
        self.privacy = privacy
        self.model, self.optimizer, self.mesh = model, optimizer, mesh.replica
        self.wants_stop = self.asks = self.has_trained = False
        #: True if steps measure their update ratio; equal on all ranks.
        self.measures_update = False
        #: Loss sum and count of the last step's microbatches, by index, if this rank computes them.
        self.microbatch_losses: dict[int, tuple[torch.Tensor, torch.Tensor | int]] = {}
        self._meter, self._split = meter or Meter(mesh.device), BatchSplit(mesh)
        self._loss = _checked_loss(loss_fn, model, self.mesh)
        self._state, self._engine = ModelState(model, self.mesh, forward, loss_fn), data_parallel(model)
        self._counts_tokens = self.mesh["tp"].rank == 0  # the ranks of tp have the same tokens
        self._numbers: list[float] = []  # of `compute`, for `apply`
        self._update = WeightUpdate(
            model, optimizer, self.mesh, max_grad_norm=max_grad_norm or 0.0, nominal_tokens=nominal_tokens,
            weights_follow=weights_follow, reads_late=reads_late, after=self._state.finish,
            divisor=None if privacy is None else float(privacy.privacy.batch),
        )  # fmt: skip
        self._passes = passes_of(model, self.mesh, forward, self._loss, self._meter, self._state, recorder, privacy)
        replicas = ReplicaWatch(self._engine, self.mesh)
        self._checks: list[StepCheck] = [replicas] if replicas.is_needed else []
        self._first: FirstStep | None = None
        if privacy is None:  # clipping and noise are no sums over samples, which the checks of a first step compare
            self._first = FirstStep(self._passes, self._state, self.mesh, checks_batch=check_batch)

    @explains_failures
    def __call__(
        self, batch: Any, seeds: Sequence[int] | None = None, dropout_key: int | None = None, *, next_batch: Any = None
    ) -> StepMetrics:
        """Train on this rank's part of one global batch.

        Args:
            batch: tensors in a tuple, list, dict or dataclass, as a DataLoader returns them, on any device. They are
                moved to the run's device, and split along dim 0 into the plan's number of microbatches. Or
                `Microbatches` from `run.shard`, which are already split, and may differ in size. A microbatch without
                samples is not counted.
            seeds: seeds of torch's generators, one per microbatch, for models that draw random numbers. None derives
                them from the run's seed, the model's step count and the microbatch's first sample, and restores the
                generators after the step.
            dropout_key: seed of this step's dropout masks, equal on all ranks. None uses the model's step count.
            next_batch: the batch of the next step, or None. With `table_prefetch`, its rows of tables are fetched under
                this step's backward. It changes no result.
        """
        if self.privacy is not None:
            self.privacy.begin_step()
        first, checks = self._first, [*self._checks, *([] if self._first is None else [self._first])]
        with nullcontext() if first is None else first.watching():
            totals = self._compute(batch, seeds, dropout_key, checks=checks, first=first, next_batch=next_batch)
        with self._meter.phase("reduce"):
            is_late = first is None and not totals.needs_host and self._update.can_read_late()
            # If results are not late, this is a step's only wait for the device: one copy of all numbers of the
            # decision.
            numbers = [] if is_late else totals.read()
        with self._meter.phase("optimizer"):
            if is_late:
                metrics = self._update.apply_late(totals.numbers, self.measures_update)
            else:
                self._add_noise()
                metrics = self._update.apply(numbers, self.measures_update)
        self.mesh.pulse.in_step, self._first = False, None
        if first is not None:
            losses = self.microbatch_losses
            try:
                first.check_gradients(self.compute_again, lambda: self._split(batch))
            finally:
                self.microbatch_losses = losses
                self.mesh.pulse.in_step = False
        return metrics

    @explains_failures
    def compute(self, batch: Any) -> StepMetrics:
        """Compute the gradients of a step without the update, which `apply` makes. All ranks call it.

        For callers that run code in between. The first step does not check gradients of custom autograd functions.
        """
        if self.privacy is not None:
            self.privacy.begin_step()
        first, checks = self._first, [*self._checks, *([] if self._first is None else [self._first])]
        with nullcontext() if first is None else first.watching():
            totals = self._compute(batch, None, None, checks=checks, first=first)
        self._numbers = totals.read()
        return self._update.metrics(self._numbers)

    def apply(self) -> StepMetrics:
        """Update the weights from the gradients of `compute`. All ranks call it."""
        self._add_noise()
        metrics = self._update.apply(self._numbers, self.measures_update)
        self.mesh.pulse.in_step, self._first = False, None
        return metrics

    def _add_noise(self) -> None:
        if self.privacy is not None:
            self._engine.scale(1.0)  # makes the gradients available
            self.privacy.add_noise(self._update.sum_factor())

    def _compute(
        self, batch: Any, seeds: Sequence[int] | None, dropout_key: int | None, *, checks: Sequence[StepCheck] = (),
        first: FirstStep | None = None, is_again: bool = False, factor: float = 1.0, backward_seed: int | None = None,
        next_batch: Any = None,
    ) -> StepTotals:  # fmt: skip
        """Compute the gradients of a batch. Return the sums from which the update decides whether the step is applied.

        is_again: True if the gradients are not used for training. No CUDA graph is replayed then. For other arguments,
        see `__call__` and `compute_again`.
        """
        with self._state.preserving(seeds):
            with self._meter.phase("data"):
                microbatches, samples = self._split(batch)
            self._state.train()
            if first is not None:
                first.check_batch(microbatches[0], samples[0])
            self.mesh.pulse.in_step = True
            scale = self._update.scale_of(microbatches) * factor
            self._engine.begin_step()
            totals = StepTotals(self.mesh.device, self.wants_stop or self.asks, checks, batch)
            self._state.begin(scale)
            draws = self._state.draws(samples, seeds, dropout_key)
            # A new dict for each step: the tracer of the last step may still read the old one.
            losses = self.microbatch_losses = {}
            loss = self._loss.of_step(samples, losses, backward_seed)
            inside = self._state.inside(samples, draws.key)
            following = self._first_microbatch(next_batch)
            self._passes.run(
                Work(microbatches, samples, loss, losses, scale, totals.sums, draws, inside, not is_again, following)
            )
            self._state.start()
            if not self._counts_tokens:
                totals.sums.zero_()
            with self._meter.phase("reduce"):
                self.finalize()
                self._engine.finish(totals.vector)
                totals.finish(self._engine.norm())
        return totals

    @property
    def prefetches(self) -> bool:
        """True if a step uses `next_batch`."""
        return self._engine.prefetches

    def _first_microbatch(self, next_batch: Any) -> Any:
        """Return the first microbatch of the next step, or None."""
        if next_batch is None or not self._engine.prefetches:
            return None
        try:
            return self._split(next_batch)[0][0]
        except ModelError:  # the next step raises it
            return None

    def compute_again(
        self,
        batch: Any,
        seeds: Sequence[int] | None = None,
        dropout_key: int | None = None,
        *,
        factor: float = 1.0,
        backward_seed: int | None = None,
    ) -> float:
        """Compute the gradients of a step again with the current weights, without an update. All ranks call it.

        Returns the sum of the losses over all ranks.

        Args:
            batch: the step's batch, as in `__call__`.
            seeds: the step's seeds.
            dropout_key: the step's dropout key.
            factor: factor of the loss before backward.
            backward_seed: seed of the generators before backward; None to leave them unchanged.
        """
        totals = self._compute(batch, seeds, dropout_key, is_again=True, factor=factor, backward_seed=backward_seed)
        self._state.finish(False)
        self._engine.scale(1.0)  # makes the gradients available
        self.mesh.pulse.in_step = False
        return float(totals.numbers[0])

    @property
    def graphs(self) -> GraphedPasses | None:
        """Recorded passes, which run as one graph launch; None without graphs."""
        return self._passes.graphs if isinstance(self._passes, Graphed) else None

    @property
    def loss_scale(self) -> LossScale:
        """Return the scale of the next step's loss. Waits for the result of the last step."""
        return self._update.loss_scale

    @property
    def max_grad_norm(self) -> float:
        """Limit of the gradient norm; 0 disables clipping."""
        return self._update.max_grad_norm

    @property
    def is_unread(self) -> bool:
        """True if the host has not read the device's decision about the last step."""
        return self._update.is_unread

    def finalize(self, metrics: StepMetrics | None = None) -> None:
        """Read the device's decision about the last step. All ranks call it.

        metrics: metrics of the step to read; None for the last step. If a later step was launched, they are already
        read.

        Raises:
            CommError: if the gradient was not finite because a part of it arrived after its reduction had started.
        """
        self._update.finalize(metrics)

    def wait_for_weights(self) -> None:
        """Wait for the new weights of the last step. Call it before reading parameters outside a forward."""
        self._engine.wait_for_weights()

    def arrive(self) -> None:
        """Warn that this method is deprecated, and call `wait_for_weights`."""
        warnings.warn("TrainStep.arrive is now wait_for_weights. Call that.", WeftWarning, stacklevel=2)
        self.wait_for_weights()

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that contain this rank's gradients."""
        return self._engine.local_gradients()


def _checked_loss(loss_fn: LossFn, model: nn.Module, mesh: Mesh) -> CheckedLoss:
    if isinstance(loss_fn, GlobalBatchLoss):
        expect_global_batch(mesh.plan)
    trust_loss(model)
    several = mesh.batch.size * mesh.plan.microbatches_per_step > 1
    return CheckedLoss(loss_fn, mesh, warns_of_means=several and mesh.batch.rank == mesh["tp"].rank == 0)
