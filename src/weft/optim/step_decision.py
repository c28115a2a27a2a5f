"""The decision of a step, made on the device: whether it is taken, and what its gradients are multiplied by.

The host launches optimizer and publication without knowing it, and reads it one step later from a small pinned copy.
The arithmetic is that of the decision on the host, in float64, so both come to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from weft.comm.pending import LateCopy
from weft.optim.loss_scale import LossScale


class StepDecision:
    """What follows from a step's sums over all ranks; equal on all of them.

    Args:
        numbers: 1-D float64 on the device: sum of losses, number of tokens, ..., norm of the gradient as it lies there.
        nominal: what the loss was divided by before backward.
        scale: the loss scale of this step.
        max_norm: the gradient is clipped to it; 0 is no clipping.
    """

    def __init__(self, numbers: torch.Tensor, nominal: float, scale: float, max_norm: float):
        num_tokens, norm = numbers[1], numbers[-1]
        # A number over a tensor would be its reciprocal times the number, which rounds twice.
        to_mean = torch.full_like(norm, nominal) / (num_tokens.clamp(min=1.0) * scale)
        clip: torch.Tensor | float = 1.0
        if max_norm > 0:
            clip = (torch.full_like(norm, max_norm) / (norm * to_mean + 1e-6)).clamp(max=1.0)
        #: Whether loss and gradient are finite, which the next loss scale follows; 0-d bool.
        self.is_finite = (numbers * 0).sum() == 0
        #: Whether the step is taken; 0-d bool.
        self.is_taken = self.is_finite & (num_tokens != 0)
        #: What gradients are multiplied by; 0-d float64, NaN in a step that is not taken.
        self.factor = torch.where(self.is_taken, to_mean * clip, torch.nan)
        self._in_one_sentence = LateCopy(torch.cat([numbers, self.is_taken.to(numbers).reshape(1)]))

    @property
    def numbers(self) -> list[float]:
        """The numbers on the host. The first look waits until the device has made them."""
        return self._in_one_sentence.values[:-1]

    @property
    def was_taken(self) -> bool:
        """The same as `is_taken`, on the host; waits as `numbers` do."""
        return self._in_one_sentence.values[-1] != 0

    def next_scale(self, scale: LossScale) -> torch.Tensor:
        """Return the loss scale of the next step, of the two that may follow; `scale` stays as it is."""
        good, bad = replace(scale), replace(scale)
        good.update(True)
        bad.update(False)
        return torch.where(self.is_finite, good.scale, bad.scale)

    def factor_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the factor in the format that gradients of masters of `dtype` are multiplied in."""
        return self.factor.to(torch.promote_types(dtype, torch.float32))


# Optimizers that the device tells whether their step is taken, while the host goes on without knowing it.


class DecidedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` changes nothing where the device says so.

    decision: of the step under way, whose gradients are scaled already; None: the host has decided to take it.
    """

    decision: StepDecision | None = None

    @contextmanager
    def decided(self, decision: StepDecision) -> Iterator[None]:
        """Let the step inside follow a decision."""
        self.decision = decision
        try:
            yield
        finally:
            self.decision = None

    def finalize(self) -> None:
        """Bring counts of steps that the host keeps in line with what the device decided of the last one."""
