"""Forward and backward passes of a step's microbatches, and the model state that they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.data.random_state import preserve_generators, seed_generators
from weft.monitor.step_times import Meter
from weft.parallel.batch_norm.norm_groups import norm_groups_of
from weft.parallel.context.context import context_of, counts_loss
from weft.parallel.dropout.by_position import draws_nothing, drops_of
from weft.parallel.expert import ExpertBalance
from weft.parallel.local_means import train_mode
from weft.parallel.pipeline.runtime import CountedLoss, Inside, Pipeline, StepWork
from weft.parallel.random.streams import SampleNumbers
from weft.parallel.state.gradients import data_parallel
from weft.parallel.tensor.language_head import expect_labels
from weft.train.batches.microbatches import ForwardFn, call_model
from weft.train.losses import CheckedLoss, Features, GlobalBatchLoss, LossFn, is_own_code

# Model state that depends on the microbatches of a step.


class Statistics(Protocol):
    """Interface of statistics of a step that update model state without a gradient: router loads, batch norm moments.

    `begin` starts a step, `start` starts to sum over the ranks, and `finish` updates the model if `moved` (the step was
    applied).
    """

    def begin(self, scale: float | Tensor) -> None: ...

    def start(self) -> None: ...

    def finish(self, *, moved: bool | Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers of one step.

    Attributes:
        key: dropout key.
        seeds: a seed per microbatch, or None.
        seed_with: function that seeds the generators.
    """

    key: int
    seeds: Sequence[int] | None
    seed_with: Callable[[int], Any]

    def begin(self, index: int) -> None:
        """Seed the generators for a microbatch."""
        if self.seeds is not None:
            self.seed_with(self.seeds[index])


class ModelState:
    """Model state that depends on the microbatches: training mode, random numbers, batch norm groups and routers.

    Args:
        forward: forward(model, batch) -> output, or None.
        loss_fn: the loss function.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, forward: ForwardFn | None, loss_fn: LossFn):
        self._model, self._device = model, mesh.device
        is_known = is_own_code(loss_fn) and (forward is None or is_own_code(forward))
        self._drops = None if is_known and draws_nothing(model) else drops_of(model)
        self._norms, self.experts = norm_groups_of(model), ExpertBalance(model, mesh)
        known = (self.experts if self.experts.has_routers else None, self._norms)
        self._statistics: list[Statistics] = [one for one in known if one is not None]
        #: Puts the model into training mode.
        self.train = train_mode(model)

    def preserving(self, seeds: Sequence[int] | None) -> AbstractContextManager[None]:
        """Return a context that restores the generators at its end if `seeds` is None, else one that does nothing."""
        return preserve_generators(self._device) if seeds is None else nullcontext()

    def draws(self, samples: Sequence[SampleNumbers], seeds: Sequence[int] | None, key: int | None) -> Draws:
        """Begin the random numbers of a step, from the caller's seeds and dropout key, or from derived ones."""
        drops = self._drops
        if drops is None:
            return Draws(key or 0, seeds, torch.manual_seed)
        key, drops.places_noise = drops.next_key() if key is None else key, seeds is None
        if seeds is not None:
            # Seed only torch: other threads of the caller may use numpy's and Python's generators.
            return Draws(key, seeds, torch.manual_seed)
        return Draws(key, [drops.seed_at(key, one, self._model) for one in samples], seed_generators)

    def begin(self, scale: float | Tensor) -> None:
        """Begin the statistics of a step."""
        for one in self._statistics:
            one.begin(scale)

    def inside(self, samples: Sequence[SampleNumbers], key: int) -> Inside:
        """Return a function from a microbatch's index to the context manager in which its forward runs."""
        drops, norms = self._drops, self._norms

        @contextmanager
        def inside(index: int) -> Iterator[None]:
            with ExitStack() as stack:
                if drops is not None:
                    stack.enter_context(drops.microbatch(key, samples[index]))
                if norms is not None:
                    stack.enter_context(norms.microbatch(samples[index], index))
                if not samples[index].numbers:  # a placeholder
                    stack.enter_context(self.experts.leaving_out())
                yield

        return inside

    def start(self) -> None:
        """Start to sum the statistics over the ranks. All ranks call it."""
        for one in self._statistics:
            one.start()

    def finish(self, moved: bool | Tensor) -> None:
        """Update the model by its statistics. moved: True if the step was applied, 0-d if only the device has it."""
        for one in self._statistics:
            one.finish(moved=moved)


# Ways to run the microbatches.


@dataclass(frozen=True, slots=True)
class Work:
    """Inputs of a step's passes.

    `loss` and `inside` return the loss function and the context of a microbatch by its index. Sum and count of each
    microbatch's losses are stored in `losses`, and added to `sums`, (2,) float64. The loss is multiplied by `scale`
    before backward. With `may_replay`, a recorded graph may run instead of the model's code. `following` is the first
    microbatch of the next step, or None if it is unknown.
    """

    microbatches: Sequence[Any]
    samples: Sequence[SampleNumbers]
    loss: CountedLoss
    losses: dict[int, tuple[Tensor, Tensor | int]]
    scale: float | Tensor
    sums: Tensor
    draws: Draws
    inside: Inside
    may_replay: bool = True
    following: Any = None


class Accumulate:
    """Runs forward and backward of one microbatch after another, and accumulates gradients.

    Args:
        forward: forward(model, batch) -> output; None selects the inputs from the batch.
        meter: times forward and backward.
    """

    def __init__(self, model: nn.Module, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter):
        self.model, self.forward, self.loss, self.meter = model, forward or call_model, loss, meter
        self.engine, self._context = data_parallel(model), context_of(model)
        self._counts_loss = counts_loss(model)

    def run(self, work: Work) -> None:
        """Run all microbatches."""
        for index in range(len(work.microbatches)):
            work.draws.begin(index)
            self.run_one(work, index)

    def run_one(self, work: Work, index: int) -> None:
        """Run one microbatch, after the generators have been seeded."""
        last = index == len(work.microbatches) - 1
        following = work.following if last else work.microbatches[index + 1]
        with self.engine.microbatch(last), self.sharded_sequences(), work.inside(index):
            microbatch = self.shard(work.microbatches[index])
            with self.meter.phase("forward"):
                output = self.with_labels(self.model, microbatch)
                loss_sum, num_tokens = work.loss(output, microbatch, index)
                del output  # logits are large, and backward does not need them
                if not self._counts_loss:  # the first cp rank counts the same loss
                    loss_sum, num_tokens = loss_sum * 0, num_tokens * 0
                work.sums[0] += loss_sum.detach()
                work.sums[1] += num_tokens
                self.engine.prefetch(microbatch, following)
            with self.meter.phase("backward"):
                (loss_sum * work.scale).backward()

    def with_labels(self, model: nn.Module, microbatch: Any) -> Any:
        """Run forward such that the head may use the labels and return the loss instead of logits."""
        with expect_labels(model, self.loss.loss_fn, microbatch):
            return self.forward(model, microbatch)

    def shard(self, microbatch: Any) -> Any:
        """Return this rank's tokens of a microbatch, if sequences are sharded."""
        return microbatch if self._context is None else self._context.shard(microbatch)

    def sharded_sequences(self) -> AbstractContextManager[None]:
        """Return the context in which the model accepts the result of `shard`."""
        return nullcontext() if self._context is None else self._context.use()


class AccumulateCompared(Accumulate):
    """Like `Accumulate`, for a loss that compares all samples of the global batch. A first pass computes features."""

    def __init__(
        self, model: nn.Module, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, *,
        mesh: Mesh, compared: GlobalBatchLoss, state: ModelState,
    ):  # fmt: skip
        super().__init__(model, forward, loss, meter)
        self._mesh, self._compared, self._state = mesh, compared, state

    def run(self, work: Work) -> None:
        """Run all microbatches. If there are several, first run forward of each without gradients."""

        def features(index: int) -> Features:
            work.draws.begin(index)
            with work.inside(index), self._state.experts.leaving_out(), self.meter.phase("forward"):
                return self.forward(self.model, work.microbatches[index])

        counts = [not one.is_empty for one in work.samples]
        super().run(replace(work, loss=self._compared.compared(self._mesh, counts, features)))


class Pipelined(Accumulate):
    """Runs all microbatches by the pipeline's schedule."""

    def __init__(
        self, model: nn.Module, forward: ForwardFn | None, loss: CheckedLoss, meter: Meter, pipeline: Pipeline
    ):
        super().__init__(model, forward, loss, meter)
        self._pipeline = pipeline

    def run(self, work: Work) -> None:
        """Run this rank's pipeline stages. All ranks of pp must call it."""
        parts = [self.shard(microbatch) for microbatch in work.microbatches]
        stages = StepWork(
            parts, self.forward, self.with_labels, work.loss, work.scale, work.sums, work.draws.seeds, work.inside
        )
        # All microbatches count as one for the engine: their gradients are one sum, whatever the order of the schedule.
        with self.engine.microbatch(last=True), self.sharded_sequences():
            self._pipeline.step(stages, self.meter)
