"""Engine of zero=0, 1 and 2: weights and gradients in flat buckets."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_gather, broadcast
from weft.comm.mesh import Mesh
from weft.config import partitioning as shares
from weft.memory.offload import Host, HostPart, choose, step_on_host
from weft.optim.step_decision import StepDecision
from weft.parallel.state.flat_slices import FlatSlice, StateSource, register_param_locations
from weft.parallel.state.gradients import join_sharded
from weft.parallel.state.materialize import Materialise, check_same_model, guard_optimizer
from weft.parallel.state.placement import AxisMap, Placement
from weft.parallel.state.precision import Precision, cast_inputs, formats
from weft.parallel.zero.adopt import leaves_steps_out, refuse_closures, step_by_decision, undo_skipped_counts
from weft.parallel.zero.states import across_stages
from weft.parallel.zero_flat.buckets import Bucket, Slot, WeightOf, fill, lay_out, put_in_order
from weft.parallel.zero_flat.optimizer_states import (
    SlotAdoption,
    SlotErrorFeedback,
    SlotSlices,
    Untrained,
    gather_states,
    load_states,
    located_slices,
)
from weft.parallel.zero_flat.own_loop import LoadHooks, OwnLoop, take_master, written
from weft.parallel.zero_flat.prefetch import WeightPrefetcher
from weft.parallel.zero_flat.reducer import Reducer, shard_of
from weft.parallel.zero_flat.step import FlatStep, RecordedPasses


def full_weights(buckets: Sequence[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield unrounded weights, gathered over the shard axes, but not over tp and ep. A collective."""
    for bucket in buckets:
        flat = bucket.weights
        if bucket.is_mixed:
            shard = bucket.master
            flat = shard if bucket.num_shards == 1 else all_gather(shard.to(flat.device), bucket.over.shard)
        yield from ((slot.name, slot.of(flat)) for slot in bucket.slots)


def full_gradients(reducer: Reducer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradient sums, multiplied by the pending factor. A collective over the shard axes."""
    for bucket in reducer.buckets:
        flat = shard_of(bucket) if bucket.num_shards == 1 else all_gather(shard_of(bucket), bucket.over.shard)
        flat = flat if reducer.factor == 1.0 else flat * reducer.factor
        yield from ((slot.name, slot.of(flat)) for slot in bucket.slots)


def gradient_tensors(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """Return the tensors that store this rank's gradients."""
    kept = [tensor for bucket in buckets for tensor in (bucket.grads, bucket.shard)]
    loose = [grad for bucket in buckets for _, grad in bucket.loose or ()]
    return [*(tensor for tensor in kept if tensor is not None), *loose]


# ZeRO 0, 1 and 2, alone or over replicas (HSDP), for any module: weights and gradients in flat buckets.


class FlatModel:
    """The engine of zero=0, 1 and 2; see `weft.parallel.state.gradients.DataParallel`.

    Args:
        model, mesh, placements, host, seed, filled_later: as in `build_engine`, with the same errors.
        each_microbatch: stage 2 reduces after each microbatch: no full gradients, and more communication.
        bucket_bytes: bytes of masters in a bucket; None: `usual_bucket_bytes`.
    """

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
        self.device = mesh.device
        self.axes = AxisMap(mesh, placements or {}, sharded=mesh.plan.zero > 0)
        self.axes.check_names(model)
        self.precision = Precision.of(mesh.plan)
        self.in_step = self._shows_late = False  # in_step: TrainStep drives, from begin_step to publish
        self.adoptions: list[SlotAdoption] = []
        self._steps: dict[SlotAdoption, FlatStep] = {}
        self._bucket_bytes = bucket_bytes or self.usual_bucket_bytes(mesh.device.type)
        materialise = Materialise(model, self.axes, seed, mesh.device, filled_later)
        check_same_model(model, self.axes, mesh.device)
        cast_inputs(model, self.precision)
        self._formats = formats(model, self.precision)
        materialise.make(model.parameters(), self._formats)
        holders = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self._slots = [Slot(name, param, 0, is_shared=holders[id(param)] > 1) for name, param in named]
        self._ids = {id(slot.param) for slot in self._slots}
        self._kinds = {slot: self.axes.of(slot.name, slot.shape) for slot in self._slots}
        self._untrained = Untrained(model, self.axes, self._formats, materialise.value_of)
        self._host = host
        sizes = [(slot.name, slot.numel) for slot in reversed(self._slots)]  # in the order of backward
        self._on_host = choose(sizes, mesh.plan.offload_share("optimizer")) if host else frozenset[str]()
        self.own_loop = OwnLoop(self)
        stage = mesh.plan.zero if any(axes.shard.size > 1 for axes in self._kinds.values()) else 0
        wires = self.precision.wire, self.precision.outer_wire, each_microbatch and stage == 2
        self.reducer = Reducer(self._slots, self.axes, stage, mesh.device, self.own_loop.note, *wires)
        self.recorded, self.coders = RecordedPasses(self._slots, self.reducer), self.reducer.coders
        self.error_feedback = SlotErrorFeedback(self.reducer.sums, self.axes)
        self.own_loop.even_out(self._slots, self._kinds)
        self._make_buckets(frozenset(), lambda slot: materialise.value_of(slot.param), settle=True)
        self._arrivals = WeightPrefetcher(model, self._slots)
        if self.precision.is_mixed or self._on_host:
            follow = LoadHooks(self.take_masters)
            model.register_load_state_dict_pre_hook(follow.before)
            model.register_load_state_dict_post_hook(follow.after)

    def begin_step(self) -> None:
        """Reset the gradients for a new step."""
        self.check_parameters()
        self.in_step = True
        self.reducer.begin_step()

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Surround forward and backward of one microbatch."""
        self._arrivals.wait() if self.recorded.holds else self._arrivals.wait_for_rest()
        self.reducer.begin_pass(last, self.recorded.holds)
        broken = True
        try:
            yield
            broken = False
        finally:
            self.reducer.end_pass(broken)
            self.arrive()

    def finish(self, totals: torch.Tensor | None = None) -> None:
        """Wait until gradients are sums over all data ranks, or this rank's shard of the sums."""
        self.reducer.finish(totals)
        self._shows_late = self.reducer.has_unbucketed  # then `.grad` is set on demand
        if not self._shows_late:
            self.show_gradients()

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the full gradient, after `finish`."""
        return self.reducer.norm()

    def check(self) -> None:
        """Raise CommError if the sums are wrong because ranks disagreed."""
        self.reducer.check()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        self.reducer.scale(factor)
        if self._shows_late:
            self.show_gradients()

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `update` accepts the device's decision for this optimizer."""
        if self._on_host or self.coders.needs_host:
            return False
        step = self._steps[self._adoption(optimizer)]
        return step.applies() or (not step.is_watched and leaves_steps_out(optimizer))

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        """Run the optimizer's step with gradients multiplied by a factor."""
        adoption = self._adoption(optimizer)
        self.arrive()
        self._arrivals.is_step = True
        is_flat = self._steps[adoption].applies()
        if isinstance(factor, StepDecision):
            self.coders.taken = factor.is_taken
            if is_flat:
                self.reducer.factor = factor.factor
                self._take(adoption, factor)
            else:
                self.scale(1.0)  # sets `.grad`
                step_by_decision(optimizer, factor)
        elif is_flat:
            self.reducer.arrive()
            self.reducer.factor = whole = float(self.reducer.factor) * factor
            self._take(adoption, whole)
        else:
            self.scale(factor)
            optimizer.step()

    def _take(self, adoption: SlotAdoption, factor: float | StepDecision) -> None:
        """Step bucket by bucket. With prefetch, the gather of a stepped bucket overlaps with the next steps."""
        buckets, own = self.reducer.buckets, set(adoption.slots)
        step = self._steps[adoption].taking(factor, self.recorded.recorder)
        for bucket in reversed(buckets) if self._arrivals.is_watched else buckets:
            step(bucket)
            if self._arrivals.is_watched and own.issuperset(bucket.slots):
                self._arrivals.start(bucket)
        self._steps[adoption].taken(factor)
        with adoption.spent():
            adoption.optimizer.step()

    def finalize(self) -> None:
        """Set gradients where the optimizer reads them, at the step of a user's loop."""
        self.check_parameters()
        self._arrivals.is_step = True
        self.own_loop.finalize()

    def clip_own(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients in a user's loop. Return the norm of the full gradient before clipping."""
        return self.own_loop.clip(max_norm)

    @torch.no_grad()
    def publish(self, clip: float = 1.0, follow: bool = False) -> None:
        """Copy the new weights to the parameters of all ranks."""
        self._arrivals.bring(self.reducer.buckets, follow)
        self._untrained.follow()
        for slot, piece in self._pieces():
            if _bucket(slot).host is not None:
                piece.grad = None  # its memory was reused for the weights
        self.coders.commit(clip)
        self.leave_step()

    def prefetch_weights(self) -> None:
        """Make modules wait for their own weights from now on, so that `publish` does not have to wait."""
        self._arrivals.watch()

    def arrive(self) -> None:
        """Wait for pending weights."""
        self._arrivals.wait()

    def leave_step(self) -> None:
        """Record that TrainStep no longer drives."""
        self.in_step = self._arrivals.is_step = False

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters in `optimizer.param_groups` by this rank's shards."""
        if self.has_adopted(optimizer):
            return
        refuse_closures(optimizer)
        adoption = SlotAdoption(optimizer, self._slots)
        names = adoption.needs_full()
        if any(not _bucket(slot).whole and _bucket(slot).num_shards > 1 for slot in self._slots if slot.name in names):
            self._rebuild_layout(names)
        self._put(adoption)
        if self._on_host:
            step_on_host(optimizer)
        self.adoptions.append(adoption)
        self._steps[adoption] = FlatStep(adoption)
        self.own_loop.watch(adoption)
        guard_optimizer(optimizer, self.axes)

    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `adopt` was called with it."""
        return any(adoption.optimizer is optimizer for adoption in self.adoptions)

    def owns_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer holds trainable parameters of this module."""
        return any(id(param) in self._ids for group in optimizer.param_groups for param in group["params"])

    def show_gradients(self) -> None:
        """Set `.grad` of the optimizers' shards, and of parameters that are unsharded here."""
        self._shows_late = False
        for bucket in self.reducer.buckets:
            bucket.collect()
            if bucket.num_shards == 1:
                for slot in bucket.slots:
                    slot.param.grad = slot.grad
        for slot, piece in self._pieces():
            if piece is not slot.param:
                bucket = _bucket(slot)
                piece.grad = slot.piece(bucket.host.grad if bucket.host else shard_of(bucket), bucket.own)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full, unrounded trainable parameters by name."""
        return across_stages(self.axes.named(self._local_weights()), self.axes.stages, self.device)

    def _local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.arrive()
        return full_weights(self.reducer.buckets)

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield frozen tensors that are not replicated on every rank, in full."""
        rest = self.axes.rest(self._untrained.tensors())
        return across_stages(self.axes.named(rest), self.axes.stages, self.device)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full gradients by name, after `finish` or `publish`."""
        return across_stages(self.axes.named(full_gradients(self.reducer)), self.axes.stages, self.device)

    def local_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the masters by name."""
        self.arrive()
        self.reducer.arrive()
        pieces = {slot.name: slot.piece(_bucket(slot).master, _bucket(slot).own) for slot in self._slots}
        return {name: piece.detach() for name, piece in pieces.items() if piece is not None}

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield this rank's shards of the masters, each with the number of ranks that store the same shard."""
        held = self.local_weights()
        return ((held[slot.name], _bucket(slot).over.share[1]) for slot in self._slots if slot.name in held)

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that store this rank's gradients."""
        return gradient_tensors(self.reducer.buckets)

    def _local_states(self, adoption: SlotAdoption) -> Iterator[tuple[str, torch.Tensor]]:
        for axes in dict.fromkeys(self._kinds.values()):
            alike = [bucket for bucket in self.reducer.buckets if bucket.over is axes]
            yield from gather_states(adoption, alike, axes.shard)

    def stretches(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the model, masters for trained parameters. No collective."""
        self.arrive()
        self.reducer.arrive()
        yield from filter(None, map(SlotSlices(self.reducer.buckets, self.axes).of, self._slots))
        yield from (self.axes.stretch(name, tensor) for name, tensor in self._untrained.tensors())

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the optimizer's state. No collective."""
        return SlotSlices(self.reducer.buckets, self.axes).states(self._adoption(optimizer))

    @torch.no_grad()
    def load_weights(self, source: StateSource) -> None:
        """Fill this rank's flat slices, and copy masters to the parameters of all ranks. A collective."""
        for one in self.stretches():
            one.fill(source)
        self.publish()

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        """Load this rank's part of the optimizer states that any plan saved."""
        SlotSlices(self.reducer.buckets, self.axes).take_states(self._adoption(optimizer), source)

    def check_parameters(self) -> None:
        """Update the master of each parameter that was written to.

        Raises:
            ModelError: for a parameter that was moved, frozen or cast after `parallelize`.
        """
        for slot in written(self._slots):
            self.arrive()
            take_master(slot, slot.param.detach())
        self._untrained.check()

    def _pieces(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        for adoption in self.adoptions:
            yield from adoption.pieces.items()

    def _adoption(self, optimizer: torch.optim.Optimizer) -> SlotAdoption:
        self.adopt(optimizer)
        found = next(adoption for adoption in self.adoptions if adoption.optimizer is optimizer)
        self._steps[found].finalize()
        undo_skipped_counts(optimizer)
        return found

    def _make_buckets(self, whole: frozenset[str], source: WeightOf, *, settle: bool) -> None:
        """Lay out and fill buckets. settle: broadcast the first rank's weights, since ranks may have different ones."""
        buckets: list[Bucket] = []
        options: dict[str, Any] = {"whole": whole, "host": self._on_host, "bucket_bytes": self._bucket_bytes}
        for axes in dict.fromkeys(self._kinds.values()):
            alike = [slot for slot in self._slots if self._kinds[slot] is axes]
            if axes.waits:  # stages register their modules in different orders
                alike.sort(key=lambda slot: self.axes.saved_name(slot.name), reverse=True)
            found = lay_out(alike, self._formats, self.precision.master, axes.shard, **options)
            for bucket in found:
                bucket.axes = axes
                bucket.differs = axes.shard.size > 1 and self.axes.mesh.plan.gather == "diff4"
            buckets += found
        put_in_order(buckets, self._slots, self.axes.saved_name)
        for bucket in buckets:
            if bucket.on_host and self._host is not None:
                bucket.host = HostPart(self._host, bucket.length, bucket.master.dtype)
            fill(bucket, source, functools.partial(broadcast, axis=bucket.over.same) if settle else lambda flat: flat)
        self.reducer.buckets = self.error_feedback.buckets = buckets

    def _rebuild_layout(self, names: frozenset[str]) -> None:
        """Keep more parameters unsharded. Weights, gradients and optimizer states move to the new layout."""
        self.arrive()
        whole = names | {slot.name for slot in self._slots if _bucket(slot).whole}
        grads = {slot: slot.param.grad for slot in self._slots}
        states = [{name: tensor.clone() for name, tensor in self._local_states(one)} for one in self.adoptions]
        weights = dict(self._local_weights())
        for bucket in self.reducer.buckets:
            if bucket.host is not None:
                bucket.host.release()
        self.coders.forget()
        self._make_buckets(whole, lambda slot: weights[slot.name], settle=False)
        for slot, grad in grads.items():
            slot.grad, slot.param.grad = None, grad
        for adoption, saved in zip(self.adoptions, states, strict=True):
            self._put(adoption)
            load_states(adoption, saved)

    def _put(self, adoption: SlotAdoption) -> None:
        """Set an optimizer's shards, and register the locations of the sharded parameters."""
        adoption.put()
        names = adoption.needs_full()
        whole = [(slot.name, piece) for slot, piece in adoption.pieces.items() if slot.name in names]
        join_sharded(adoption.optimizer, whole, self.axes, self.device)
        register_param_locations(adoption.optimizer, located_slices(adoption, self.axes))

    def take_masters(self, tensors: Mapping[str, Any]) -> None:
        """Set the masters of written parameters from unrounded tensors."""
        self.arrive()
        for slot in self._slots:
            tensor = tensors.get(slot.name)
            if tensor is not None and tensor.shape == slot.shape:
                take_master(slot, tensor)


def _bucket(slot: Slot) -> Any:
    assert slot.bucket is not None
    return slot.bucket
