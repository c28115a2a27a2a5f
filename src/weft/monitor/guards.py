"""Guards of a run against non-finite steps, loss spikes and uneven garbage collection; FLOPs and MFU."""

from __future__ import annotations

import functools
import gc
import math
import statistics
from collections import deque
from types import TracebackType

from weft.errors import TrainingHalted


class NonFiniteGuard:
    """Watches loss and gradient norm, and halts after more than `limit` bad steps in a row.

    Args:
        limit: train.max_bad_steps. 0 means to halt at the first bad step.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._row: list[tuple[int, str]] = []

    @property
    def num_bad(self) -> int:
        """Number of bad steps in a row, up to the last one observed."""
        return len(self._row)

    @property
    def first_bad(self) -> int | None:
        """The first of the current bad steps, or None after a good step."""
        return self._row[0][0] if self._row else None

    def observe(self, step: int, loss: float, grad_norm: float, *, loss_scale: float | None = None) -> str | None:
        """Return the reason why this step must not change the weights, or None if it may.

        Args:
            step: counts from 1.
            loss: this step's loss.
            grad_norm: norm of the full gradient.
            loss_scale: loss scale of fp16. While it is above 1, gradient overflows do not count, because the loss
                scaler causes them to find the scale.

        Raises:
            TrainingHalted: if more than `limit` steps in a row are bad. The caller adds the step from which the run
                resumes to its message.
        """
        if not math.isfinite(loss):
            reason = f"the loss is {loss}"
        elif not math.isfinite(grad_norm):
            reason = f"the gradient norm is {grad_norm}"
        else:
            self._row.clear()
            return None
        if math.isfinite(loss) and loss_scale is not None and loss_scale > 1:
            return f"{reason} at loss scale {loss_scale:g}"
        self._row.append((step, "gradient" if math.isfinite(loss) else "loss"))
        if len(self._row) > self.limit:
            raise TrainingHalted(self._sentence(reason))
        return reason

    def _sentence(self, reason: str) -> str:
        first, last, count = self._row[0][0], self._row[-1][0], len(self._row)
        kinds = {kind for _, kind in self._row}
        what = " or ".join(sorted(kinds, reverse=True))
        where = f"at step {first}" if count == 1 else f"at {count} steps in a row ({first} to {last})"
        if "loss" in kinds and first <= 1:
            advice = "No step was finite: check the data and the initial weights, or try precision=fp32"
        elif "loss" in kinds:
            advice = "Lower optimizer.lr or lengthen schedule.warmup_steps"
        else:
            advice = "Lower optimizer.lr or optimizer.max_grad_norm, or use bf16 or fp32 instead of fp16"
        return (
            f"train.max_bad_steps={self.limit}: the {what} was not finite {where}; the last: {reason}."
            f" {advice}, and run the command again"
        )


# Detection of steps at which the loss jumps far above its recent values.

#: Number of recent steps of the median, and the minimum needed before any alarm.
WINDOW, _MIN_STEPS = 100, 20
#: Minimum height of a spike: median absolute deviations above the median, and factor above the best median.
DEVIATIONS, ABOVE_BEST = 5.0, 1.5
#: Minimum loss of a spike, as a fraction of the highest median so far, to ignore noise of a converged loss.
FLOOR = 0.01
#: A single step raises an alarm if it exceeds all recent steps by this factor. Else two steps in a row are needed.
_SINGLE_STEP_FACTOR = 1.5
#: Number of steps after an alarm without another alarm. It doubles with every spike that ended without help.
QUIET_STEPS = 50
#: A spike that lasts this many steps raises an alarm even within the quiet steps.
_LASTING = 20


class SpikeWatch:
    """Detects loss spikes of one run, step by step.

    A loss is part of a spike if it is above a bound that depends on the median of recent losses (`_bound`). Losses of a
    spike do not enter the median. After a spike of more than `WINDOW` steps, the median starts again from the new
    level.
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[float] = deque(maxlen=WINDOW)  # including the losses of spikes
        self._best, self._highest = math.inf, 0.0  # lowest and highest median so far
        self._in_a_row = 0
        self._alarmed = False
        self._quiet_left, self._quiet = 0, QUIET_STEPS

    def observe(self, loss: float) -> float | None:
        """Return the median of recent losses if this step raises an alarm, else None. Non-finite losses are ignored."""
        if not math.isfinite(loss):
            return None  # NonFiniteGuard handles these
        usual, bound = self._bound()
        highest = max(self._recent, default=loss)
        self._recent.append(loss)
        self._quiet_left = max(0, self._quiet_left - 1)
        if loss <= bound:
            if self._alarmed:
                self._quiet *= 2
            self._in_a_row, self._alarmed = 0, False
            self._window.append(loss)
            return None
        self._in_a_row += 1
        if self._in_a_row > WINDOW:
            self._window.clear()
            self._best, self._in_a_row, self._alarmed = math.inf, 0, False
            return None
        is_new = self._in_a_row > 1 or loss > _SINGLE_STEP_FACTOR * highest
        if self._alarmed or not (self._in_a_row >= _LASTING if self._quiet_left else is_new):
            return None
        self._alarmed, self._quiet_left = True, self._quiet
        return usual

    def _bound(self) -> tuple[float, float]:
        """Return (median, bound above which a loss is a spike).

        The bound is infinite while the window has too few steps.
        """
        if len(self._window) < _MIN_STEPS:
            return math.nan, math.inf
        usual = statistics.median(self._window)
        self._best, self._highest = min(self._best, usual), max(self._highest, usual)
        deviation = statistics.median(abs(value - usual) for value in self._window)
        # The median of a falling curve lags above it, so the best median keeps the bound from being too low.
        return usual, max(usual + DEVIATIONS * deviation, ABOVE_BEST * self._best, FLOOR * self._highest)


# Python garbage collection at the same steps on all ranks.


@functools.cache
def _others_have_frozen() -> bool:
    """Return True if something else froze objects before the first run of this process. Counting them takes 70 ms."""
    return gc.get_freeze_count() > 0


class GarbageTurns:
    """A context in which Python collects garbage only after steps that are multiples of `every`.

    Objects that exist after the first step are frozen. Nothing changes if `every` is 0 or the collector was off before.
    """

    def __init__(self, every: int):
        self.every = every
        self._num_steps = 0
        self._was_on = self._has_frozen = False

    def __enter__(self) -> GarbageTurns:
        self._was_on = self.every > 0 and gc.isenabled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_on:
            gc.enable()
        self._has_frozen = False

    def after_step(self, step: int | None = None) -> None:
        """Run the garbage collector after the first step, and after steps that are multiples of `every`.

        step: the step's number, by default the number of calls.
        """
        self._num_steps += 1
        if not self._was_on:
            return  # every is 0, or the collector was off before
        if self._num_steps == 1:
            gc.disable()
            gc.collect()
            if not _others_have_frozen():
                gc.freeze()
                self._has_frozen = True
        elif (self._num_steps if step is None else step) % self.every == 0:
            gc.collect()


# FLOPs per token, and utilization of the devices.


def flops_per_token(num_params_without_embedding: int, num_layers: int, dim: int, seq_len: int) -> float:
    """Return the FLOPs to train on one token, forward and backward: `6 * N + 12 * num_layers * dim * seq_len`.

    6 N is 2 N for the forward pass (a multiply and an add) and 4 N for the backward pass. The second term is attention:
    scores and weighted sum are 2 matmuls of 2 * dim * seq_len FLOPs per layer and token, times three for forward and
    backward. This is the convention of PaLM (Chowdhery et al. 2022, appendix B) and of Llama's reports: every token
    counts as attending to all seq_len tokens. Other definitions count only the causal half, `6 * num_layers * dim *
    seq_len`, so their MFU is lower for the same speed. Recomputed activations (as in HFU), norms and elementwise
    operations are not counted.

    Args:
        num_params_without_embedding: N, the number of parameters used in matmuls: all but the embedding tables,
            including the head. A tied head counts too, because its matmul is computed.
        num_layers: number of layers.
        dim: width of the hidden state.
        seq_len: tokens per sequence.
    """
    return 6.0 * num_params_without_embedding + 12.0 * num_layers * dim * seq_len


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float, num_devices: int) -> float:
    """Return the model FLOPs utilization, 0 to 1: the model's FLOP/s divided by the peak FLOP/s of the devices.

    Args:
        flops_per_token: FLOPs per token, forward and backward.
        tokens_per_s: throughput of all devices.
        peak_flops: dense peak of one device in the dtype of the matmuls, in FLOP/s.
        num_devices: number of training devices.
    """
    return flops_per_token * tokens_per_s / (peak_flops * num_devices)
