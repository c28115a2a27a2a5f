"""Forwards that a task asks for outside of a step: without gradients, in evaluation mode, under any plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from weft.comm import all_reduce, barrier
from weft.comm.autograd import sum_over
from weft.mesh import Mesh
from weft.models.adapters import AdaptedLinear, without_adapter
from weft.parallel.context import sequence_in_use
from weft.parallel.pipeline import pipeline_of
from weft.spec.plan import Plan
from weft.train.state import on_first
from weft.train.step.evaluation import counted_ranks, each_output
from weft.train.task import Task, Which


class RankForwards:
    """One rank's part of a model, as `weft.train.task.Forwards` describes it.

    Args:
        model: what `parallelize` returned.
        mesh: of the ranks.
        task: gives forward and loss.
        second: a model of the same plan that nothing changes; None: there is none.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, task: Task, second: nn.Module | None = None):
        self._model, self._mesh, self._task, self._second = model, mesh, task, second
        if second is not None:
            second.eval()

    @property
    def plan(self) -> Plan:
        """Return what the model lies on its ranks by."""
        return self._mesh.plan

    @property
    def device(self) -> torch.device:
        """Return where this rank computes."""
        return self._mesh.device

    @property
    def rank(self) -> int:
        """Return this rank's number among all of the run's world."""
        return self._mesh.rank

    @property
    def size(self) -> int:
        """Return how many ranks the world has."""
        return self._mesh.world_size

    def wait(self) -> None:
        """Wait until all ranks have come here."""
        barrier(self._mesh.world)

    @property
    def is_counted(self) -> bool:
        """Whether this rank's losses count: of the ranks of cp, on the first one alone."""
        return self._mesh["cp"].rank == 0

    @property
    def data_rank(self) -> int:
        """Return this rank's place among those that read different samples."""
        return self._mesh.data.rank

    @property
    def data_size(self) -> int:
        """Return how many ranks read different samples."""
        return self._mesh.data.size

    def rows(
        self, batches: Sequence[Any], each: Callable[[Any, Any], torch.Tensor], *, of: Which = "model"
    ) -> list[torch.Tensor]:
        """Return numbers of the rows of batches, summed over cp; 0 on ranks without the last stage.

        Args:
            batches: as many on each rank.
            each: (output, this rank's part of a batch) to numbers, (R,).
            of: whose weights compute.
        """
        model = self._second if of == "second" else self._model
        assert model is not None
        found: list[torch.Tensor] = []
        with _without_adapter(model) if of == "base" else nullcontext():
            each_output(
                model, batches, self._mesh, self._task.loss, self._task.forward,
                lambda output, local, _: found.append(each(output, local).double()),
            )  # fmt: skip
        if pipeline_of(model) is not None and not found:
            found = [torch.zeros(len(one["labels"]), dtype=torch.float64, device=self._mesh.device) for one in batches]
        cp = self._mesh["cp"]
        return found if cp.size == 1 else [all_reduce(one, cp) for one in found]

    @torch.no_grad()
    def second(self, call: Callable[[Any], Any]) -> Any:
        """Return call(second model), for a batch that was cut for this rank."""
        assert self._second is not None
        with sequence_in_use(self._second):
            return call(self._second)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Add up numbers over the ranks with different samples; equal on all ranks."""
        given = values.to(self._mesh.device, torch.float64)
        return all_reduce(given if self.is_counted else torch.zeros_like(given), counted_ranks(self._mesh))

    def along_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Add up numbers over cp, with gradients."""
        return sum_over(values, self._mesh["cp"])

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Return the JSON value that the first rank's `act` returns, on all ranks."""
        return on_first(self._mesh, act)


def _without_adapter(model: nn.Module) -> AbstractContextManager[None]:
    """A stage of a pipeline may have none of the adapted layers."""
    has_one = any(isinstance(module, AdaptedLinear) for module in model.modules())
    return without_adapter(model) if has_one else nullcontext()
