"""Users who keep their own loop: model(x), loss.backward(), optimizer.step(), optimizer.zero_grad().

After each backward that is not inside `microbatch`, gradients become means over the data ranks, whole on every rank:
what `.grad` would hold on one device whose batch is all ranks' batches, so clipping and looking at `.grad` are right.
Ranks may call backward a different number of times before a step: before ranks exchange anything they tell each other
where they are, and those that are at the step already take part with nothing new. Under reduce=bf16 what earlier
backward passes of a step left is rounded with the new: sums over several are exact to that format, not to fp32.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from weft.comm import all_reduce
from weft.errors import ModelError, PlanError, Problem
from weft.optim import clip_factor, global_norm
from weft.parallel.local_tensors import Precision
from weft.parallel.placement import Axes, AxisMap
from weft.parallel.private_torch import at_end_of_backward
from weft.parallel.zero.flat.buckets import Bucket, Slot
from weft.parallel.zero.flat.reducer import Reducer
from weft.parallel.zero.flat.slot_adoption import SlotAdoption
from weft.parallel.zero.watched_optimizers import WatchedEngine, find_optimizers, watch_steps
from weft.private_torch import foreach_mul_, graph_task

#: By how much, of itself, the factor that one number scaled gradients by may differ between ranks: rounding, no more.
_ALIKE = 1e-6


class LoopedEngine(WatchedEngine, Protocol):
    """What a user's own loop asks of the engine that holds its module in flat buckets."""

    axes: AxisMap
    device: torch.device
    precision: Precision
    reducer: Reducer

    def leave_step(self) -> None:
        """TrainStep drives no longer."""
        ...

    def show_gradients(self) -> None:
        """Let the optimizers' pieces, and parameters that are whole here, have the gradients."""
        ...


class OwnLoop:
    """The part of an engine that serves loops that it does not drive."""

    def __init__(self, engine: LoopedEngine):
        self._engine = weakref.ref(engine)
        self._backward: int | None = None  # the graph task whose end will reduce
        self._touched: set[int] = set()
        self._norm: torch.Tensor | None = None  # after backward, of the gradients that all ranks have alike
        find_optimizers(self._engine)

    def note(self, bucket: Bucket) -> None:
        """A gradient came into a bucket, outside of microbatches."""
        self._touched.add(bucket.index)
        task = graph_task()
        if self._backward != task:
            self._backward = task
            at_end_of_backward(self._end_backward)

    def even_out(self, slots: list[Slot], kinds: Mapping[Slot, Axes]) -> None:
        """Let each bucket's mean over its own ranks be the mean over all ranks that read samples."""
        engine = self._held()
        for slot in slots:
            factor = kinds[slot].over.size / engine.axes.batch.size
            if factor != 1.0:
                slot.param.register_hook(functools.partial(_scale_outside, self._engine, factor))

    def watch(self, adoption: SlotAdoption) -> None:
        """From here the optimizer's own step does what TrainStep would do around it."""
        engine = self._engine

        def before(optimizer: torch.optim.Optimizer) -> None:
            del optimizer
            if (found := engine()) is not None and not adoption.is_spent:
                found.reducer.arrive()
                if found.reducer.has_loose:
                    found.show_gradients()

        watch_steps(adoption.optimizer, engine, clear=lambda found: found.reducer.clear(adoption.slots), before=before)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale `.grad` of all parameters to a norm of at most max_norm; the norm before, of the whole gradient.

        A collective: ranks that are still in a backward are waited for.
        """
        self._wait_for_all()
        engine = self._held()
        square, grads = torch.zeros((), dtype=torch.float64, device=engine.device), []
        for bucket in engine.reducer.buckets:
            found = [slot.param.grad for slot in bucket.slots if slot.param.grad is not None]
            # Each rank that holds the same part adds its share of it.
            square += global_norm(found).to(square).square() / bucket.over.same.size
            grads += found
        norm = all_reduce(square, engine.axes.world).sqrt()
        if grads:
            foreach_mul_(grads, clip_factor(float(norm), max_norm))
        return norm

    @torch.no_grad()
    def settle(self) -> None:
        """At the optimizer's step: wait for ranks that are still in a backward, then have all gradients in buckets."""
        self._wait_for_all()
        self._check_alike()
        engine = self._held()
        for bucket in engine.reducer.buckets:
            bucket.shard = engine.reducer.take(bucket)[bucket.own]
        engine.reducer.forget()
        engine.reducer.send()
        engine.reducer.arrive()
        engine.show_gradients()

    def _wait_for_all(self) -> None:
        """Take part, with nothing new, in the backwards of ranks that are not at the step yet."""
        while self._held().axes.stage.size > 1 and self._meet(at_step=True):
            self._reduce_touched()
        self._touched = set()

    def _check_alike(self) -> None:
        """ModelError where ranks scaled a gradient that all have alike by what each of them knows alone.

        Compared is what each did to its own since backward: norms of equal gradients differ by how each rank added.
        """
        if self._norm is None:
            return
        factor = torch.where(self._norm > 0, self._norm_alike() / self._norm, 1.0)
        most, least = all_reduce(torch.stack([factor, -factor]), self._held().axes.stage, op="max").abs().tolist()
        self._norm = None
        if most - least > _ALIKE * most:
            raise ModelError(
                f"gradients: since backward, one rank scaled those that all ranks share by {least:.6g} and another by "
                f"{most:.6g}. torch.nn.utils.clip_grad_norm_ sees only this rank's part of what tp and ep divide. "
                f"Use run.clip_grad_norm_(model, max_norm)."
            )

    def _norm_alike(self) -> torch.Tensor:
        """Norm of the gradients that all ranks have alike, float64."""
        engine = self._held()
        whole = [slot for bucket in engine.reducer.buckets if bucket.over is engine.axes.plain for slot in bucket.slots]
        norm = global_norm([slot.param.grad for slot in whole if slot.param.grad is not None])
        return norm.to(engine.device, torch.float64)

    def _held(self) -> LoopedEngine:
        engine = self._engine()
        assert engine is not None
        return engine

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._backward = None
        engine = self._held()
        engine.leave_step()
        engine.precision.refuse_debts()
        if engine.axes.mesh.plan.graphs:
            rule = "a loop of your own launches kernels one by one"
            raise PlanError([Problem("graphs", f"graphs=on: {rule}. Use run.train_step, or graphs=off.")])
        engine.precision.refuse_unscaled("backward() came")
        if engine.axes.stage.size > 1:
            self._meet(at_step=False)
            self._reduce_touched()
        self._touched = set()

    def _meet(self, at_step: bool) -> bool:
        """Whether some rank is in a backward still; `_touched` becomes all ranks' buckets with new gradients."""
        engine = self._held()
        buckets = engine.reducer.buckets
        places = torch.zeros(1 + len(buckets), dtype=torch.int64, device=engine.device)
        places[0] = 0 if at_step else 1
        places[[1 + index for index in self._touched]] = 1
        found = all_reduce(places, engine.axes.stage, op="max").tolist()
        self._touched = {index for index, used in enumerate(found[1:]) if used}
        return bool(found[0])

    def _reduce_touched(self) -> None:
        """Means over the ranks. What was there before is equal on all of them, so its mean is itself."""
        engine = self._held()
        buckets = [engine.reducer.buckets[index] for index in sorted(self._touched)]
        flats = [engine.reducer.take(bucket) for bucket in buckets]
        pairs = list(zip(buckets, flats, strict=True))
        for pending in [engine.reducer.sums.over_all(bucket, flat) for bucket, flat in pairs]:
            pending.wait()
        if flats:
            foreach_mul_(flats, [1.0 / bucket.over.over.size for bucket in buckets])
        if any(placement.is_cut for placement in self._held().axes.placements.values()):
            self._norm = self._norm_alike()


def _scale_outside(engine: Callable[[], LoopedEngine | None], factor: float, grad: torch.Tensor) -> torch.Tensor | None:
    found = engine()
    return None if found is None or found.reducer.in_pass else grad * factor
