"""Optimizers that the device tells whether their step is taken, while the host goes on without knowing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.optim.step_decision import StepDecision


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

    def settle(self) -> None:
        """Bring counts of steps that the host keeps in line with what the device decided of the last one."""
