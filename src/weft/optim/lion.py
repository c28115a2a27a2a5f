"""Lion (Chen et al. 2023, arXiv 2302.06675): a step along the sign of an interpolated momentum, with one state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay. ZeRO and tensor parallelism may shard its parameters at any element.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; a third to a tenth of AdamW's is usual.
        betas: weight of the momentum in the step's direction, and decay of the momentum.
        weight_decay: multiplied by the learning rate.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient, and return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                direction = momentum.lerp(param.grad, 1 - first).sign_()
                param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                momentum.lerp_(param.grad, 1 - second)
        return loss
