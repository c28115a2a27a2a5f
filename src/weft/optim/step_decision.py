"""Numbers that decide a step: loss scale, gradient norm and clipping, and the decision to take or skip the step.

The device can make the decision. The host then launches the optimizer and the gathering of weights without waiting, and
reads the decision one step later from a small pinned copy. Host and device use the same float64 arithmetic, so their
decisions are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from weft.comm.pending import LateCopy
from weft.private_torch import foreach_norm

#: Above this, fp32 sums of scaled gradients may overflow even if the gradients are normal.
MAX_SCALE = 2.0**32
MIN_SCALE = 1.0


@dataclass(slots=True)
class LossScale:
    """Scale of the loss before backward (Micikevicius et al. 2018, arXiv 1710.03740).

    The caller decides jointly for all ranks if a step was finite, so the scale is equal on all ranks. All scales are
    powers of two, so scaling and unscaling are exact.
    """

    scale: float = 2.0**16
    growth_interval: int = 1000
    enabled: bool = True
    good_steps: int = 0
    num_skipped: int = 0

    def factor(self) -> float:
        """Return the factor of the loss: 1.0 if scaling is off."""
        return self.scale if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """Update the scale: halve it after a step that was not finite, double it after `growth_interval` finite steps.

        The scale stays from 1 to 2**32. Does nothing if scaling is disabled.
        """
        if not self.enabled:
            return
        if not finite:
            self.scale = max(MIN_SCALE, self.scale / 2)
            self.good_steps = 0
            self.num_skipped += 1
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale = min(MAX_SCALE, self.scale * 2)
            self.good_steps = 0

    def state(self) -> dict[str, float | int]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, float | int]) -> None:
        """Restore the result of `state`."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])


def global_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all tensors as one vector, 0-d, float64 for float64 gradients, else float32."""
    if not grads:
        return torch.zeros(())
    norms = foreach_norm(list(grads), 2.0, dtype=torch.promote_types(grads[0].dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips a gradient of `norm` to `max_norm`, or 1.0 if it is within or `max_norm` is 0.

    Same formula as torch.nn.utils.clip_grad_norm_, including its epsilon, so that migrated runs continue unchanged.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


class StepDecision:
    """Decision to take or skip a step, from sums over all ranks. Equal on all ranks.

    Args:
        numbers: 1-D float64 on the device: sum of losses, number of tokens, ..., norm of the gradient sum. The norm
            still includes `scale` and the division by `nominal`.
        nominal: divisor of the loss before backward.
        scale: loss scale of this step.
        max_norm: clip limit of the gradient norm; 0 turns clipping off.
    """

    def __init__(self, numbers: torch.Tensor, nominal: float, scale: float, max_norm: float):
        num_tokens, norm = numbers[1], numbers[-1]
        # torch computes number / tensor as reciprocal times number, which rounds twice.
        to_mean = torch.full_like(norm, nominal) / (num_tokens.clamp(min=1.0) * scale)
        clip: torch.Tensor | float = 1.0
        if max_norm > 0:
            clip = (torch.full_like(norm, max_norm) / (norm * to_mean + 1e-6)).clamp(max=1.0)
        #: True if loss and gradient are finite, which determines the next loss scale; 0-d bool.
        self.is_finite = (numbers * 0).sum() == 0
        #: True if the step is taken; 0-d bool.
        self.is_taken = self.is_finite & (num_tokens != 0)
        #: Factor of the gradients; 0-d float64, NaN in a skipped step.
        self.factor = torch.where(self.is_taken, to_mean * clip, torch.nan)
        self._copy = LateCopy(torch.cat([numbers, self.is_taken.to(numbers).reshape(1)]))

    @property
    def numbers(self) -> list[float]:
        """The numbers on the host. The first access waits for the device."""
        return self._copy.values[:-1]

    @property
    def was_taken(self) -> bool:
        """True if the step was applied: `is_taken` on the host. Waits like `numbers`."""
        return self._copy.values[-1] != 0

    def next_scale(self, scale: LossScale) -> torch.Tensor:
        """Return the loss scale of the next step, according to the device's decision. `scale` is not modified."""
        good, bad = replace(scale), replace(scale)
        good.update(True)
        bad.update(False)
        return torch.where(self.is_finite, good.scale, bad.scale)

    def factor_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Return `factor` for the gradients of master weights of `dtype`: in float32, or in float64 for float64."""
        return self.factor.to(torch.promote_types(dtype, torch.float32))


# Optimizers whose step the device can skip without the host waiting for the decision.


class DecidedOptimizer(torch.optim.Optimizer):
    """Optimizer whose `step` changes nothing if the device decides so.

    `decision` is the decision of the current step, whose gradients are already scaled. None means that the host has
    decided to take the step.
    """

    decision: StepDecision | None = None

    @contextmanager
    def decided(self, decision: StepDecision) -> Iterator[None]:
        """Make the optimizer's step inside this context depend on a decision."""
        self.decision = decision
        try:
            yield
        finally:
            self.decision = None

    def finalize(self) -> None:
        """Change the host's step counts to match the device if it skipped the last step."""
