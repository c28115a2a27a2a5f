"""Wrapping of optimizers, so that they step this rank's slices of parameters in flat buckets.

If an optimizer needs full parameters, each parameter is assigned to one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.checkpoint.read import OwnershipMap, assign_evenly
from weft.comm.collectives import all_gather, broadcast
from weft.comm.mesh import Axis
from weft.comm.wire.coder import Coder
from weft.errors import CheckpointError, ModelError
from weft.parallel.state.flat_slices import FlatSlice, StateSource, filled, flat_of, read_full, single_rank_slice
from weft.parallel.state.placement import AxisMap
from weft.parallel.zero.engine import fill_group, is_elementwise, not_of_model
from weft.parallel.zero.states import (
    DTYPES,
    StateEntry,
    broadcast_buffers,
    exchange,
    not_joinable,
    read_residual,
    replicas_in,
    untrained,
)
from weft.parallel.zero_flat.buckets import Bucket, BucketSums, Slot, gather_parts


class SlotAdoption:
    """One adopted optimizer: the slots, or parameters outside the buckets, at each position of its groups.

    pieces: for each slot, the parameter that the optimizer holds: this rank's slice, or the parameter itself if nothing
    is sharded or rounded. Raises ModelError for a trainable parameter that the module does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, slots: list[Slot]):
        self.optimizer = optimizer
        self.is_spent = False  # True inside `spent`
        self.pieces: dict[Slot, nn.Parameter] = {}
        by_param = {id(slot.param): slot for slot in slots}
        self._groups: list[list[Slot | nn.Parameter]] = []
        for group in optimizer.param_groups:
            places: list[Slot | nn.Parameter] = []
            for param in group["params"]:
                slot = by_param.get(id(param))
                if slot is None and param.requires_grad:
                    raise not_of_model(param)
                places.append(slot or param)
            self._groups.append(places)
        self._names = [group.get("param_names") for group in optimizer.param_groups]
        self._before = {slot: slot.param for slot in self.slots}

    @property
    def slots(self) -> list[Slot]:
        return [place for places in self._groups for place in places if isinstance(place, Slot)]

    def needs_full(self) -> frozenset[str]:
        """Return the names of the parameters that the optimizer needs in full."""
        return frozenset(
            place.name
            for group, places in zip(self.optimizer.param_groups, self._groups, strict=True)
            if not is_elementwise(self.optimizer, group)
            for place in places
            if isinstance(place, Slot)
        )

    def put(self) -> None:
        """Put this rank's slices into the optimizer's groups. Existing optimizer states are sliced to fit.

        If slices are replaced because the buckets were laid out again, their states are dropped, for `load_states`.
        """
        self.pieces = {}
        for slot in self.slots:
            bucket, piece = slot.bucket, slot.param
            if bucket.num_shards > 1 or bucket.is_mixed:
                view = slot.view_in(bucket.master, bucket.own)
                piece = None if view is None else nn.Parameter(view)
            if piece is not None:
                self.pieces[slot] = piece
            held = self._before[slot]
            if held is not piece and (state := self.optimizer.state.pop(held, None)) and piece is not None:
                self.optimizer.state[piece] = _slice_state(state, slot, held, piece)
        for group, places, names in zip(self.optimizer.param_groups, self._groups, self._names, strict=True):
            kept = [(self.pieces.get(place) if isinstance(place, Slot) else place) for place in places]
            fill_group(group, kept, names)
        self._before = {slot: self.pieces.get(slot, slot.param) for slot in self.slots}

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Hide all gradients in the context, so that the optimizer's own step only calls hooks and schedulers."""
        grads = [(piece, piece.grad) for piece in self.pieces.values()]
        for piece, _ in grads:
            piece.grad = None
        self.is_spent = True
        try:
            yield
        finally:
            self.is_spent = False
            for piece, grad in grads:
                piece.grad = grad


def _slice_state(state: dict[str, Any], slot: Slot, held: nn.Parameter, piece: nn.Parameter) -> dict[str, Any]:
    """Return this rank's slice of a parameter's state, such as Adagrad's, which exists before the first step.

    Return {} if the parameter has a new layout.
    """
    if held is not slot.param:
        return {}  # new layout: `load_states` restores full states
    return {
        key: slot.elements_in(value, slot.bucket.own).to(piece.dtype).clone()
        if isinstance(value, torch.Tensor) and value.shape == slot.shape and value.is_floating_point()
        else value
        for key, value in state.items()
    }


# Residual of each parameter, as full tensors by name: plans with any ranks and wire format can load them.

_OWNER = "owner"


class SlotErrorFeedback:
    """Error feedback of parameters in buckets."""

    def __init__(self, sums: BucketSums, axes: AxisMap):
        self._sums, self._axes = sums, axes
        self.buckets: Sequence[Bucket] = ()

    def residual_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's residuals, without copies. Local; no communication."""
        for bucket in self.buckets:
            if (coder := self._sums.debtor(bucket)) is None:
                continue
            kept = dict(coder.states())
            for whose, key, low, high in self._keys(bucket):
                if (flat := kept.get(key)) is not None:
                    yield from self._of(bucket, whose, flat.view(-1), low, high)

    @torch.no_grad()
    def take(self, source: StateSource) -> list[str]:
        """Load residuals from a checkpoint of any plan. Return a log line if the number of replicas differs, else [].

        If this plan cannot store a residual, it is added to the gradients of the first step, with a log line instead.
        """
        saved = replicas_in(source)
        if not saved:
            return []
        number = 0
        for bucket in self.buckets:
            coder, number = self._sums.debtor(bucket), bucket.over.outer.size
            if coder is None:
                own = bucket.own.start, bucket.own.stop
                self._sums.coders.owed[bucket.slots[0].name] = self._all_of(bucket, *own, source)
                continue
            found: dict[str, torch.Tensor] = {}
            for whose, key, low, high in self._keys(bucket):
                if saved == number:
                    found[key] = self._all_of(bucket, low, high, source, (whose,))
                elif whose != _OWNER:
                    found[key] = self._all_of(bucket, low, high, source) / number
            self._load(bucket, coder, found)
        if self._sums.coders.owed:
            return ["the earlier compression error is added to the gradients of the first step"]
        return [] if saved == number else [f"what {saved} replicas' compression error is shared by {number} now"]

    def _load(self, bucket: Bucket, coder: Coder, found: dict[str, torch.Tensor]) -> None:
        shaped = {name: tensor for name, tensor in coder.states() if not name.endswith("/residual")}
        for key, flat in found.items():
            rows, numel = map(int, key.removesuffix("/residual").rpartition("-")[2].split("x"))
            whole = torch.zeros(rows * numel, dtype=flat.dtype, device=flat.device)
            whole[: flat.numel()] = flat
            shaped[key] = whole.view(rows, numel)
        coder.load(shaped)

    def _keys(self, bucket: Bucket) -> Iterator[tuple[str, str, int, int]]:
        """Yield the residuals in a bucket's coder: owner, name in the coder, start and end in the bucket."""
        outer, span = bucket.over.outer, self._span(bucket)
        numel, size = span.stop - span.start, outer.size
        if self._sums.divides(bucket) and not self._sums.coders.outer_wire.spec.rank:
            yield str(outer.rank), f"summands-{size}x{bucket.length}/residual", span.start, span.stop
            return
        if size == 2 or self._sums.coders.outer_wire.spec.rank:
            yield str(outer.rank), f"summands-1x{numel}/residual", span.start, span.stop
            return
        each = -(-numel // size)
        yield str(outer.rank), f"summands-{size}x{each}/residual", span.start, span.stop
        first = span.start + outer.rank * each
        yield _OWNER, f"sums-1x{each}/residual", min(first, span.stop), min(first + each, span.stop)

    def _span(self, bucket: Bucket) -> slice:
        """Return the range of a bucket that this rank sends over the outermost axis."""
        return slice(0, bucket.size) if self._sums.divides(bucket) or bucket.num_shards == 1 else bucket.own

    def _of(self, bucket: Bucket, whose: str, flat: torch.Tensor, low: int, high: int) -> Iterator[FlatSlice]:
        """Yield a flat slice for each parameter with elements in `flat`, the bucket's range from `low` to `high`."""
        for slot in bucket.slots:
            start, end = max(slot.start, low), min(slot.start + slot.numel, high)
            if start < end:
                name = f"{self._axes.saved_name(slot.name)}/residual.{whose}"
                part = self._axes.part_of(slot.name, slot.param)
                deal = self._ownership(bucket, slot, whose)
                yield FlatSlice(name, part, deal, start - slot.start, flat[start - low : end - low])

    def _ownership(self, bucket: Bucket, slot: Slot, whose: str) -> OwnershipMap:
        """Return the map from the elements of a parameter's residual to the ranks that write them.

        Of several ranks with the same residual, the first writes it.
        """
        kind, me = bucket.over, self._axes.mesh.rank
        near = kind.alike[0] - me
        shards = kind.shard.ranks if self._span(bucket) == bucket.own and bucket.num_shards > 1 else (me,)
        length = bucket.length if len(shards) > 1 else bucket.size
        if whose != _OWNER:
            return OwnershipMap(tuple(rank + near for rank in shards), length, slot.start)
        # Each part is divided again among its owners. Relative to its part's rank, owners have the same offsets as
        # here.
        ranks = tuple(rank + near + owner - me for rank in shards for owner in kind.outer.ranks)
        return OwnershipMap(ranks, length, slot.start, kind.outer.size, -(-length // kind.outer.size))

    def _all_of(
        self, bucket: Bucket, low: int, high: int, source: StateSource, whose: tuple[str, ...] = ()
    ) -> torch.Tensor:
        """Return the residual of the elements from `low` to `high`, of the owners `whose`, or summed over all."""
        total = torch.zeros(high - low, dtype=bucket.master.dtype, device=bucket.weights.device)
        for like in self._of(bucket, whose[0] if whose else _OWNER, total, low, high):
            read_residual(like, source, whose)
        return total


# Optimizer states of slices, gathered to full tensors that fit any plan, and sliced again.


def gather_states(adoption: SlotAdoption, buckets: list[Bucket], shard: Axis) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield states of the buckets' parameters as (`parameter/key`, full tensor). Collective over the shard axis."""
    if shard.size == 1:
        here = {slot for bucket in buckets for slot in bucket.slots}
        for slot, piece in adoption.pieces.items():
            if slot not in here:
                continue
            for key, value in adoption.optimizer.state.get(piece, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{slot.name}/{key}", value
        return
    adopted = {slot.name: slot for slot in adoption.slots}
    table = exchange(_describe(adoption, shard.rank), shard, buckets[0].weights.device)
    for bucket in buckets:
        mine = [slot for slot in bucket.slots if slot.name in adopted and slot.name in table]
        for key in sorted({key for slot in mine for key in table[slot.name]}):
            having = [slot for slot in mine if key in table[slot.name]]
            yield from _gather_key(adoption, bucket, having, key, table, shard)


def _gather_key(
    adoption: SlotAdoption,
    bucket: Bucket,
    slots: list[Slot],
    key: str,
    table: dict[str, dict[str, StateEntry]],
    shard: Axis,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather one state key of a bucket's parameters: sharded ones in one collective, the others one by one."""
    divided = [slot for slot in slots if table[slot.name][key]["shape"] == "cut"]
    device = bucket.weights.device
    for dtype in sorted({table[slot.name][key]["dtype"] for slot in divided}):
        part = torch.zeros(bucket.length, dtype=DTYPES[dtype], device=device)
        alike = [slot for slot in divided if table[slot.name][key]["dtype"] == dtype]
        for slot in alike:
            target, value = slot.view_in(part, bucket.own), _local(adoption, slot).get(key)
            if target is not None and value is not None:
                target.copy_(value)
        flat = gather_parts(bucket, part).wait()
        yield from ((f"{slot.name}/{key}", slot.of(flat)) for slot in alike)
    for slot in slots:
        entry = table[slot.name][key]
        if entry["shape"] == "cut":
            continue
        if entry["value"] is not None:
            yield f"{slot.name}/{key}", torch.tensor(entry["value"], dtype=DTYPES[entry["dtype"]])
            continue
        whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
        if entry["owner"] == shard.rank:
            whole.copy_(_local(adoption, slot)[key])
        yield f"{slot.name}/{key}", broadcast(whole, shard, entry["owner"])


def load_states(adoption: SlotAdoption, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load this rank's slices from full states, named `parameter/key`.

    Raises CheckpointError for a state whose parameter the optimizer does not train, or that has another shape than a
    sharded parameter. States of unsharded parameters are loaded in any shape.
    """
    slots = {slot.name: slot for slot in adoption.slots}
    for full_name, saved in tensors.items():
        name, _, key = full_name.rpartition("/")
        slot = slots.get(name)
        if slot is None:
            raise untrained(full_name)
        piece = adoption.pieces.get(slot)
        if piece is None:
            continue
        divided = piece.numel() < slot.numel
        if divided and saved.ndim and saved.shape != slot.shape:
            raise CheckpointError(
                f"optimizer state {full_name!r}: shape {tuple(saved.shape)} cannot be divided as the parameter is, "
                f"which has shape {tuple(slot.shape)}."
            )
        # Keep step counts on the device that the optimizer expects: fused kernels read them on the GPU.
        value = slot.elements_in(saved, slot.bucket.own) if divided and saved.ndim else saved
        target = torch.empty_like(piece) if value.shape == piece.shape and saved.ndim else torch.empty(value.shape)
        adoption.optimizer.state[piece][key] = target.to(dtype=saved.dtype, device=piece.device).copy_(value)


def _local(adoption: SlotAdoption, slot: Slot) -> dict[str, Any]:
    piece = adoption.pieces.get(slot)
    return adoption.optimizer.state.get(piece, {}) if piece is not None else {}


def _describe(adoption: SlotAdoption, rank: int) -> dict[str, dict[str, StateEntry]]:
    found: dict[str, dict[str, StateEntry]] = {}
    for slot, piece in adoption.pieces.items():
        divided = piece.numel() < slot.numel
        for key, value in adoption.optimizer.state.get(piece, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            shape: object = list(value.shape)
            if divided and value.ndim:
                if value.shape != piece.shape:
                    raise not_joinable(f"{slot.name}/{key}", value.shape)
                shape = "cut"
            number = value.item() if value.ndim == 0 and value.dtype != torch.bfloat16 else None
            entry = {"owner": rank, "shape": shape, "dtype": str(value.dtype), "value": number}
            found.setdefault(slot.name, {})[key] = entry
    return found


# This rank's slices of buckets, of optimizer states, and of tensors outside buckets, for checkpoints.


class SlotSlices:
    """Flat slices of the parameters in a list of buckets."""

    def __init__(self, buckets: Sequence[Bucket], axes: AxisMap):
        self._axes, self._turns, turn = axes, dict[int, int](), 0
        self._ranks: dict[int, tuple[int, ...]] = {}
        for bucket in buckets:
            kind = bucket.over
            if id(kind) not in self._ranks:
                # Adjacent ranks in this tuple hold the same part. The next group of ranks holds the next part.
                near = [rank - axes.mesh.rank for rank in kind.holders]
                self._ranks[id(kind)] = tuple(rank + step for rank in kind.shard.ranks for step in near)
            self._turns[id(bucket)] = turn
            if bucket.sizes:
                continue  # `length` differs between ranks
            turn += -(-bucket.length // assign_evenly((), bucket.length, len(kind.holders) or 1).share)

    def of(self, slot: Slot) -> FlatSlice | None:
        """Return this rank's flat slice of a parameter's master weights, or None if it has no elements of them."""
        bucket = slot.bucket
        if not slot.is_in(bucket.own):
            return None
        start, end = slot.inside(bucket.own)
        deal = self._ownership(slot)
        flat = bucket.master.detach()[start - bucket.own.start : end - bucket.own.start]
        part = self._axes.part_of(slot.name, slot.param)
        return FlatSlice(self._axes.saved_name(slot.name), part, deal, start - slot.start, flat)

    def _ownership(self, slot: Slot) -> OwnershipMap:
        """Return the map from a parameter's elements to the ranks that write them."""
        bucket, kind = slot.bucket, slot.bucket.over
        if not bucket.sizes:
            times, turn = len(kind.holders), self._turns[id(bucket)]
            return assign_evenly(self._ranks[id(kind)], bucket.length, times, start=slot.start, turn=turn)
        # Unequal parts are several equal chunks of one rank. Of the ranks with the same part, the first writes it.
        chunk, near = math.gcd(*bucket.sizes), kind.holders[0] - self._axes.mesh.rank
        chunks = zip(kind.shard.ranks, bucket.sizes, strict=True)
        return OwnershipMap(
            tuple(rank + near for rank, size in chunks for _ in range(size // chunk)), chunk, slot.start
        )

    def states(self, adoption: SlotAdoption) -> Iterator[FlatSlice]:
        """Yield this rank's optimizer states as flat slices. Raises CheckpointError if a shape does not fit."""
        for slot, piece in adoption.pieces.items():
            found = self.of(slot)
            assert found is not None
            for key, value in adoption.optimizer.state.get(piece, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                name = f"{found.name}/{key}"
                if value.ndim and value.shape == piece.shape:
                    stride = slot.stride if value.shape == slot.shape else None
                    yield FlatSlice(name, found.part, found.deal, found.start, flat_of(value, stride))
                    continue
                if value.ndim and piece.numel() < slot.numel:
                    raise not_joinable(name, value.shape)
                yield single_rank_slice(name, value, found.deal.holder(0))

    def take_states(self, adoption: SlotAdoption, source: StateSource) -> None:
        """Load an optimizer's states on this rank.

        Raises CheckpointError for a state that does not fit its parameter and, without pipeline stages, for a state of
        a parameter that the optimizer does not train.
        """
        ours: dict[str, list[Slot]] = {}
        for slot in adoption.slots:
            ours.setdefault(self._axes.saved_name(slot.name), []).append(slot)
        for full_name in source.entries:
            saved_name, _, key = full_name.rpartition("/")
            if saved_name not in ours and self._axes.stages.size == 1:
                raise untrained(full_name)
            for slot in ours.get(saved_name, []):
                self._take(adoption, slot, full_name, key, source)

    def _take(self, adoption: SlotAdoption, slot: Slot, full_name: str, key: str, source: StateSource) -> None:
        piece, found = adoption.pieces.get(slot), self.of(slot)
        if piece is None or found is None:
            return
        saved = source.entries[full_name]
        if saved.shape and tuple(saved.shape) == found.part.shape:
            adoption.optimizer.state[piece][key] = filled(full_name, found, piece, source)
            return
        if saved.shape and piece.numel() < slot.numel:
            raise CheckpointError(
                f"optimizer state {full_name!r}: shape {tuple(saved.shape)} cannot be divided as the parameter is, "
                f"which has shape {found.part.shape}."
            )
        # Keep step counts on the device that the optimizer expects: fused kernels read them on the GPU.
        adoption.optimizer.state[piece][key] = read_full(source, full_name).to(piece.device)


class Untrained:
    """Frozen parameters and buffers: replicated on every rank, with the first rank's values.

    value_of: returns a parameter's values, or None if each rank loads them later.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: AxisMap,
        formats: Mapping[nn.Parameter, torch.dtype],
        value_of: Callable[[nn.Parameter], torch.Tensor | None],
    ):
        self._frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
        for name, param in self._frozen.items():
            if (value := value_of(param)) is not None:
                same = axes.of(name, param.shape).same
                param.data = broadcast(value.to(formats[param]).contiguous(), same)
        broadcast_buffers((buffer, axes.settling(name, buffer)) for name, buffer in model.named_buffers())
        lasting = model.state_dict(keep_vars=True)
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in lasting}
        # Statistics that forward updates (batch norm). The first rank's values are broadcast after each step.
        self._moving = [
            (buffer, axes.settling(name, buffer))
            for name, buffer in self._buffers.items()
            if buffer.is_floating_point()
        ]

    def broadcast(self) -> None:
        """Broadcast the first rank's updated buffers after a step."""
        broadcast_buffers(self._moving)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that a checkpoint contains, by name."""
        yield from self._frozen.items()
        yield from self._buffers.items()

    def check(self) -> None:
        """Raise ModelError if a parameter was unfrozen."""
        if any(param.requires_grad for param in self._frozen.values()):
            raise ModelError("model: a frozen parameter was unfrozen after parallelize. Do that before parallelize.")


class QuantizedWeights:
    """The quantized weights that forward uses under gather=diff4, as flat slices for checkpoints."""

    def __init__(self, buckets: Sequence[Bucket], axes: AxisMap):
        self._buckets, self._axes = buckets, axes

    def flat_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the quantized weights. Local; no communication."""
        placed = SlotSlices(self._buckets, self._axes)
        for bucket in self._buckets:
            for slot in bucket.slots if bucket.differs else ():
                found = placed.of(slot)
                if found is not None:
                    start, end = slot.inside(bucket.own)
                    yield replace(found, flat=bucket.weights.detach()[start:end])

    @torch.no_grad()
    def take(self, source: StateSource) -> None:
        """Load the weights that forward uses from a checkpoint, if it has them. All ranks must call it."""
        for one in self.flat_slices() if source.entries else ():
            if one.name in source.entries:
                one.fill(source)
        for bucket in self._buckets if source.entries else ():
            if bucket.differs:
                all_gather(bucket.weights[bucket.own], bucket.over.shard, out=bucket.weights)
