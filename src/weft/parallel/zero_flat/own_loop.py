"""Users' own training loops, and updates of masters after parameters were written, such as by `load_state_dict`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.errors import ModelError, PlanError, Problem
from weft.optim.step_decision import clip_factor, global_norm
from weft.parallel.private_torch import at_end_of_backward
from weft.parallel.state.placement import Axes, AxisMap
from weft.parallel.state.precision import Precision
from weft.parallel.zero.adopt import WatchedEngine, find_optimizers, watch_steps
from weft.parallel.zero.engine import Phase
from weft.parallel.zero_flat.buckets import Bucket, Slot
from weft.parallel.zero_flat.optimizer_states import SlotAdoption
from weft.parallel.zero_flat.reducer import Reducer
from weft.private_torch import foreach_mul_, graph_task, version_of


def update_written(slots: Sequence[Slot], wait: Callable[[], None]) -> None:
    """Update the master of each parameter that was written to. wait: waits for pending weights.

    Raises:
        ModelError: for a parameter that was moved, frozen or cast after `parallelize`.
    """
    for slot in slots:
        param = slot.param
        if param.data_ptr() != slot.address or not param.requires_grad:
            what = "moved to other memory or another format" if param.requires_grad else "frozen"
            raise ModelError(f"parameter {slot.name!r}: it was {what} after parallelize. Do that before parallelize.")
        if version_of(param) != slot.version:
            wait()
            take_master(slot, param.detach())


def take_master(slot: Slot, whole: torch.Tensor) -> None:
    """Update this rank's part of the master after a parameter was written. whole: full values that were written."""
    slot.version = version_of(slot.param)
    bucket = slot.bucket
    assert bucket is not None
    piece = slot.view_in(bucket.master, bucket.own)
    if bucket.is_mixed and piece is not None:
        if bucket.host is not None:
            bucket.host.wait()
        with torch.no_grad():
            piece.copy_(slot.elements_in(whole.detach().to(device=piece.device, dtype=piece.dtype), bucket.own))


class LoadHooks:
    """Hooks that update masters from the unrounded tensors of `load_state_dict` of a full module.

    The module stores the hooks. The hooks of a module's copy do nothing.

    Args:
        slots: parameters of the module.
        wait: waits for pending weights.
    """

    def __init__(self, slots: Sequence[Slot] = (), wait: Callable[[], None] | None = None):
        self._slots, self._wait = slots, wait
        self._loaded: Mapping[str, Any] = {}

    def before(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Keep the state that is about to be loaded."""
        del module, rest
        self._loaded = {name.removeprefix(prefix): tensor for name, tensor in state.items()}

    def after(self, module: nn.Module, incompatible: Any) -> None:
        """Pass the loaded state to the masters."""
        del module, incompatible
        loaded, self._loaded = self._loaded, {}
        if self._wait is not None:
            self._wait()
        for slot in self._slots:
            tensor = loaded.get(slot.name)
            if tensor is not None and tensor.shape == slot.shape:
                take_master(slot, tensor)

    def __reduce__(self) -> tuple[type[LoadHooks], tuple[()]]:
        return LoadHooks, ()


# Users' own loops: model(x), loss.backward(), optimizer.step(), optimizer.zero_grad().

#: Most relative difference between ranks of the factor that scaled replicated gradients: rounding only.
_ALIKE = 1e-6


class LoopedEngine(WatchedEngine, Protocol):
    """Flat-bucket engine interface that a user's own loop needs."""

    axes: AxisMap
    device: torch.device
    precision: Precision
    reducer: Reducer

    def show_gradients(self) -> None:
        """Set `.grad` of the optimizers' slices, and of parameters that are unsharded here."""
        ...


class OwnLoop:
    """Support of an engine for loops that TrainStep does not drive."""

    def __init__(self, engine: LoopedEngine):
        self._engine = weakref.ref(engine)
        self._backward: int | None = None  # the graph task whose end will reduce
        self._touched: set[int] = set()
        self._norm: torch.Tensor | None = None  # after backward, norm of the replicated gradients
        find_optimizers(self._engine)

    def note(self, bucket: Bucket) -> None:
        """Record a bucket that got a gradient outside of microbatches."""
        self._touched.add(bucket.index)
        task = graph_task()
        if self._backward != task:
            self._backward = task
            at_end_of_backward(self._end_backward)

    def even_out(self, slots: list[Slot], kinds: Mapping[Slot, Axes]) -> None:
        """Scale gradients so that a bucket's mean over its ranks equals the mean over all ranks that read samples."""
        engine = self._require_engine()
        for slot in slots:
            factor = kinds[slot].over.size / engine.axes.batch.size
            if factor != 1.0:
                slot.param.register_hook(functools.partial(_scale_outside, self._engine, factor))

    def watch(self, adoption: SlotAdoption) -> None:
        """Register the hooks that do TrainStep's work around the optimizer's step."""
        engine = self._engine

        def before(optimizer: torch.optim.Optimizer) -> None:
            del optimizer
            if (found := engine()) is not None and not adoption.is_spent:
                found.reducer.wait_for_sums()
                if found.reducer.has_unbucketed:
                    found.show_gradients()

        watch_steps(adoption.optimizer, engine, clear=lambda found: found.reducer.clear(adoption.slots), before=before)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale `.grad` of all parameters to a norm of at most max_norm. Return the full gradient's earlier norm.

        A collective: waits for ranks that are still in a backward.
        """
        self._wait_for_all()
        engine = self._require_engine()
        square, grads = torch.zeros((), dtype=torch.float64, device=engine.device), []
        for bucket in engine.reducer.buckets:
            found = [slot.param.grad for slot in bucket.slots if slot.param.grad is not None]
            # Each rank that holds the same part adds its share.
            square += global_norm(found).to(square).square() / bucket.over.same.size
            grads += found
        norm = all_reduce(square, engine.axes.world).sqrt()
        if grads:
            foreach_mul_(grads, clip_factor(float(norm), max_norm))
        return norm

    @torch.no_grad()
    def finalize(self) -> None:
        """Wait for ranks that are still in a backward, then collect all gradients, at the optimizer's step."""
        engine = self._require_engine()
        engine.reducer.phase = Phase.OWN_UPDATE
        self._wait_for_all()
        self._check_identical()
        for bucket in engine.reducer.buckets:
            bucket.shard = engine.reducer.take(bucket)[bucket.own]
        engine.reducer.forget()
        engine.reducer.send()
        engine.reducer.wait_for_sums()
        engine.show_gradients()

    def _wait_for_all(self) -> None:
        """Join the backward reductions of ranks that are not at the step yet, without new gradients."""
        while self._require_engine().axes.stage.size > 1 and self._sync(at_step=True):
            self._reduce_touched()
        self._touched = set()

    def _check_identical(self) -> None:
        """Raise ModelError if ranks scaled a replicated gradient by different factors.

        Each rank compares its gradients with its own after backward: norms of equal gradients differ by the order of
        addition.
        """
        if self._norm is None:
            return
        factor = torch.where(self._norm > 0, self._replicated_norm() / self._norm, 1.0)
        most, least = (
            all_reduce(torch.stack([factor, -factor]), self._require_engine().axes.stage, op="max").abs().tolist()
        )
        self._norm = None
        if most - least > _ALIKE * most:
            raise ModelError(
                f"gradients: since backward, one rank scaled those that all ranks share by {least:.6g} and another "
                f"by {most:.6g}. torch.nn.utils.clip_grad_norm_ computes only the norm of this rank's shards under "
                "tp and ep. Use run.clip_grad_norm_(model, max_norm)."
            )

    def _replicated_norm(self) -> torch.Tensor:
        """Return the norm of the gradients that are equal on all ranks, float64."""
        engine = self._require_engine()
        whole = [slot for bucket in engine.reducer.buckets if bucket.over is engine.axes.plain for slot in bucket.slots]
        norm = global_norm([slot.param.grad for slot in whole if slot.param.grad is not None])
        return norm.to(engine.device, torch.float64)

    def _require_engine(self) -> LoopedEngine:
        engine = self._engine()
        assert engine is not None
        return engine

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._backward = None
        engine = self._require_engine()
        engine.reducer.phase = Phase.OWN_BACKWARD
        engine.precision.refuse_error_feedback()
        if engine.axes.mesh.plan.graphs:
            rule = "a loop of your own launches kernels one by one"
            raise PlanError([Problem("graphs", f"graphs=on: {rule}. Use run.train_step, or graphs=off.")])
        engine.precision.refuse_unscaled("backward() came")
        if engine.axes.stage.size > 1:
            self._sync(at_step=False)
            self._reduce_touched()
        self._touched = set()

    def _sync(self, at_step: bool) -> bool:
        """Return True if a rank is still in a backward. `_touched` becomes all ranks' buckets with new gradients."""
        engine = self._require_engine()
        buckets = engine.reducer.buckets
        places = torch.zeros(1 + len(buckets), dtype=torch.int64, device=engine.device)
        places[0] = 0 if at_step else 1
        places[[1 + index for index in self._touched]] = 1
        found = all_reduce(places, engine.axes.stage, op="max").tolist()
        self._touched = {index for index, used in enumerate(found[1:]) if used}
        return bool(found[0])

    def _reduce_touched(self) -> None:
        """Average the touched buckets over the ranks.

        Earlier gradients are equal on all ranks, so their mean is unchanged.
        """
        engine = self._require_engine()
        buckets = [engine.reducer.buckets[index] for index in sorted(self._touched)]
        flats = [engine.reducer.take(bucket) for bucket in buckets]
        pairs = list(zip(buckets, flats, strict=True))
        for pending in [engine.reducer.sums.over_all(bucket, flat) for bucket, flat in pairs]:
            pending.wait()
        if flats:
            foreach_mul_(flats, [1.0 / bucket.over.over.size for bucket in buckets])
        if any(placement.is_sharded for placement in self._require_engine().axes.placements.values()):
            self._norm = self._replicated_norm()


def _scale_outside(engine: Callable[[], LoopedEngine | None], factor: float, grad: torch.Tensor) -> torch.Tensor | None:
    found = engine()
    return None if found is None or found.reducer.phase.in_pass else grad * factor
