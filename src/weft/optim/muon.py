"""Muon for the matrices of a network and AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024; scaled as in Liu et al. 2025, arXiv 2502.16982) steps along the orthogonalised momentum of a
full matrix. It therefore needs full matrices. Under ZeRO each matrix is assigned to one rank, which stores its momentum
and orthogonalises it, and only the new weights are communicated. A matrix sharded by tensor parallelism keeps a sharded
momentum. Only the step's direction is gathered, orthogonalised on each tp rank, and sharded again. The other parameters
may be sharded at any element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.adamw import adamw

from weft.optim.step_decision import DecidedOptimizer
from weft.private_torch import foreach_lerp_

#: Coefficients of torch.optim.Muon's quintic iteration, which approaches singular values of 1 quickly but roughly.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
#: Matrices of one shape are orthogonalised together, up to this many bytes in fp32. Several copies of them exist
#: temporarily.
STACK_BYTES = 2**28


class Join(Protocol):
    """Gathers the shards of a matrix into the full matrix, and shards it again."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the full matrix. Collective: all ranks with shards of it must call it."""
        ...

    def part(self, whole: torch.Tensor) -> torch.Tensor: ...

    def full_shape(self, part: torch.Tensor) -> tuple[int, ...]: ...


class Muon(DecidedOptimizer):
    """Muon on 2-D parameters, AdamW on all others.

    Orthogonalisation runs in bf16, as in torch, and in float64 for float64 parameters. `joins` maps each sharded matrix
    to its `Join`; the code that shards the parameters fills it.

    Args:
        params: parameters, or groups of them. `matrices=False` in a group makes AdamW update its 2-D parameters too, as
            is usual for embeddings and heads.
        lr: learning rate in AdamW's scale (`match_rms_adamw` in torch), so that one rate suits both kinds of
            parameters.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        momentum: decay of the running mean of a matrix's gradient.
        betas: betas of AdamW.
        eps: eps of AdamW.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(_by_shape(params), {**defaults, "matrices": True, "elementwise": False})
        self.joins: dict[nn.Parameter, Join] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient, and return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["matrices"]:
                for stack in self._stacks(params):
                    self._turn(stack, group)
            elif params:
                self._adamw(params, group)
        return loss

    def _turn(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
        grads = [param.grad for param in params if param.grad is not None]
        momenta = [self.state[param]["momentum"] for param in params]
        before = [one.clone() for one in momenta] if self.decision is not None else []
        foreach_lerp_(momenta, grads, 1 - group["momentum"])
        ahead = [_working(grad.lerp(one, group["momentum"])) for grad, one in zip(grads, momenta, strict=True)]
        joins = [self.joins.get(param) for param in params]
        whole = [one if join is None else join.gather(one) for one, join in zip(ahead, joins, strict=True)]
        del ahead
        updates = orthogonalise(torch.stack(whole))
        scale = 0.2 * max(updates.shape[1:]) ** 0.5
        for param, join, update in zip(params, joins, updates.unbind(), strict=True):
            update = update if join is None else join.part(update)
            moved = param if self.decision is None else param.clone()
            moved.mul_(1 - group["lr"] * group["weight_decay"])
            moved.add_(update.to(param), alpha=-group["lr"] * scale)
            self._take(param, moved, param)
        for one, old in zip(momenta, before, strict=bool(before)):
            self._take(one, one, old)

    def _take(self, target: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> None:
        if self.decision is not None:
            torch.where(self.decision.is_taken, new, old, out=target)

    def _stacks(self, params: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield lists of parameters with equal full shape, dtype and device, at most STACK_BYTES per list.

        The lists are in order of first occurrence. The full shape is used because ranks with parts of a matrix must
        process the same matrices in the same order.
        """
        found: dict[tuple[tuple[int, ...], object, object], list[nn.Parameter]] = {}
        for param in params:
            join = self.joins.get(param)
            shape = tuple(param.shape) if join is None else join.full_shape(param)
            found.setdefault((shape, param.dtype, param.device), []).append(param)
        for (shape, *_), alike in found.items():
            most = max(1, STACK_BYTES // max(1, 4 * torch.Size(shape).numel()))
            yield from (alike[start : start + most] for start in range(0, len(alike), most))

    def _adamw(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        states = [self.state[param] for param in params]
        adamw(
            [*params],
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            # As in torch's GradScaler: if this is 1, the kernel changes neither tensors nor step counts.
            found_inf=None if self.decision is None else (~self.decision.is_taken).float(),
        )


def _working(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.dtype == torch.float64 else matrix.bfloat16()


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """Compute an approximation of the nearest matrix whose singular values are all 1, by Newton-Schulz iteration.

    `matrix` is (rows, columns), or (matrices, rows, columns) for a stack that is processed with batched matmuls. The
    result has its shape, in bf16, or in float64 for a float64 matrix.
    """
    if matrix.ndim == 2:
        return orthogonalise(matrix[None])[0]
    a, b, c = COEFFICIENTS
    x = _working(matrix)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _by_shape(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Split each parameter group in two: matrices, whose update needs full parameters, and all others.

    A group with matrices=False is not split. Empty groups are left out.
    """
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    found: list[dict[str, Any]] = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        takes = group.get("matrices", True)
        for matrices in (True, False):
            chosen = [param for param in members if (takes and param.ndim == 2) == matrices]
            if chosen:
                found.append({**group, "params": chosen, "matrices": matrices, "elementwise": not matrices})
    return found
