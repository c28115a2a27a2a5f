"""Decision about a step from its totals: update the weights, or skip the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce, start_all_reduce
from weft.comm.mesh import Mesh
from weft.data.batches import tensors_in
from weft.devices import access
from weft.optim.step_decision import LossScale, StepDecision, clip_factor
from weft.parallel.replicas.local_sgd import RareSync, rare_sync
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.precision import Precision
from weft.train.step.checks import StepCheck, UpdateRatio


class StepTotals:
    """Sums over microbatches and ranks from which a step is decided, and the gradient norm, in float64.

    One collective sums a vector of loss sum, number of tokens, number of ranks that request a stop or a read of the
    user's requests, and values of checks.
    """

    def __init__(self, device: torch.device, stops: bool, checks: Sequence[StepCheck], batch: Any):
        vector = torch.zeros(3, dtype=torch.float64, device=device)
        # An assignment would copy the number from the host and wait for the copy.
        vector[2].fill_(float(stops))
        self._checks: list[tuple[StepCheck, slice]] = []
        for check in checks:
            if (value := check.value(batch)) is not None:
                self._checks.append((check, slice(len(vector), len(vector) + len(value))))
                vector = torch.cat([vector, value])
        self.vector = vector
        #: Loss sum and number of tokens, (2,).
        self.sums = vector[:2]
        #: The summed vector and the norm of the unscaled gradients, after `finish`.
        self.numbers = vector

    @property
    def needs_host(self) -> bool:
        """True if the host must check some values."""
        return bool(self._checks)

    def finish(self, norm: torch.Tensor) -> None:
        """Append the gradient norm to the summed vector."""
        self.numbers = torch.cat([self.vector, norm.to(self.vector).reshape(1)])

    def read(self) -> list[float]:
        """Copy the numbers to the host, run all checks on them, and return them. All ranks call it."""
        numbers: list[float] = self.numbers.tolist()
        for check, part in self._checks:
            check.check(numbers[part])
        return numbers


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one step, equal on all ranks.

    Attributes:
        loss: mean over all tokens of the global batch, before the update.
        grad_norm: gradient norm before clipping.
        skipped: reason for a skipped update, or None.
        wants_stop: True if a rank requested a stop, or if the ranks must read the user's requests.
        update_ratio: norm of the update divided by the norm of the weights, if it was measured and the step applied.

    On a GPU the first access to a number waits until the device has computed it. The next step reads the numbers too,
    so a loop that shows the metrics of the previous step does not wait.
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

    def with_ratio(self, ratio: Callable[[], float | None] | None) -> StepMetrics:
        """Return a copy with the update ratio if the step was applied. ratio: function that computes it, or None."""
        return self if ratio is None or self.skipped is not None else replace(self, update_ratio=ratio())

    @classmethod
    def of_sums(
        cls, numbers: Sequence[float], nominal: float, scale: LossScale, divisor: float | None = None
    ) -> StepMetrics:
        """Return the metrics of a step.

        Args:
            numbers: as in `StepTotals.numbers`.
            nominal: divisor of the loss before backward.
            scale: the loss scale in this step.
            divisor: fixed divisor of the gradient sum; None for the number of tokens.
        """
        loss_sum, num_tokens, stops, *_, norm = numbers
        loss = loss_sum / max(num_tokens, 1.0)
        grad_norm = norm * to_mean(nominal, divisor or num_tokens, scale)
        skipped = None
        if num_tokens == 0 and divisor is None:
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
    """Metrics whose numbers stay on the device until one is accessed. read: function that waits for them."""

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
    """Return the largest power of two up to `number`. Multiplying by it is exact."""
    return 2.0 ** math.floor(math.log2(max(1, number)))


# Metrics of a step over all replicas that train locally. They are all-reduced during the update.


class JointNumbers:
    """A pending all-reduce of the replicas' metrics of one step.

    All ranks construct it and call `metrics` in the same order.
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


# The update.


class WeightUpdate:
    """Scales the loss of steps, and updates weights from their gradients: unscaled, normalized and clipped.

    Args:
        max_grad_norm: the norm that gradients are clipped to; 0 disables clipping.
        nominal_tokens: approximate number of tokens in a global batch, or None.
        weights_follow: return before the new weights are gathered.
        reads_late: let the device decide if possible; None enables it on a GPU.
        after: called with True if the step was applied, or with a 0-d bool tensor if only the device has the decision.
        divisor: fixed divisor of the gradient sum, such as the expected batch size of a private step; None to divide by
            the number of tokens.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, *, max_grad_norm: float,
        nominal_tokens: int | None, weights_follow: bool, reads_late: bool | None,
        after: Callable[[bool | torch.Tensor], None], divisor: float | None = None,
    ):  # fmt: skip
        self._optimizer, self._mesh, self.max_grad_norm, self._after = optimizer, mesh, max_grad_norm, after
        self._divisor = divisor
        self._engine, self._weights_follow = data_parallel(model), weights_follow
        self._engine.adopt(optimizer)
        self._sync = rare_sync(model)
        if self._sync is not None:
            self._sync.begin()
        if weights_follow:
            self._engine.prefetch_weights()
        self._nominal = power_of_two(nominal_tokens) if nominal_tokens else None
        self._loss_scale = LossScale(enabled=Precision.of(mesh.plan).scales_loss)
        self._ratio = UpdateRatio(self._engine, mesh.device)
        may_read_late = access.collectives_overlap(mesh.device) if reads_late is None else reads_late
        self._may_read_late = may_read_late and self._sync is None
        self._unread: LateMetrics | None = None
        self._next_scale: torch.Tensor | None = None  # if only the device has it
        self._unchecked = False  # a gradient was not finite, and the ranks were not checked yet

    # --- scale of the loss ---

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the next step's loss. Waits for the result of the last step."""
        self._read()
        return self._loss_scale

    def scale_of(self, microbatches: list[Any]) -> float | torch.Tensor:
        """Return the factor of a step's losses before backward: a 0-d tensor if only the device has the scale.

        The first call may communicate, so all ranks call it.
        """
        if self._nominal is None:
            # The number of elements in the first tensors approximates the number of tokens.
            values = [next((one.numel() for one in tensors_in(batch) if one.ndim), 1) for batch in microbatches]
            own, data = sum(values), self._mesh.data
            if data.size > 1:
                own = int(all_reduce(torch.tensor(own, dtype=torch.float64, device=self._mesh.device), data))
            self._nominal = power_of_two(own)
        scale = (self._loss_scale.factor() if self._next_scale is None else self._next_scale) / self._nominal
        coders = self._engine.coders
        if coders.has_residual:  # then the host decides about every step
            coders.set_unit(float(scale))
        return scale

    # --- results that are read later ---

    def sum_factor(self) -> float:
        """Return the factor of gradient sums before the update: loss scale / nominal divisor."""
        assert self._nominal is not None
        return self._loss_scale.factor() / self._nominal

    @property
    def is_unread(self) -> bool:
        """True if the host has not read the device's decision about the last step."""
        return self._unread is not None

    def finalize(self, metrics: StepMetrics | None = None) -> None:
        """Read the device's decision about the last step. All ranks call it.

        metrics: metrics of the step to read; None for the last step. For an older step, nothing is read.

        Raises CommError if the gradient norm was not finite because a gradient arrived after its reduction had started.
        """
        if metrics is None or metrics is self._unread:
            self._read()
        if self._unchecked:
            self._unchecked = False
            self._engine.check()

    def _read(self) -> None:
        unread, self._unread, self._next_scale = self._unread, None, None
        if unread is not None:
            self._loss_scale.update(unread.is_finite)
            self._unchecked = not math.isfinite(unread.grad_norm)

    # --- update ---

    def metrics(self, numbers: list[float]) -> StepMetrics:
        """Return the metrics of a step before its update."""
        assert self._nominal is not None
        return StepMetrics.of_sums(numbers, self._nominal, self._loss_scale, self._divisor)

    def can_read_late(self) -> bool:
        """Return True if the device can decide about this step."""
        return self._may_read_late and self._engine.decides_late(self._optimizer)

    def apply(self, numbers: list[float], measures: bool) -> StepMetrics:
        """Update weights, and synchronize local SGD replicas if it is due. Return the metrics of all replicas."""
        assert self._nominal is not None
        if self._sync is None:
            return self._apply(numbers, self._nominal, measures)
        own = StepMetrics.of_sums(numbers, self._nominal, self._loss_scale)
        joint = None if self._sync.is_apart else JointNumbers(own, self._sync)  # reduced while the optimizer works
        mine = self._apply(numbers, self._nominal, measures)
        self._sync.after_step()
        return mine if joint is None else replace(joint.metrics(), update_ratio=mine.update_ratio)

    def _apply(self, numbers: list[float], nominal: float, measures: bool) -> StepMetrics:
        """Normalize, clip and step, or skip. The decision uses only numbers that all ranks share."""
        metrics = StepMetrics.of_sums(numbers, nominal, self._loss_scale, self._divisor)
        if not math.isfinite(metrics.grad_norm):
            self._engine.check()
        factor = to_mean(nominal, self._divisor or numbers[1], self._loss_scale)
        self._loss_scale.update(metrics.is_finite)
        if metrics.skipped is None:
            clip = clip_factor(metrics.grad_norm, self.max_grad_norm)
            metrics = metrics.with_ratio(self._update(factor * clip, measures))
            self._engine.publish(clip, self._weights_follow)
        self._after(metrics.skipped is None)
        return metrics

    def apply_late(self, numbers: torch.Tensor, measures: bool) -> StepMetrics:
        """Update without waiting on the host: the device decides, and the host reads the decision one step later."""
        assert self._nominal is not None
        nominal, scale = self._nominal, self._loss_scale
        decision = StepDecision(numbers, nominal, scale.factor(), self.max_grad_norm)
        if scale.enabled:
            self._next_scale = decision.next_scale(scale)
        ratio = self._update(decision, measures)
        self._engine.publish(follow=self._weights_follow)
        self._after(decision.is_taken)
        then = replace(scale)
        self._unread = LateMetrics(lambda: StepMetrics.of_sums(decision.numbers, nominal, then).with_ratio(ratio))
        return self._unread

    def _update(self, factor: float | StepDecision, measures: bool) -> Callable[[], float | None] | None:
        update = partial(self._engine.update, self._optimizer, factor)
        return self._ratio.around(update) if measures else update()
