"""Engine of zero=0, 1 and 2: weights and gradients in flat buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.config import partitioning as shares
from weft.memory.offload import Host
from weft.optim.step_decision import StepDecision
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.placement import Placement
from weft.parallel.zero.adopt import step_by_decision
from weft.parallel.zero.engine import Phase, ZeroEngine
from weft.parallel.zero_flat.optimizer_states import SlotAdoption, SlotErrorFeedback
from weft.parallel.zero_flat.own_loop import LoadHooks, OwnLoop
from weft.parallel.zero_flat.parameters import FlatParameters
from weft.parallel.zero_flat.prefetch import WeightPrefetcher
from weft.parallel.zero_flat.reducer import Reducer
from weft.parallel.zero_flat.step import FlatOptimizers, FlatStep, RecordedPasses


class FlatModel(ZeroEngine):
    """The engine of zero=0, 1 and 2, alone or over replicas (HSDP), for any module.

    model, mesh, placements, host, seed, filled_later: as in `build_engine`, with the same errors. each_microbatch:
    stage 2 reduces after each microbatch: no full gradients, and more communication. bucket_bytes: bytes of masters in
    a bucket; None: `usual_bucket_bytes`.
    """

    reducer: Reducer

    @staticmethod
    def usual_bucket_bytes(device: str) -> int:
        """Return the default bytes of masters in a bucket. Tests replace it."""
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
        size = bucket_bytes or self.usual_bucket_bytes(mesh.device.type)
        self._parameters = FlatParameters(model, self.axes, self.precision, materialise, host, size)
        self.updates_on_host = bool(self._parameters.on_host)
        slots = self._parameters.slots
        self.own_loop = OwnLoop(self)
        stage = mesh.plan.zero if self._parameters.is_sharded else 0
        wires = self.precision.wire, self.precision.outer_wire, each_microbatch and stage == 2
        self.reducer = Reducer(slots, self.axes, stage, mesh.device, self.own_loop.note, *wires)
        self.recorded = RecordedPasses(slots, self.reducer)
        self.error_feedback = SlotErrorFeedback(self.reducer.sums, self.axes)
        self.own_loop.even_out(slots, self._parameters.kinds)
        self._parameters.lay_out(lambda slot: materialise.value_of(slot.param), settle=True)
        self._use_layout()
        self._optimizers = FlatOptimizers(self.axes, self.device)
        self._prefetcher = WeightPrefetcher(model, slots)
        if self.precision.is_mixed or self.updates_on_host:
            hooks = LoadHooks(slots, self.wait_for_weights)
            model.register_load_state_dict_pre_hook(hooks.before)
            model.register_load_state_dict_post_hook(hooks.after)

    def begin_step(self) -> None:
        """Reset the gradients for a new step."""
        self.check_parameters()
        self.reducer.begin_step()

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Surround forward and backward of one microbatch."""
        self._prefetcher.wait() if self.reducer.holds else self._prefetcher.wait_for_rest()
        try:
            with self.reducer.microbatch(last):
                yield
        finally:
            self.wait_for_weights()

    def finish(self, totals: torch.Tensor | None = None) -> None:
        """Wait until gradients are sums over all data ranks, or this rank's shard of the sums."""
        self.reducer.finish(totals)
        if not self.reducer.has_unbucketed:  # else `scale` sets `.grad`, if the optimizer needs it
            self.show_gradients()

    def check(self) -> None:
        """Raise CommError if the sums are wrong because ranks disagreed."""
        self.reducer.check()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        self.reducer.scale(factor)
        if self.reducer.phase is Phase.REDUCED:
            self.show_gradients()

    def show_gradients(self) -> None:
        """Set `.grad` of the optimizers' shards, and of parameters that are unsharded here."""
        if self.reducer.phase is Phase.REDUCED:
            self.reducer.phase = Phase.READY
        for bucket in self.reducer.buckets:
            bucket.collect()
            if bucket.num_shards == 1:
                for slot in bucket.slots:
                    slot.param.grad = slot.grad
        self._optimizers.show_gradients()

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `update` accepts the device's decision for this optimizer."""
        if self.updates_on_host or self.coders.needs_host:
            return False
        return self._step_of(optimizer).accepts_decision

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        """Run the optimizer's step with gradients multiplied by a factor."""
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
        """Step bucket by bucket. With prefetch, the gather of a stepped bucket overlaps with the next steps."""
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
        """Set the gradients that the optimizer reads, at the step of a user's loop."""
        self.check_parameters()
        self.own_loop.finalize()

    def clip_own(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients in a user's loop. Return the norm of the full gradient before clipping."""
        return self.own_loop.clip(max_norm)

    @torch.no_grad()
    def publish(self, clip: float = 1.0, follow: bool = False) -> None:
        """Copy the new weights to the parameters of all ranks."""
        self._prefetcher.start_rest(self.reducer.buckets, follow, is_update=self.reducer.phase.is_update)
        self._parameters.untrained.broadcast()
        self._optimizers.drop_hosted_gradients()
        self.coders.commit(clip)
        self.leave_step()

    def prefetch_weights(self) -> None:
        """Make modules wait for their own weights from now on, so that `publish` does not have to wait."""
        self._prefetcher.watch()

    def wait_for_weights(self) -> None:
        """Wait for pending weights."""
        self._prefetcher.wait()

    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `adopt` was called with it."""
        return optimizer in self._optimizers.steps

    def owns_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer holds trainable parameters of this module."""
        return any(id(param) in self._parameters.ids for group in optimizer.param_groups for param in group["params"])

    def _put_shards(self, optimizer: torch.optim.Optimizer) -> None:
        adoption = SlotAdoption(optimizer, self._parameters.slots)
        names = adoption.needs_full()
        if self._parameters.has_shards(names):
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
        self.reducer.buckets = self.error_feedback.buckets = self._parameters.buckets

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
        """Return this rank's shards of the masters by name."""
        self._wait_for_masters()
        return {slot.name: shard for slot, shard in self._parameters.local()}

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield this rank's shards of the masters, each with the number of ranks that store the same shard."""
        self._wait_for_masters()
        return self._parameters.counted()

    def _wait_for_masters(self) -> None:
        self.wait_for_weights()
        self.reducer.wait_for_sums()

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that store this rank's gradients."""
        return self.reducer.gradient_tensors()

    def model_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the model, masters for trained parameters. No collective."""
        self._wait_for_masters()
        yield from self._parameters.slices()

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the optimizer's state. No collective."""
        return self._parameters.placed.states(self._step_of(optimizer).adoption)

    def load_weights(self, source: StateSource) -> None:
        """Fill this rank's flat slices, and copy masters to the parameters of all ranks. A collective."""
        super().load_weights(source)
        self.publish()

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        """Load this rank's part of the optimizer states that any plan saved."""
        self._parameters.placed.take_states(self._step_of(optimizer).adoption, source)

    def check_parameters(self) -> None:
        """Update the master of each parameter that was written to.

        Raises:
            ModelError: for a parameter that was moved, frozen or cast after `parallelize`.
        """
        self._parameters.check(self.wait_for_weights)
