"""One step of Adam or SGD over flat memory in one pass: each value is read once and written once.

    read     gradient, master, moments
    written  master, moments, and the rounded weights if they are another tensor

The factor that averages and clips a gradient is applied when it is read, so gradients are not modified. On a GPU each
call is one kernel (`triton_kernels.py`). A CPU processes the memory in tiles that stay in its caches, with torch's
fused kernels on each. The results equal scaling first and stepping afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from weft.devices import access

#: Elements per tile on a CPU: a few MiB of all data that a step reads and writes.
TILE = 2**19


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Settings of one Adam step. `step` is its index, from 1. `decoupled` means weight decay as in AdamW."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @property
    def correction1(self) -> float:
        """Bias correction of the first moment."""
        return 1 - self.beta1**self.step

    @property
    def correction2(self) -> float:
        """Bias correction of the second moment."""
        return 1 - self.beta2**self.step

    @property
    def dials(self) -> list[float]:
        """Per-step values of the kernel: lr, step number, corrected step size, root of the second correction."""
        return [self.lr, float(self.step), self.lr / self.correction1, self.correction2**0.5]

    @property
    def without_dials(self) -> AdamRule:
        """The rule with lr=0 and step=1. Steps for which this is equal can replay the same CUDA graph."""
        return replace(self, lr=0.0, step=1)


@dataclass(frozen=True, slots=True)
class SgdRule:
    """Settings of one SGD step. Momentum starts at zero, so the first step uses the gradient."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool

    @property
    def dials(self) -> list[float]:
        """Per-step values of the kernel, in the layout of AdamRule: only lr is used."""
        return [self.lr, 0.0, 0.0, 0.0]

    @property
    def without_dials(self) -> SgdRule:
        """The rule with lr=0, as in `AdamRule`."""
        return replace(self, lr=0.0)


Rule = AdamRule | SgdRule


@dataclass(frozen=True, slots=True)
class Lane:
    """Tensors that one step reads and writes, all dense and with equal size and element order.

    `master` and `states` are updated and have one dtype. `grad` has any floating dtype. `weights` gets the new master
    rounded to its dtype, or is None if the master is the weight.
    """

    master: torch.Tensor
    grad: torch.Tensor
    states: tuple[torch.Tensor, ...]
    weights: torch.Tensor | None = None

    def tiles(self, size: int) -> Iterator[Lane]:
        """Yield the same tensors in tiles, 1-D, of at most `size` elements."""
        flat = [_line(one) for one in (self.master, self.grad, *self.states)]
        weights = None if self.weights is None else _line(self.weights)
        for start in range(0, flat[0].numel(), size):
            master, grad, *states = (one[start : start + size] for one in flat)
            yield Lane(master, grad, tuple(states), None if weights is None else weights[start : start + size])


@torch.no_grad()
def step_lane(lane: Lane, rule: Rule, factor: float | torch.Tensor, dials: torch.Tensor | None = None) -> None:
    """Update the tensors of a lane by one optimizer step (in-place).

    Args:
        lane: master, gradient, states and rounded weights, all dense and of one size.
        rule: settings of this step.
        factor: factor of the gradient. A 0-d tensor on the master's device may be NaN to skip the step: then master and
            states are not changed.
        dials: the rule's per-step values, (4,) float64 on the device, for steps recorded in a CUDA graph.
    """
    if access.has_cuda_kernels(lane.master.device) and lane.master.dtype == torch.float32:
        _launch(lane, rule, factor, dials)
        return
    skips = factor.isnan().float() if isinstance(factor, torch.Tensor) else None
    plain = skips is None and dials is None and factor == 1.0
    if plain and lane.weights is None and lane.grad.dtype == lane.master.dtype:
        _torch_step(lane, rule)
        return
    tile = TILE if lane.master.device.type == "cpu" else max(1, lane.master.numel())
    room = lane.master.new_empty(min(tile, lane.master.numel()))
    for one in lane.tiles(tile):
        grad = room[: one.grad.numel()]
        if one.grad.dtype == grad.dtype:
            torch.mul(one.grad, factor, out=grad)
        else:
            grad.copy_(one.grad).mul_(factor)
        _torch_step(Lane(one.master, grad, one.states), rule, skips, dials)
        if one.weights is not None:
            one.weights.copy_(one.master)


def _torch_step(lane: Lane, rule: Rule, skips: torch.Tensor | None = None, dials: torch.Tensor | None = None) -> None:
    lr = rule.lr if dials is None else dials[0]
    if isinstance(rule, SgdRule):
        sgd(
            [lane.master],
            [lane.grad],
            list(lane.states) or [None],
            fused=True,
            weight_decay=rule.weight_decay,
            momentum=rule.momentum,
            lr=lr,  # pyright: ignore[reportArgumentType] - a tensor is taken too
            dampening=0.0,
            nesterov=rule.nesterov,
            maximize=False,
            found_inf=skips,
        )
        return
    before = torch.full((), rule.step - 1.0, device=lane.master.device) if dials is None else (dials[1] - 1.0).float()
    adam(
        [lane.master],
        [lane.grad],
        [lane.states[0]],
        [lane.states[1]],
        [],
        [before],
        fused=True,
        decoupled_weight_decay=rule.decoupled,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
        found_inf=skips,
    )


def _launch(lane: Lane, rule: Rule, factor: float | torch.Tensor, dials: torch.Tensor | None) -> None:
    master, grad, weights = lane.master, lane.grad, lane.weights
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, device=master.device)
    if isinstance(rule, SgdRule):
        momentum = lane.states[0] if lane.states else None
        scalars = (rule.lr, rule.momentum, rule.weight_decay, rule.nesterov)
        sgd_kernel(master, grad, momentum, weights, factor, *scalars, dials)
        return
    adam_kernel(
        master,
        grad,
        lane.states[0],
        lane.states[1],
        weights,
        factor,
        rule.lr,
        rule.beta1,
        rule.beta2,
        rule.eps,
        rule.weight_decay,
        rule.correction1,
        rule.correction2,
        rule.decoupled,
        dials,
    )


@torch.library.custom_op("weft::adam", mutates_args=("master", "exp_avg", "exp_avg_sq", "weights"))
def adam_kernel(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    weights: torch.Tensor | None,
    factor: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
    dials: torch.Tensor | None = None,
) -> None:
    """Run Adam as one GPU kernel. A NaN factor changes nothing. `dials` override lr and corrections."""
    from weft.optim.triton_kernels import launch_adam

    tensors = (master, grad, exp_avg, exp_avg_sq, weights)
    launch_adam(tensors, factor, dials, (lr, beta1, beta2, eps, weight_decay, correction1, correction2), decoupled)


@torch.library.custom_op("weft::sgd", mutates_args=("master", "momentum_buffer", "weights"))
def sgd_kernel(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    weights: torch.Tensor | None,
    factor: torch.Tensor,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    dials: torch.Tensor | None = None,
) -> None:
    """Run SGD as one GPU kernel. A NaN factor changes nothing. `dials` (per-step values), if given, override lr."""
    from weft.optim.triton_kernels import launch_sgd

    launch_sgd((master, grad, momentum_buffer, weights), factor, dials, (lr, momentum, weight_decay), nesterov)


@adam_kernel.register_kernel("cpu")
def _adam_on_host(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    weights: torch.Tensor | None,
    factor: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    correction1: float,
    correction2: float,
    decoupled: bool,
    dials: torch.Tensor | None = None,
) -> None:
    """CPU implementation of the Adam kernel, for the simulated GPU, whose small tensors have real values."""
    if factor.isnan():
        return
    step_size, root = (lr / correction1, correction2**0.5) if dials is None else (float(dials[2]), float(dials[3]))
    lr = lr if dials is None else float(dials[0])
    grad = grad.to(master.dtype) * factor
    if decoupled:
        master.mul_(1 - lr * weight_decay)
    else:
        grad = grad + master * weight_decay
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    master.addcdiv_(exp_avg, (exp_avg_sq.sqrt() / root).add_(eps), value=-step_size)
    if weights is not None:
        weights.copy_(master)


@sgd_kernel.register_kernel("cpu")
def _sgd_on_host(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    weights: torch.Tensor | None,
    factor: torch.Tensor,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    dials: torch.Tensor | None = None,
) -> None:
    """CPU implementation of the SGD kernel, for the simulated GPU."""
    if factor.isnan():
        return
    lr = lr if dials is None else float(dials[0])
    grad = grad.to(master.dtype) * factor + master * weight_decay
    if momentum_buffer is not None:
        momentum_buffer.mul_(momentum).add_(grad)
        grad = grad + momentum_buffer * momentum if nesterov else momentum_buffer
    master.sub_(grad * lr)
    if weights is not None:
        weights.copy_(master)


@adam_kernel.register_fake
@sgd_kernel.register_fake
def _changes_nothing_else(*args: object) -> None:
    del args


def _line(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))
