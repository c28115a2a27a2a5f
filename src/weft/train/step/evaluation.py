"""Evaluation: the loss and the metrics over a fixed set of samples, equal under every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from weft.comm.autograd import sum_over
from weft.comm.collectives import all_reduce, barrier
from weft.comm.mesh import Axis, Mesh
from weft.config.plan import Plan
from weft.data.random_state import preserve_generators, seed_generators
from weft.models.adapters import AdaptedLinear, without_adapter
from weft.models.adapters_experts import AdaptedExperts
from weft.models.token_rows import TrainedRows
from weft.parallel.context.context import (
    counts_loss,
    local_batch,
    sequence_in_use,
    takes_full_samples,
)
from weft.parallel.dropout.drop_state import marked_samples
from weft.parallel.pipeline.runtime import pipeline_of
from weft.parallel.random.streams import key_of
from weft.parallel.replicas.local_sgd import anchored
from weft.parallel.state.gradients import data_parallel
from weft.parallel.tensor.language_head import expect_labels
from weft.private_torch import tree_map
from weft.train.batches.microbatches import ForwardFn, Microbatches
from weft.train.engine import Evaluation
from weft.train.losses import GatheredFeatures, GlobalBatchLoss, LossFn, in_float32, needs_float32
from weft.train.states.state_io import on_first
from weft.train.tasks.base import Task
from weft.train.tasks.description import Which


def evaluate(model: nn.Module, batches: Iterable[Any], mesh: Mesh, task: Task) -> Evaluation:
    """Compute loss and metrics of this rank's batches, summed over the data-parallel ranks. All ranks must call it.

    Args:
        batches: this rank's batches; every rank has the same number.
    """
    totals = torch.zeros(2 + len(task.sum_names), dtype=torch.float64, device=mesh.device)

    widens = needs_float32(task.loss, mesh.plan)

    def add(output: Any, local: Any, counts: bool) -> None:
        output = in_float32(output) if widens else output
        # Measure placeholder batches too: measuring may run the model, whose weights other ranks gather at the same
        # time.
        found = list(task.loss(output, local))
        if task.sum_names:
            sums = task.sums(output, local)
            found += [sums[name] for name in task.sum_names]
        if counts:
            for place, one in enumerate(found):
                totals[place] += one

    if isinstance(task.loss, GlobalBatchLoss):
        _compare_all(model, batches, mesh, task, totals)
    else:
        each_output(model, batches, mesh, task.loss, task.forward, add)
    loss_sum, count, *sums = all_reduce(totals, counted_ranks(mesh)).tolist()
    named = {"loss": loss_sum, "count": count, **dict(zip(task.sum_names, sums, strict=True))}
    return Evaluation(loss_sum / max(count, 1.0), round(count), dict(task.measure(named)))


def evaluate_run(model: nn.Module, batches: Iterable[Any], mesh: Mesh, task: Task) -> Evaluation:
    """Compute loss and metrics of the last synchronized weights, on batches that the task prepares as in training.

    Args:
        model: result of `parallelize`.
        batches: the task's evaluation batches of this rank.
        mesh: the ranks.
        task: the task.
    """
    if type(task).before_step is not Task.before_step:
        every, num = list(batches), mesh.plan.microbatches_per_step
        batches = [one for first in range(0, len(every), num) for one in task.before_step(every[first : first + num])]
    with anchored(model):
        return evaluate(model, batches, mesh, task)


@torch.no_grad()
def _compare_all(model: nn.Module, batches: Iterable[Any], mesh: Mesh, task: Task, totals: torch.Tensor) -> None:
    loss: Any = task.loss
    every, parts = GatheredFeatures(mesh.data), list[GatheredFeatures]()
    per_batch = mesh.plan.microbatches_per_step

    def add(output: Any, local: Any, counts: bool) -> None:
        del local
        if not parts or parts[-1].num_added == per_batch:
            parts.append(GatheredFeatures(mesh.data))
        parts[-1].add(output, counts=counts)
        every.take(parts[-1])

    each_output(model, batches, mesh, loss, task.forward, add)
    for part in parts:
        loss_sum, count = part.compared(loss.compare)
        totals[0] += loss_sum
        totals[1] += count
    if parts and loss.score is not None:
        found = every.compared(loss.score)
        for place, name in enumerate(task.sum_names, 2):
            totals[place] += found[name]


def mean_loss(
    model: nn.Module, batches: Iterable[Any], mesh: Mesh, loss_fn: LossFn, forward: ForwardFn, seed: int = 0
) -> tuple[float, int]:
    """Compute the mean loss of all data-parallel ranks' batches, and the number of tokens or samples in the mean.

    All ranks must call it and get the same result. A model that uses random numbers gets the same ones in every
    evaluation.

    Args:
        model: result of `parallelize`.
        batches: plain batches or `Microbatches`, the same number on each rank.
        mesh: the ranks.
        loss_fn: as in `TrainStep`.
        forward: as in `TrainStep`.
        seed: seed of torch's generators, which are restored afterwards.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    widens = needs_float32(loss_fn, mesh.plan)
    cp_rank = 0 if takes_full_samples(model) else mesh["cp"].rank

    def one_by_one() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            for index, part in enumerate(batch.marked() if isinstance(batch, Microbatches) else [batch]):
                found = marked_samples(part)
                samples = (mesh.data.rank, index) if found is None else (min(found.numbers, default=-1),)
                seed_generators(key_of("evaluate", seed, number, *samples, cp_rank))
                yield part

    def add(output: Any, local: Any, counts: bool) -> None:
        if counts:
            loss_sum, number = loss_fn(in_float32(output) if widens else output, local)
            totals[0] += loss_sum
            totals[1] += number

    with preserve_generators(mesh.device):
        each_output(model, one_by_one(), mesh, loss_fn, forward, add)
    loss_sum, number = all_reduce(totals, counted_ranks(mesh)).tolist()
    return loss_sum / max(number, 1.0), round(number)


@torch.no_grad()
def each_output(
    model: nn.Module,
    batches: Iterable[Any],
    mesh: Mesh,
    loss_fn: LossFn,
    forward: ForwardFn,
    add: Callable[[Any, Any, bool], None],
) -> None:
    """Run forward on each batch in evaluation mode, and call `add` on the output; in a pipeline on the last stage only.

    `add` receives the output, the batch, and a flag. It is False for a placeholder without samples, and if another cp
    rank counts the same samples.
    """
    is_counted = counts_loss(model)
    counts = True  # of the current batch

    def forward_to_loss(model: nn.Module, local: Any) -> Any:
        with expect_labels(model, loss_fn, local):
            return forward(model, local)

    def on_device(batch: Any) -> Any:
        nonlocal counts
        samples = marked_samples(batch)
        counts = is_counted and (samples is None or not samples.is_empty)
        moved = tree_map(lambda one: one.to(mesh.device) if isinstance(one, torch.Tensor) else one, batch)
        return local_batch(model, moved)

    data_parallel(model).wait_for_weights()
    was_training = model.training
    model.eval()
    pipeline = pipeline_of(model)
    try:
        with sequence_in_use(model):
            if pipeline is not None:
                pipeline.evaluate(
                    map(on_device, batches), forward_to_loss, lambda output, local: add(output, local, counts)
                )
            else:
                for local in map(on_device, batches):
                    add(forward_to_loss(model, local), local, counts)
    finally:
        model.train(was_training)


def counted_ranks(mesh: Mesh) -> Axis:
    """Return the axis over which evaluation sums are added.

    In a pipeline only the last stage has sums, and all stages need the result.
    """
    return mesh.batch if mesh.plan.pp == 1 else mesh["pp", "dp_replicate", "dp_shard", "cp"]


# Forwards that a task runs outside the training step: without gradients, in evaluation mode, under any plan.


class RankForwards:
    """One rank's implementation of `weft.train.tasks.description.Forwards`.

    Args:
        model: result of `parallelize`.
        mesh: the ranks.
        task: defines forward and loss.
        second: a frozen model under the same plan, or None.
        record: writes an event on the first rank.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        task: Task,
        second: nn.Module | None = None,
        record: Callable[[Mapping[str, object]], None] = lambda event: None,
    ):
        self._model, self._mesh, self._task, self._second, self.record = model, mesh, task, second, record
        if second is not None:
            second.eval()

    @property
    def model(self) -> nn.Module:
        """Return the sharded model."""
        return self._model

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the ranks."""
        return self._mesh

    @property
    def plan(self) -> Plan:
        """Return the plan that the model is sharded by."""
        return self._mesh.plan

    @property
    def device(self) -> torch.device:
        """Return this rank's device."""
        return self._mesh.device

    @property
    def rank(self) -> int:
        """Return this rank's global rank."""
        return self._mesh.rank

    @property
    def size(self) -> int:
        """Return the world size."""
        return self._mesh.world_size

    def wait(self) -> None:
        """Wait for all ranks."""
        barrier(self._mesh.world)

    @property
    def is_counted(self) -> bool:
        """True if this rank's losses are summed. Of the cp ranks of a sequence, only the first one's are."""
        return self._mesh["cp"].rank == 0

    @property
    def data_rank(self) -> int:
        """Return this rank's index among the ranks that read different samples."""
        return self._mesh.data.rank

    @property
    def data_size(self) -> int:
        """Return the number of ranks that read different samples."""
        return self._mesh.data.size

    def rows(
        self, batches: Sequence[Any], each: Callable[[Any, Any], torch.Tensor], *, of: Which = "model"
    ) -> list[torch.Tensor]:
        """Run forward on each batch, and return `each(output, batch)` for each, summed over cp.

        Returns zeros on ranks without the last pipeline stage.

        Args:
            batches: the same number on each rank.
            each: (output, this rank's part of a batch) -> values, (R,).
            of: which weights to use: "model", "second" or "base".
        """
        model = self._second if of == "second" else self._model
        assert model is not None
        found: list[torch.Tensor] = []
        # A pipeline stage may have no adapted layers.
        has_adapter = of == "base" and any(
            isinstance(module, AdaptedLinear | AdaptedExperts | TrainedRows) for module in model.modules()
        )
        with without_adapter(model) if has_adapter else nullcontext():
            each_output(
                model, batches, self._mesh, self._task.loss, self._task.forward,
                lambda output, local, _: found.append(each(output, local).double()),
            )  # fmt: skip
        if pipeline_of(model) is not None and not found:
            found = [torch.zeros(len(one["labels"]), dtype=torch.float64, device=self._mesh.device) for one in batches]
        cp = self._mesh["cp"]
        return found if cp.size == 1 or takes_full_samples(model) else [all_reduce(one, cp) for one in found]

    @torch.no_grad()
    def second(self, call: Callable[[Any], Any]) -> Any:
        """Return call(second model), without gradients. Batches in the call must already be sharded for this rank."""
        assert self._second is not None
        with sequence_in_use(self._second):
            return call(self._second)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over the ranks with different samples. The result is equal on all ranks.

        Of the cp ranks of a sequence, only the values of the first one are added.
        """
        given = values.to(self._mesh.device, torch.float64)
        return all_reduce(given if self.is_counted else torch.zeros_like(given), counted_ranks(self._mesh))

    def along_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over cp, with gradients. If every rank has full samples, the values are sums already."""
        return values if takes_full_samples(self._model) else sum_over(values, self._mesh["cp"])

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Run `act` on the first rank, and return its JSON value on all ranks."""
        return on_first(self._mesh, act)
