"""One optimizer step, and its metrics, which are read immediately or on first access."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce, start_all_reduce
from weft.comm.mesh import Mesh
from weft.data.batches import move_batch
from weft.data.random_state import preserve_generators, seed_generators
from weft.errors import WeftWarning
from weft.memory.graph_recorder import Recorder
from weft.monitor.step_times import Meter
from weft.optim.build import clip_factor
from weft.optim.loss_scale import LossScale
from weft.optim.step_decision import StepDecision
from weft.parallel.batch_norm.norm_groups import norm_groups_of
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.dropout.by_position import drops_of
from weft.parallel.expert import ExpertBalance
from weft.parallel.local_means import TrainMode, trust_loss
from weft.parallel.local_sgd import RareSync, rare_sync
from weft.parallel.pipeline.runtime import CountedLoss, Inside, StepWork, pipeline_of
from weft.parallel.random.streams import SampleNumbers
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.precision import Precision
from weft.parallel.state.stale_references import OriginalParameters
from weft.parallel.tensor.language_head import expect_labels
from weft.train.losses import CheckedLoss, Features, GlobalBatchLoss, GroupLoss, LossFn, expect_global_batch
from weft.train.microbatches import Microbatches, call_model, microbatches_of, samples_of, values_in
from weft.train.step.batch_check import check_first_batch
from weft.train.step.checks import ReplicaWatch, UpdateRatio
from weft.train.step.errors import explains_memory, fingerprint, names_the_module, warn_if_identical
from weft.train.step.gradient_check import BackwardCode, GradientProbe, check_gradients, needs_check, refuse_hooks
from weft.train.step.graphed_passes import MicrobatchInputs, compute_of, graphed_passes, insides_of


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one step, equal on all ranks.

    loss: mean over all tokens of the global batch, before the update. grad_norm: before clipping.
    skipped: reason for a skipped update, or None. wants_stop: True if a rank requested a stop.
    update_ratio: norm of the update over the norm of the weights, in a measured step that is applied.

    On a GPU the first access to a number waits until the device has computed it. The previous step has finished by
    then, so a loop that shows the metrics of the previous step never waits.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    loss_scale: float | None = None
    skipped: str | None = None
    wants_stop: bool = False
    update_ratio: float | None = None

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def moved(self, ratio: Callable[[], float | None] | None) -> StepMetrics:
        """Return a copy with the update ratio if the step was applied. ratio: computes it, or None."""
        return self if ratio is None or self.skipped is not None else replace(self, update_ratio=ratio())

    @classmethod
    def of_sums(cls, numbers: Sequence[float], nominal: float, scale: LossScale) -> StepMetrics:
        """Return the metrics of a step.

        Args:
            numbers: sum of losses, number of tokens, ranks that want to stop, ..., norm of the unscaled gradient
                buffers.
            nominal: divisor of the loss before backward.
            scale: the loss scale in this step.
        """
        loss_sum, num_tokens, stops, *_, norm = numbers
        loss = loss_sum / max(num_tokens, 1.0)
        grad_norm = norm * to_mean(nominal, num_tokens, scale)
        skipped = None
        if num_tokens == 0:
            skipped = "no trained token in the global batch"
        elif not math.isfinite(loss):
            skipped = f"loss is {loss}"
        elif not math.isfinite(grad_norm):
            skipped = f"gradient norm is {grad_norm}"
        shown = scale.factor() if scale.enabled else None
        return cls(loss, grad_norm, round(num_tokens), shown, skipped, stops > 0)


def to_mean(nominal: float, num_tokens: float, scale: LossScale) -> float:
    """Return the factor that turns gradients of sum / nominal * scale into gradients of the mean over the tokens."""
    return nominal / (max(num_tokens, 1.0) * scale.factor())


class LateMetrics(StepMetrics):
    """Metrics whose numbers stay on the device until one is read. read: waits for them."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], StepMetrics]):
        object.__setattr__(self, "_read", read)

    def __getattr__(self, name: str) -> Any:
        if name not in StepMetrics.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = self._read()
        for field in fields(StepMetrics):
            object.__setattr__(self, field.name, getattr(found, field.name))
        return getattr(found, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepMetrics, tuple(getattr(self, field.name) for field in fields(StepMetrics))


def power_of_two(number: int) -> float:
    """Return the largest power of two up to `number`: multiplying by it is exact."""
    return 2.0 ** math.floor(math.log2(max(1, number)))


# Metrics of a step over all replicas, if each trains locally. They are all-reduced during the update.


class JointNumbers:
    """A pending all-reduce of the replicas' metrics of one step.

    All ranks construct it and call `metrics` in the same order.

    Args:
        own: metrics of this rank's replica.
        sync: the replicas' synchronization.
    """

    def __init__(self, own: StepMetrics, sync: RareSync):
        self._own, self._replicas = own, sync.replicas
        loss_sum = own.loss * own.num_tokens if own.num_tokens else 0.0
        numbers = [loss_sum, own.num_tokens, own.grad_norm, own.skipped is not None, own.wants_stop]
        axis = sync.mesh["dp_replicate"]
        sums = torch.tensor(list(map(float, numbers)), dtype=torch.float64, device=sync.mesh.device)
        self._pending = start_all_reduce(sums, axis)

    def metrics(self) -> StepMetrics:
        """Return the metrics of all replicas: the loss over all tokens, and the mean of the gradient norms."""
        loss_sum, num_tokens, norms, skipped, stops = self._pending.wait().tolist()
        why = None
        if skipped:
            why = f"{skipped:.0f} of {self._replicas} replicas left it out"
            why += f", this one for: {self._own.skipped}" if self._own.skipped else ""
        return StepMetrics(
            loss_sum / max(num_tokens, 1.0),
            norms / self._replicas,
            round(num_tokens),
            self._own.loss_scale,
            why,
            stops > 0,
        )


# TrainStep: one optimizer step, the same numbers under every plan.

#: (model, batch) -> output.
ForwardFn = Callable[[nn.Module, Any], Any]


class TrainStep:
    """Forward, backward, reduction, clipping and update of a parallelized model.

    Args:
        model: result of `parallelize`.
        optimizer: built on the model's parameters after `parallelize`.
        loss_fn: loss_fn(output, batch) -> (sum of losses, number of tokens or samples).
        mesh: the model's mesh.
        forward: forward(model, batch) -> output; None: as in `Run.train_step`.
        max_grad_norm: the norm that the full gradient is clipped to; 0 or None disables clipping.
        nominal_tokens: approximate number of tokens in a global batch; keeps scaled losses in range, and does not
            change any result.
        meter: times the phases of steps; None creates one.
        weights_follow: new weights of zero=1 and 2 may still be gathered when a step returns: in the next forward each
            block waits for its own. Call `arrive` before reading parameters in between.
        reads_late: from the second step on, the device decides if a step is applied, and the host does not wait for its
            numbers; None enables it on a GPU.
        recorder: records graphs under graphs=on; None for CUDA's.
        check_batch: if True, the first step runs some small forwards to warn of results that depend on how the plan
            divides a batch.
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
    ):
        self.model = model
        self.optimizer = optimizer
        mesh, self._data = mesh.replica, mesh.reader
        self.mesh = mesh
        self.precision = Precision.of(mesh.plan)
        self._loss_scale = LossScale(enabled=self.precision.scales_loss)
        self.max_grad_norm = max_grad_norm or 0.0
        self.wants_stop = self.asks = self.has_trained = False
        #: True if steps measure their update ratio; equal on all ranks.
        self.measures_update = False
        several = mesh.batch.size * mesh.plan.microbatches_per_step > 1
        self._loss = CheckedLoss(loss_fn, mesh, warns_of_means=several and mesh.batch.rank == mesh["tp"].rank == 0)
        self._whole = loss_fn if isinstance(loss_fn, GlobalBatchLoss) else None
        if self._whole is not None:
            expect_global_batch(mesh.plan)
        trust_loss(model)
        self._forward = forward or call_model
        self._data_parallel = data_parallel(model)
        self._data_parallel.adopt(optimizer)
        self._rarely = rare_sync(model)
        if self._rarely is not None:
            self._rarely.begin()
        self._weights_follow = weights_follow
        if weights_follow:
            self._data_parallel.prefetch_weights()
        self._pipeline = pipeline_of(model)
        self._checks_gradients, self._runs_few = check_batch, self._pipeline is None
        self._checks_batch = check_batch and (several or mesh.world_size > 1)
        self._experts, self._norms = ExpertBalance(model, mesh), norm_groups_of(model)
        self._nominal = power_of_two(nominal_tokens) if nominal_tokens else None
        self._meter = meter or Meter(mesh.device)
        self._train_mode, self._looks_for_copies = TrainMode(model), mesh.data.size > 1
        self._replicas = ReplicaWatch(self._data_parallel, mesh)
        self._update_ratio = UpdateRatio(self._data_parallel, mesh.device)
        may_read_late = mesh.device.type == "cuda" if reads_late is None else reads_late
        self._may_read_late, self._is_first = may_read_late and self._rarely is None, True
        self._unread: LateMetrics | None = None
        self._next_scale: torch.Tensor | None = None  # if only the device has it
        self._unchecked = False  # a gradient was not finite, and the ranks were not checked yet
        #: Passes that run as one graph launch; None launches each kernel.
        self._compares = self._whole is not None or isinstance(self._loss.loss_fn, GroupLoss)
        self.graphs = graphed_passes(model, mesh, recorder, compares=self._compares) if mesh.plan.graphs else None
        #: Loss sum and count of the last step's microbatches, by index, if this rank computes them.
        self.microbatch_losses: dict[int, tuple[torch.Tensor, torch.Tensor | int]] = {}

    @explains_memory
    @names_the_module
    def __call__(self, batch: Any, seeds: Sequence[int] | None = None, dropout_key: int | None = None) -> StepMetrics:
        """Train on this rank's part of one global batch.

        batch: tensors in a tuple, list, dict or dataclass, as a DataLoader returns them, on any device. They are moved
        to the run's device, and split along dim 0 into the plan's number of microbatches. Or `Microbatches`, as
        `run.shard` returns them, which are split already. Ranks and microbatches may differ in size. A microbatch
        without samples is not counted.
        seeds: seeds of torch's generators, one per microbatch, for models that draw random numbers. None derives them
        from the run's seed, the model's step count and the microbatch's first sample, and restores the generators after
        the step.
        dropout_key: key of this step's dropout, equal on all ranks. None uses the model's step count.
        """
        refusing_old = OriginalParameters.refusing_old(self.model) if self._is_first else nullcontext()
        if self._is_first:
            refuse_hooks(self.model, self.mesh)
        code = BackwardCode(self.model) if self._is_first and self._checks_gradients else None
        with (
            refusing_old,
            code.recording() if code else nullcontext(),
            preserve_generators(self.mesh.device) if seeds is None else nullcontext(),
        ):
            numbers, has_watched = self._sums(batch, seeds, dropout_key)
        with self._meter.phase("reduce"):
            # Otherwise this is the only wait for the device in a step: one copy of all numbers that the decision
            # needs.
            known = None if not has_watched and self._reads_late() else numbers.tolist()
        if known is not None:
            if has_watched:
                self._replicas.check(known.pop(-2))
            self._look_for_copies(known[3:-1])
        with self._meter.phase("optimizer"):
            metrics = self._update_unread(numbers) if known is None else self._update_jointly(known)
        self.mesh.pulse.in_step = self._is_first = False
        if code is not None and needs_check(self.mesh, code):
            self._check_gradients(code, batch)
        return metrics

    def _check_gradients(self, code: BackwardCode, batch: Any) -> None:
        """Warn if functions and hooks that ran in this step's backward make gradients depend on the plan."""
        microbatches = microbatches_of(move_batch(batch, self.mesh.device), self.mesh.plan)
        samples = samples_of(batch, len(microbatches), self._data)
        before = self._loss, self._nominal, self.microbatch_losses

        def compute(small: Microbatches, factor: float, seed: int) -> tuple[float, list[torch.Tensor]]:
            assert before[1] is not None
            self._nominal, self._loss = before[1] / factor, before[0].before_draws_of(seed)
            with preserve_generators(self.mesh.device):
                numbers, _ = self._sums(small, None, 0, again=True)
            self._finish(moved=False)
            self._data_parallel.scale(1.0)  # makes the gradients available
            return float(numbers[0]), self._data_parallel.local_gradients()

        try:
            probe = GradientProbe(self.model, self.mesh, compute, not self._compares, self._runs_few)
            check_gradients(probe, code, microbatches[0], samples[0])
        finally:
            self._loss, self._nominal, self.microbatch_losses = before
            self.mesh.pulse.in_step = False

    def compute_again(self, batch: Any, seeds: Sequence[int] | None = None, dropout_key: int | None = None) -> None:
        """Compute the gradients of a step again with the current weights, without an update. All ranks call it.

        Args:
            batch: the step's batch, as in `__call__`.
            seeds: the step's seeds.
            dropout_key: the step's dropout key.
        """
        with preserve_generators(self.mesh.device) if seeds is None else nullcontext():
            self._sums(batch, seeds, dropout_key, again=True)
        self._finish(moved=False)
        self._data_parallel.scale(1.0)  # makes the gradients available
        self.mesh.pulse.in_step = False

    def _sums(
        self, batch: Any, seeds: Sequence[int] | None, dropout_key: int | None, *, again: bool = False
    ) -> tuple[torch.Tensor, bool]:
        """Compute the gradients of a batch. again: for tracing: replicas are not compared, and no graph is launched.

        Returns the inputs of the step's decision, on the device, float64, and True if replicas compare weights.
        """
        with self._meter.phase("data"):
            microbatches = microbatches_of(move_batch(batch, self.mesh.device), self.mesh.plan)
            samples = samples_of(batch, len(microbatches), self._data)
        self._train_mode.enter()
        if self._checks_batch and self._is_first and not again:
            loss_fn = None if self._compares else self._loss.loss_fn
            first = microbatches[0], samples[0]
            ran = check_first_batch(
                self.model, self._with_labels, loss_fn, self.mesh, self._experts, *first, self._forward
            )
            self._runs_few |= ran and loss_fn is not None
            self._checks_batch = False
        self.mesh.pulse.in_step = True
        if self._nominal is None:
            self._nominal = power_of_two(self._values_in(microbatches))
        self._data_parallel.begin_step()
        watched = None if again else self._replicas.number()
        totals = self._first_totals(batch, watched)
        scale = (self._loss_scale.factor() if self._next_scale is None else self._next_scale) / self._nominal
        coders = self._data_parallel.coders
        if coders.has_residual:  # then the host decides about every step
            coders.set_unit(float(scale))
        self._experts.begin(scale)
        if self._norms is not None:
            self._norms.begin()
        drops = drops_of(self.model)
        key = dropout_key if dropout_key is not None else 0 if drops is None else drops.next_key()
        # If a run passes seeds, its other threads may use numpy's and Python's generators.
        self._reseed: Callable[[int], Any] = seed_generators if seeds is None else torch.manual_seed
        if drops is not None:
            drops.places_noise = seeds is None
        if seeds is None and drops is not None:
            seeds = [drops.seed_at(key, one, self.model) for one in samples]
        inside = insides_of(self.model, self._experts, samples, key)
        if self._pipeline is not None:
            parts = [shard_sequence(self.model, microbatch) for microbatch in microbatches]
            loss = self._counted_loss(samples)
            work = StepWork(parts, self._forward, self._with_labels, loss, scale, totals, seeds, inside)
            # One engine pass: the gradients of all microbatches are one sum, in any order of the schedule.
            with self._data_parallel.microbatch(last=True), sequence_in_use(self.model):
                self._pipeline.step(work, self._meter)
        else:
            self._accumulate(microbatches, samples, scale, totals, inside, seeds, None if again else key)
        self._experts.start()
        if self._norms is not None:
            self._norms.start()
        if self.mesh["tp"].rank:
            totals[:2] = 0.0  # the ranks of tp have the same tokens: only the first one counts them
        with self._meter.phase("reduce"):
            self.finalize()
            self._data_parallel.finish(totals)
            norm = self._data_parallel.norm()
            return torch.cat([totals, norm.to(totals).reshape(1)]), watched is not None

    def _first_totals(self, batch: Any, watched: torch.Tensor | None) -> torch.Tensor:
        """Return zeros for loss sum and token count, the stop vote, and values of checks. One collective sums them.

        float64, (3 or more,): small and exact. watched: value of the replica check, or None.
        """
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        # An assignment would copy the number from the host and wait for the copy.
        totals[2].fill_(float(self.wants_stop or self.asks))
        looked = [] if watched is None else [watched]
        if self._looks_for_copies and not isinstance(batch, Microbatches):
            looked.insert(0, fingerprint(batch).to(self.mesh.device))
        return torch.cat([totals, *looked]) if looked else totals

    @property
    def loss_scale(self) -> LossScale:
        """Return the scale of the next step's loss. Waits for the last step's numbers."""
        self._read()
        return self._loss_scale

    @property
    def is_unread(self) -> bool:
        """True if the host has not read the device's decision about the last step."""
        return self._unread is not None

    def finalize(self, metrics: StepMetrics | None = None) -> None:
        """Read the device's decision about the last step. All ranks call it.

        metrics: metrics of the step to read. If a later step was launched, it has read them already. None reads the
        last step.

        Raises:
            CommError: if its gradient was not finite because ranks disagreed.
        """
        if metrics is None or metrics is self._unread:
            self._read()
        if self._unchecked:
            self._unchecked = False
            self._data_parallel.check()

    def wait_for_weights(self) -> None:
        """Wait for the last step's weights. Call it before parameters are read outside of a forward."""
        self._data_parallel.wait_for_weights()

    def arrive(self) -> None:
        """Call `wait_for_weights`, the new name of this method, with a warning."""
        warnings.warn("TrainStep.arrive is now wait_for_weights. Call that.", WeftWarning, stacklevel=2)
        self.wait_for_weights()

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that contain this rank's gradients."""
        return self._data_parallel.local_gradients()

    def _counted_loss(self, samples: list[SampleNumbers]) -> CountedLoss:
        """Return the loss function of microbatches by index. For a stand-in it is zero, with zero gradients."""
        # A new dict for each step: the tracer of the last step may still read the old one.
        found = self.microbatch_losses = {}

        def loss(output: Any, microbatch: Any, index: int) -> tuple[torch.Tensor, torch.Tensor | int]:
            loss_sum, number = self._loss(output, microbatch, samples[index], index)
            if samples[index].is_empty:
                return loss_sum * 0.0, 0
            found[index] = (loss_sum.detach(), number)
            return loss_sum, number

        return loss

    def _values_in(self, microbatches: list[Any]) -> int:
        """Return the approximate number of tokens in the global batch, the same on all ranks."""
        own = sum(map(values_in, microbatches))
        if self.mesh.data.size == 1:
            return own
        return int(all_reduce(torch.tensor(own, dtype=torch.float64, device=self.mesh.device), self.mesh.data))

    def _accumulate(
        self, microbatches: list[Any], samples: list[SampleNumbers], scale: float | torch.Tensor, totals: torch.Tensor,
        inside: Inside, seeds: Sequence[int] | None, key: int | None,
    ) -> None:  # fmt: skip
        """Add each microbatch's gradients, loss sum and token count. key: for graphs; None launches none."""
        loss = self._counted_loss(samples)
        if self._whole is not None:
            loss = self._compared(self._whole, microbatches, samples, inside, seeds)
        compute = compute_of(partial(self._with_labels, self.model), loss, inside)
        for index, whole in enumerate(microbatches):
            if seeds is not None:
                self._reseed(seeds[index])
            last = index == len(microbatches) - 1
            if self.graphs is not None and key is not None:
                given = MicrobatchInputs(whole, samples[index], key, scale)
                with self._meter.phase("forward and backward"):
                    counted = self.graphs.run(given, partial(compute, index), last=last)
                if counted is not None:
                    totals[:2] += counted
                    self.microbatch_losses[index] = (counted[0], counted[1])
                    continue
            with self._data_parallel.microbatch(last), sequence_in_use(self.model), inside(index):
                microbatch = shard_sequence(self.model, whole)
                with self._meter.phase("forward"):
                    output = self._with_labels(self.model, microbatch)
                    loss_sum, num_tokens = loss(output, microbatch, index)
                    del output  # logits are large, and backward does not need them
                    totals[0] += loss_sum.detach()
                    totals[1] += num_tokens
                with self._meter.phase("backward"):
                    (loss_sum * scale).backward()

    def _compared(
        self, whole: GlobalBatchLoss, microbatches: list[Any], samples: list[SampleNumbers], inside: Inside,
        seeds: Sequence[int] | None,
    ) -> CountedLoss:  # fmt: skip
        """Return the loss function of a microbatch as a part of the global batch's loss."""

        def features(index: int) -> Features:
            if seeds is not None:
                self._reseed(seeds[index])
            with inside(index), self._experts.leaving_out(), self._meter.phase("forward"):
                return self._forward(self.model, microbatches[index])

        return whole.compared(self.mesh, [not one.is_empty for one in samples], features)

    def _with_labels(self, model: nn.Module, microbatch: Any) -> Any:
        """Run forward with a head that may return the loss directly."""
        with expect_labels(model, self._loss.loss_fn, microbatch):
            return self._forward(model, microbatch)

    def _look_for_copies(self, fingerprints: list[float]) -> None:
        """Warn in the first step if all ranks read the same samples. fingerprints: summed over the ranks."""
        if fingerprints and self.mesh.rank == 0:
            warn_if_identical(fingerprints, self.mesh.world_size, self.mesh.data.size)
        self._looks_for_copies = False

    def _update_jointly(self, numbers: list[float]) -> StepMetrics:
        """Update, and synchronize replicas that train locally if it is due. Return the metrics of all replicas."""
        rarely, nominal = self._rarely, self._nominal
        if rarely is None or nominal is None:
            return self._update(numbers)
        own = StepMetrics.of_sums(numbers, nominal, self._loss_scale)
        joint = None if rarely.is_apart else JointNumbers(own, rarely)  # reduced while the optimizer works
        mine = self._update(numbers)
        rarely.after_step()
        return mine if joint is None else replace(joint.metrics(), update_ratio=mine.update_ratio)

    def _update(self, numbers: list[float]) -> StepMetrics:
        """Normalize, clip and step, or skip: one decision, from numbers that all ranks share."""
        assert self._nominal is not None
        metrics = StepMetrics.of_sums(numbers, self._nominal, self._loss_scale)
        if not math.isfinite(metrics.grad_norm):
            self._data_parallel.check()
        factor = to_mean(self._nominal, numbers[1], self._loss_scale)
        self._loss_scale.update(metrics.is_finite)
        if metrics.skipped is None:
            clip = clip_factor(metrics.grad_norm, self.max_grad_norm)
            metrics = metrics.moved(self._move(factor * clip))
            self._data_parallel.publish(clip, self._weights_follow)
        self._finish(moved=metrics.skipped is None)
        return metrics

    def _update_unread(self, numbers: torch.Tensor) -> StepMetrics:
        """Update without the host: the device decides, and the host reads the decision one step later."""
        assert self._nominal is not None
        scale = self._loss_scale
        decision = StepDecision(numbers, self._nominal, scale.factor(), self.max_grad_norm)
        if scale.enabled:
            self._next_scale = decision.next_scale(scale)
        ratio = self._move(decision)
        self._data_parallel.publish(follow=self._weights_follow)
        self._finish(moved=decision.is_taken)
        nominal, then = self._nominal, replace(scale)
        self._unread = LateMetrics(lambda: StepMetrics.of_sums(decision.numbers, nominal, then).moved(ratio))
        return self._unread

    def _move(self, factor: float | StepDecision) -> Callable[[], float | None] | None:
        """Update the weights. Returns a function that computes the update ratio, or None if it is not measured."""
        update = partial(self._data_parallel.update, self.optimizer, factor)
        return self._update_ratio.around(update) if self.measures_update else update()

    def _finish(self, moved: bool | torch.Tensor) -> None:
        """Update the state that follows the batch without a gradient: biases of routers, running statistics."""
        self._experts.finish(moved=moved)
        if self._norms is not None:
            self._norms.finish(moved=moved)

    def _reads_late(self) -> bool:
        """Return True if the device decides about this step."""
        return self._may_read_late and not self._is_first and self._data_parallel.decides_late(self.optimizer)

    def _read(self) -> None:
        """Read the device's decision about the last step."""
        unread, self._unread, self._next_scale = self._unread, None, None
        if unread is not None:
            self._loss_scale.update(unread.is_finite)
            self._unchecked = not math.isfinite(unread.grad_norm)
