"""Balancing of experts over all ranks: sequences that lie on several of them, and the step of the selection bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.comm import Pending, all_gather
from weft.comm.autograd import sum_over
from weft.comm.collectives import start_all_reduce
from weft.mesh import Axis, Mesh
from weft.models.balance import Span, move_bias
from weft.models.moe import Router, routers

#: The whole sequence from the parts of all ranks of cp, in order of the axis; dim 1 is the sequence.
Join = Callable[[list[Tensor]], Tensor]
#: This rank's part of a whole sequence.
Cut = Callable[[Tensor], Tensor]


class DividedSpan(Span):
    """Sequences divided over cp, and under sequence parallelism each part in contiguous parts over tp.

    order: for a number of tokens, how cp's parts are joined and cut.
    """

    def __init__(self, cp: Axis, tp: Axis, order: Callable[[int], tuple[Join, Cut]]):
        self._cp, self._tp, self._order = cp, tp, order
        self.num_parts = cp.size * tp.size

    def __deepcopy__(self, memo: dict[int, object]) -> DividedSpan:
        return self  # a copy of the module runs on the same ranks

    def sum(self, x_BE: Tensor) -> Tensor:
        return sum_over(sum_over(x_BE, self._tp), self._cp)

    def whole(self, ids_BTK: Tensor) -> Tensor:
        part = torch.cat(_gathered(ids_BTK, self._tp), 1)
        parts = _gathered(part, self._cp)
        return part if len(parts) == 1 else self._joining(part.shape[1])[0](parts)

    def part(self, x_BSK: Tensor) -> Tensor:
        if self._cp.size > 1:
            x_BSK = self._joining(x_BSK.shape[1] // self._cp.size)[1](x_BSK)
        share = x_BSK.shape[1] // self._tp.size
        return x_BSK.narrow(1, self._tp.rank * share, share)

    def _joining(self, num_tokens: int) -> tuple[Join, Cut]:
        return self._order(num_tokens * self._cp.size)


def _gathered(x: Tensor, axis: Axis) -> list[Tensor]:
    return [x] if axis.size == 1 else list(all_gather(x.contiguous(), axis).view(axis.size, *x.shape))


class ExpertBalance:
    """What a training step does for the routers of a model; nothing for a model without."""

    def __init__(self, model: nn.Module, mesh: Mesh):
        self._routers = list(routers(model))
        self._biased = [router for router in self._routers if router.bias_ppm is not None]
        names = ("dp_replicate", "dp_shard", "cp", *(("tp",) if mesh.plan.sp else ()))
        self._axis = mesh[names] if self._biased else mesh["pp"]
        self._pending: Pending | None = None

    def begin(self, scale: float) -> None:
        """At the start of a step. scale: of the gradient of a loss that is summed over tokens."""
        self._pending = None
        for router in self._routers:
            router.aux_scale = scale
            router.load.clear()

    def start(self) -> None:
        """After the last backward: begin to add up the ranks' counts. All ranks call it."""
        if self._biased:
            self._pending = start_all_reduce(torch.stack([_tokens(router) for router in self._biased]), self._axis)

    def finish(self, *, moved: bool) -> None:
        """At the end of a step: where the weights moved, the biases move too. A skipped step leaves them."""
        if self._pending is None:
            return
        counted = self._pending.wait()
        self._pending = None
        for router, tokens_E in zip(self._biased, counted.unbind(), strict=True):
            assert router.bias_ppm is not None
            if moved:
                move_bias(router.bias_ppm, tokens_E, router.spec.balance_rate)


def _tokens(router: Router) -> Tensor:
    counted = router.load.tokens_E
    assert router.bias_ppm is not None
    return torch.zeros_like(router.bias_ppm) if counted is None else counted
