"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): gradients at interpolated weights, and their average.

The parameters are y, at which gradients are computed. The state has z, the weights of the base optimizer. The average
x, which evaluations, texts and exports use, follows from y = (1 - beta) z + beta x. The rate needs no decay, so use a
constant schedule after the warmup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """AdamW without a schedule. ZeRO and tensor parallelism may shard its parameters at any element.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; up to ten times AdamW's is usual.
        betas: share of the average in the trained weights, and decay of the squared gradient's average.
        eps: added to the root of the squared gradient's average.
        weight_decay: multiplied by the learning rate; it acts on the trained weights.
        r: a step's weight in the average grows as step ** r.
        weight_lr_power: a step's weight in the average grows as the largest rate so far to this power.

    Raises:
        ValueError: if a number of `betas` is out of range.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ):
        if not 0 < betas[0] < 1 or not 0 <= betas[1] < 1:
            raise ValueError(f"betas={betas}: the first must be between 0 and 1, the second at least 0 and below 1")
        numbers = {"eps": eps, "weight_decay": weight_decay, "r": r, "weight_lr_power": weight_lr_power}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), **numbers})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient, and return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, y: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (first, second), lr, state = group["betas"], float(group["lr"]), self.state[y]
        if not state:
            state["z"] = y.detach().clone(memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(y)
            # On the host, so that they need no synchronization.
            state |= {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in _COUNTS}
        steps, largest = float(state["step"]) + 1, max(lr, float(state["lr_max"]))
        weight = steps ** group["r"] * largest ** group["weight_lr_power"]
        total = float(state["weight_sum"]) + weight
        for name, value in zip(_COUNTS, (steps, total, largest), strict=True):
            state[name].fill_(value)
        share = weight / total if total else 0.0
        squares = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        change = grad / squares.sqrt().div_(math.sqrt(1 - second**steps)).add_(group["eps"])
        if group["weight_decay"]:
            change.add_(y, alpha=group["weight_decay"])
        y.lerp_(state["z"], share).add_(change, alpha=lr * (first * (1 - share) - 1))
        state["z"].sub_(change, alpha=lr)

    def average(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the average x of the weights, in a new tensor.

        y: elements of a trained parameter. z: the same elements of its state "z".
        """
        return y.lerp(z.to(y), 1 - 1 / self.defaults["betas"][0])


#: Numbers in the state of each parameter.
_COUNTS = ("step", "weight_sum", "lr_max")
