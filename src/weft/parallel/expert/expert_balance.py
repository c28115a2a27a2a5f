"""Balancing of experts over all ranks: sequences that lie on several of them, and the step of the selection bias."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.comm import Pending, all_gather, start_all_reduce
from weft.comm.autograd import sum_over
from weft.mesh import Axis, Mesh
from weft.models.experts import Load, Router, Span, move_bias, routers
from weft.parallel.expert.foreign_router import ForeignRouter


class TokenOrder(Protocol):
    """Which tokens of whole sequences this rank has."""

    def cut(self, x: Tensor) -> Tensor:
        """(B, T, ...) to this rank's (B, S, ...)."""
        ...

    def join(self, parts: list[Tensor]) -> Tensor:
        """(B, S, ...) of each rank to (B, T, ...)."""
        ...


class CutSequences(Protocol):
    """Sequences that lie on several ranks of `axis`, while `in_use`."""

    axis: Axis
    in_use: bool

    def order(self, seq_len: int) -> TokenOrder:
        """Where this rank's tokens are in whole sequences of that length."""
        ...


class DividedSpan(Span):
    """Sequences divided over cp while they are cut, and under sequence parallelism each part over tp."""

    def __init__(self, context: CutSequences | None, tp: Axis):
        self._context, self._tp = context, tp

    def __deepcopy__(self, memo: dict[int, object]) -> Span:
        return Span()  # a copy of the model is a plain one

    @property
    def num_parts(self) -> int:
        return self._tp.size * (self._cut.axis.size if self._cut else 1)

    def sum(self, x_BE: Tensor) -> Tensor:
        x_BE = sum_over(x_BE, self._tp)
        return sum_over(x_BE, self._cut.axis) if self._cut else x_BE

    def whole(self, ids_BTK: Tensor) -> Tensor:
        part = torch.cat(_gathered(ids_BTK, self._tp), 1)
        if not self._cut:
            return part
        axis = self._cut.axis
        return self._cut.order(part.shape[1] * axis.size).join(_gathered(part, axis))

    def part(self, x_BSK: Tensor) -> Tensor:
        if self._cut:
            x_BSK = self._cut.order(x_BSK.shape[1]).cut(x_BSK)
        share = x_BSK.shape[1] // self._tp.size
        return x_BSK.narrow(1, self._tp.rank * share, share)

    @property
    def _cut(self) -> CutSequences | None:
        return self._context if self._context is not None and self._context.in_use else None


def divide_sequences(model: nn.Module, mesh: Mesh, context: CutSequences | None) -> None:
    """Tell routers that sequences lie on several ranks, where cp or sp divides them. After these were applied.

    Args:
        model: with or without routers.
        mesh: of the ranks.
        context: how cp cuts sequences; None where it does not.
    """
    tp = mesh["tp"] if mesh.plan.sp else Axis("tp", 1, 0, (mesh.rank,))
    if context is not None or tp.size > 1:
        for router in balanced_routers(model):
            router.span = DividedSpan(context, tp)


def _gathered(x: Tensor, axis: Axis) -> list[Tensor]:
    return [x] if axis.size == 1 else list(all_gather(x.contiguous(), axis).view(axis.size, *x.shape))


def balanced_routers(model: nn.Module) -> Iterator[Router | ForeignRouter]:
    """Yield routers that count what they choose: the project's, and those that `balance_routers` was called for."""
    return (module for module in model.modules() if isinstance(module, Router | ForeignRouter))


class ExpertBalance:
    """What a training step does for the routers of a model; nothing for a model without."""

    def __init__(self, model: nn.Module, mesh: Mesh):
        self._routers = list(balanced_routers(model))
        self._biased = [router for router in routers(model) if router.bias_ppm is not None]
        names = ("dp_replicate", "dp_shard", "cp", *(("tp",) if mesh.plan.sp else ()))
        self._axis = mesh[names] if self._biased else None
        self._pending: Pending | None = None

    def begin(self, scale: float | Tensor) -> None:
        """Begin a step. scale: of the gradient of a loss that is summed over tokens."""
        self._pending = None
        for router in self._routers:
            router.aux_scale = scale
            router.load.clear()

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Count nothing of what is forwarded inside: no loss of balance in its backward, no tokens of it."""
        before = [(router, router.aux_scale, router.load) for router in self._routers]
        for router, _, load in before:
            router.aux_scale, router.load = 0.0, Load(load.num_experts)
        try:
            yield
        finally:
            for router, scale, load in before:
                router.aux_scale, router.load = scale, load

    def start(self) -> None:
        """Begin to add up the ranks' counts, after the last backward. All ranks call it."""
        if self._axis is not None:
            self._pending = start_all_reduce(torch.stack([_tokens(router) for router in self._biased]), self._axis)

    def finish(self, *, moved: bool | Tensor) -> None:
        """Move the biases at the end of a step where the weights moved. A skipped step leaves them.

        moved: a 0-d bool of the device where the host does not know it yet.
        """
        if self._pending is None:
            return
        counted = self._pending.wait()
        self._pending = None
        for router, tokens_E in zip(self._biased, counted.unbind(), strict=True):
            assert router.bias_ppm is not None
            if isinstance(moved, Tensor):
                tokens_E = tokens_E * moved  # as if no token had gone anywhere: no expert had more than another
            if not isinstance(moved, bool) or moved:
                move_bias(router.bias_ppm, tokens_E, router.spec.balance_rate)


def _tokens(router: Router) -> Tensor:
    counted = router.load.tokens_E
    assert router.bias_ppm is not None
    return torch.zeros_like(router.bias_ppm) if counted is None else counted
