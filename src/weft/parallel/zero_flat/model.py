"""Engine of zero=0, 1 and 2: weights and gradients in flat buckets."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.config import partitioning as shares
from weft.devices import access
from weft.errors import ModelError, PlanError, Problem
from weft.memory.offload import Host
from weft.optim.step_decision import StepDecision, clip_factor, global_norm
from weft.parallel.private_torch import at_end_of_backward
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.forward_writes import ForwardWrites
from weft.parallel.state.placement import Placement
from weft.parallel.zero.engine import Phase, ZeroEngine, find_optimizers, step_by_decision, watch_steps
from weft.parallel.zero_flat.buckets import Bucket
from weft.parallel.zero_flat.optimizer_states import SlotAdoption, SlotErrorFeedback
from weft.parallel.zero_flat.parameters import FlatParameters, LoadHooks
from weft.parallel.zero_flat.prefetch import WeightPrefetcher
from weft.parallel.zero_flat.reducer import Reducer
from weft.parallel.zero_flat.step import FlatOptimizers, FlatStep, RecordedPasses
from weft.private_torch import foreach_mul_, graph_task

#: Maximum relative difference between ranks of the factor by which gradients were scaled. It allows only rounding.
_SAME_FACTOR = 1e-6


class FlatModel(ZeroEngine):
    """The engine of zero=0, 1 and 2, alone or over replicas (HSDP), for any module.

    Args:
        model, mesh, placements, host, seed, filled_later: as in `build_engine`, with the same errors.
        each_microbatch: True if stage 2 reduces after each microbatch: less memory without full gradients, more
            communication.
        bucket_bytes: bytes of master weights in a bucket, or None for `usual_bucket_bytes`.
    """

    reducer: Reducer

    @staticmethod
    def usual_bucket_bytes(device: str) -> int:
        """Return the default size of a bucket in bytes of master weights. Tests replace it."""
        return shares.bucket_bytes(device)

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        placements: Mapping[str, Placement] | None = None,
        *,
        host: Host | None = None,
        seed: int | None = None,
        filled_later: bool = False,
        each_microbatch: bool = False,
        bucket_bytes: int | None = None,
    ):
        super().__init__(mesh, placements, sharded=mesh.plan.zero > 0)
        materialise = self._materialise(model, seed, filled_later)
        kind = "cpu" if access.mixes_with_cpus(mesh.device) else mesh.device.type
        size = bucket_bytes or self.usual_bucket_bytes(kind)
        self._parameters = FlatParameters(model, self.axes, self.precision, materialise, host, size)
        self.updates_on_host = bool(self._parameters.on_host)
        slots = self._parameters.slots
        self.own_loop = OwnLoop(self)
        stage = mesh.plan.zero if self._parameters.is_sharded else 0
        wires = self.precision.wire, self.precision.outer_wire, each_microbatch and stage == 2
        self.reducer = Reducer(slots, self.axes, stage, mesh.device, self.own_loop.note, *wires)
        self.recorded = RecordedPasses(slots, self.reducer)
        self._error_feedback = self.reducer.error_feedback = SlotErrorFeedback(self.reducer.sums, self.axes)
        # The factor turns a bucket's mean over its ranks into the mean over all ranks that read samples.
        for slot in slots:
            factor = self._parameters.kinds[slot].over.size / self.axes.batch.size
            if factor != 1.0:
                slot.param.register_hook(functools.partial(_scale_outside, weakref.ref(self), factor))
        self._parameters.lay_out(lambda slot: materialise.value_of(slot.param), settle=True)
        self._use_layout()
        self._optimizers = FlatOptimizers(self.axes, self.device)
        self._prefetcher = WeightPrefetcher(model, slots)
        if self.precision.is_mixed or self.updates_on_host:
            hooks = LoadHooks(slots, self.wait_for_weights)
            model.register_load_state_dict_pre_hook(hooks.before)
            model.register_load_state_dict_post_hook(hooks.after)
            if mesh.plan.pp == 1:  # torch calls no hooks after the forward of a stage
                apart = {slot.name: slot.param for slot in slots if slot.bucket.is_mixed}
                why = "offload=optimizer" if self.updates_on_host else f"precision={mesh.plan.precision}"
                ForwardWrites(model, apart, why)

    def begin_step(self) -> None:
        self.check_parameters()
        self.reducer.begin_step()

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self._prefetcher.wait() if self.reducer.holds else self._prefetcher.wait_for_rest()
        try:
            with self.reducer.microbatch(last):
                yield
        finally:
            self.wait_for_weights()

    def finish(self, totals: torch.Tensor | None = None) -> None:
        self.reducer.finish(totals)
        if not self.reducer.has_unbucketed:  # else `scale` sets `.grad`, if the optimizer needs it
            self.show_gradients()

    def check(self) -> None:
        self.reducer.check()

    def scale(self, factor: float) -> None:
        self.reducer.scale(factor)
        if self.reducer.phase is Phase.REDUCED:
            self.show_gradients()

    def show_gradients(self) -> None:
        """Set `.grad` of the optimizers' shards, and of parameters that are unsharded on this rank."""
        if self.reducer.phase is Phase.REDUCED:
            self.reducer.phase = Phase.READY
        for bucket in self.reducer.buckets:
            bucket.collect()
            if bucket.num_shards == 1:
                for slot in bucket.slots:
                    slot.param.grad = slot.grad
        self._optimizers.show_gradients()

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.updates_on_host or self.coders.needs_host:
            return False
        return self._step_of(optimizer).accepts_decision

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        step = self._step_of(optimizer)
        self.wait_for_weights()
        reducer = self.reducer
        if isinstance(factor, StepDecision):
            self.coders.taken = factor.is_taken
        if step.applies():
            if isinstance(factor, StepDecision):
                reducer.factor = factor.factor
            else:
                reducer.wait_for_sums()
                reducer.factor = factor = float(reducer.factor) * factor
            self._begin_update()
            self._update_buckets(step, factor)
        elif isinstance(factor, StepDecision):
            self.scale(1.0)  # sets `.grad`
            self._begin_update()
            step_by_decision(optimizer, factor)
        else:
            self.scale(factor)
            self._begin_update()
            optimizer.step()

    def _update_buckets(self, step: FlatStep, factor: float | StepDecision) -> None:
        """Step bucket by bucket. With prefetch, the all-gather of a stepped bucket overlaps with the next steps."""
        buckets, own, overlaps = self.reducer.buckets, set(step.adoption.slots), self._prefetcher.is_watched
        update = step.taking(factor, self.recorded.recorder)
        for bucket in reversed(buckets) if overlaps else buckets:
            update(bucket)
            if overlaps and own.issuperset(bucket.slots):
                self._prefetcher.start(bucket, is_update=True)
        step.taken(factor)
        with step.adoption.spent():
            step.adoption.optimizer.step()

    def finalize(self) -> None:
        self.check_parameters()
        self.own_loop.finalize()

    def clip_own(self, max_norm: float) -> torch.Tensor:
        return self.own_loop.clip(max_norm)

    @torch.no_grad()
    def publish(self, clip: float = 1.0, follow: bool = False) -> None:
        self._prefetcher.start_rest(self.reducer.buckets, follow, is_update=self.reducer.phase.is_update)
        self._parameters.untrained.broadcast()
        self._optimizers.drop_hosted_gradients()
        self.coders.commit(clip)
        self.leave_step()

    def prefetch_weights(self) -> None:
        self._prefetcher.watch()

    def wait_for_weights(self) -> None:
        self._prefetcher.wait()

    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._optimizers.steps

    def owns_some(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(param) in self._parameters.ids for group in optimizer.param_groups for param in group["params"])

    def _put_shards(self, optimizer: torch.optim.Optimizer) -> None:
        adoption = SlotAdoption(optimizer, self._parameters.slots)
        names = adoption.needs_full()
        buckets = [slot.bucket for slot in self._parameters.slots if slot.name in names]
        if any(not bucket.whole and bucket.num_shards > 1 for bucket in buckets):
            self.wait_for_weights()
            states = self._optimizers.full_states(self.reducer.buckets)
            self.coders.forget()
            self._parameters.unshard(names)
            self._use_layout()
            self._optimizers.move(states)
        self._optimizers.add(adoption)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        self.own_loop.watch(self._optimizers.steps[optimizer].adoption)

    def _use_layout(self) -> None:
        self.reducer.buckets = self._error_feedback.buckets = self._parameters.buckets

    def _step_of(self, optimizer: torch.optim.Optimizer) -> FlatStep:
        self.adopt(optimizer)
        return self._optimizers.settled(optimizer)

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.wait_for_weights()
        return self._parameters.full()

    def _full_frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.axes.rest(self._parameters.untrained.tensors())

    def _full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.reducer.full_gradients()

    def local_weights(self) -> dict[str, torch.Tensor]:
        self._wait_for_masters()
        return {slot.name: shard for slot, shard in self._parameters.local()}

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        self._wait_for_masters()
        return self._parameters.counted()

    def _wait_for_masters(self) -> None:
        self.wait_for_weights()
        self.reducer.wait_for_sums()

    def local_gradients(self) -> list[torch.Tensor]:
        return self.reducer.gradient_tensors()

    def model_slices(self) -> Iterator[FlatSlice]:
        self._wait_for_masters()
        yield from self._parameters.slices()

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        return self._parameters.placed.states(self._step_of(optimizer).adoption)

    def load_weights(self, source: StateSource) -> None:
        super().load_weights(source)
        self.publish()

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        self._parameters.placed.take_states(self._step_of(optimizer).adoption, source)

    def check_parameters(self) -> None:
        """Update the master weight of each parameter that was written to.

        Raises ModelError for a parameter that was moved, frozen, unfrozen or cast after `parallelize`.
        """
        self._parameters.check(self.wait_for_weights)


class OwnLoop:
    """Support for training loops without TrainStep: model(x), loss.backward(), optimizer.step()."""

    def __init__(self, engine: FlatModel):
        self._engine = weakref.ref(engine)
        self._backward: int | None = None  # the graph task whose end will reduce
        self._touched: set[int] = set()
        self._norm: torch.Tensor | None = None  # after backward, norm of the replicated gradients
        find_optimizers(self._engine)

    def note(self, bucket: Bucket) -> None:
        """Record that a bucket got a gradient outside microbatches. It is reduced at the end of this backward."""
        self._touched.add(bucket.index)
        task = graph_task()
        if self._backward != task:
            self._backward = task
            at_end_of_backward(self._end_backward)

    def watch(self, adoption: SlotAdoption) -> None:
        """Register the hooks that do TrainStep's work before and after the optimizer's step."""
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
        """Scale `.grad` of all parameters to a norm of at most max_norm. Return the norm of the full gradient before.

        Collective: waits for ranks that are still in a backward.
        """
        self._wait_for_all()
        engine = self._require_engine()
        square, grads = torch.zeros((), dtype=torch.float64, device=engine.device), []
        for bucket in engine.reducer.buckets:
            found = [slot.param.grad for slot in bucket.slots if slot.param.grad is not None]
            # Each rank that holds the same part adds an equal fraction of its squared norm.
            square += global_norm(found).to(square).square() / bucket.over.same.size
            grads += found
        norm = all_reduce(square, engine.axes.world).sqrt()
        if grads:
            foreach_mul_(grads, clip_factor(float(norm), max_norm))
        return norm

    @torch.no_grad()
    def finalize(self) -> None:
        """Wait for ranks that are still in a backward, then collect all gradients, when the optimizer steps."""
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
        """Join the gradient reductions of ranks that have not reached the optimizer's step, without new gradients."""
        while self._require_engine().axes.stage.size > 1 and self._sync(at_step=True):
            self._reduce_touched()
        self._touched = set()

    def _check_identical(self) -> None:
        """Raise ModelError if ranks scaled a replicated gradient by different factors.

        Each rank compares the norm of its gradients with its own norm after backward, because between ranks the order
        of addition differs.
        """
        if self._norm is None:
            return
        factor = torch.where(self._norm > 0, self._replicated_norm() / self._norm, 1.0)
        most, least = (
            all_reduce(torch.stack([factor, -factor]), self._require_engine().axes.stage, op="max").abs().tolist()
        )
        self._norm = None
        if most - least > _SAME_FACTOR * most:
            raise ModelError(
                f"gradients: since backward, one rank scaled those that all ranks share by {least:.6g} and another "
                f"by {most:.6g}. torch.nn.utils.clip_grad_norm_ computes only the norm of this rank's shards under "
                "tp and ep. Use run.clip_grad_norm_(model, max_norm)."
            )

    def _replicated_norm(self) -> torch.Tensor:
        engine = self._require_engine()
        whole = [slot for bucket in engine.reducer.buckets if bucket.over is engine.axes.plain for slot in bucket.slots]
        norm = global_norm([slot.param.grad for slot in whole if slot.param.grad is not None])
        return norm.to(engine.device, torch.float64)

    def _require_engine(self) -> FlatModel:
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
        """Return True if a rank is still in a backward. Set `_touched` to buckets with new gradients on any rank."""
        engine = self._require_engine()
        buckets = engine.reducer.buckets
        places = torch.zeros(1 + len(buckets), dtype=torch.int64, device=engine.device)
        places[0] = 0 if at_step else 1
        places[[1 + index for index in self._touched]] = 1
        found = all_reduce(places, engine.axes.stage, op="max").tolist()
        self._touched = {index for index, used in enumerate(found[1:]) if used}
        return bool(found[0])

    def _reduce_touched(self) -> None:
        """Average the buckets in `_touched` over the ranks, and update the norm if tensors are sharded.

        Gradients from earlier backwards are already equal.
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


def _scale_outside(engine: Callable[[], FlatModel | None], factor: float, grad: torch.Tensor) -> torch.Tensor | None:
    found = engine()
    return None if found is None or found.reducer.phase.in_pass else grad * factor
