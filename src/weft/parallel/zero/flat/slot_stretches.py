"""What a rank holds of buckets, of optimizer states beside them, and of what lies in no bucket, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from weft.checkpoint.parts import deal_out
from weft.comm import all_gather, broadcast
from weft.errors import CheckpointError, ModelError
from weft.parallel.local_tensors import PlacedPart, StateSource, Stretch, alone, filled, flat_of, read_whole
from weft.parallel.placement import AxisMap
from weft.parallel.zero.flat.buckets import Bucket, Slot
from weft.parallel.zero.flat.slot_adoption import SlotAdoption
from weft.parallel.zero.states import not_joinable, untrained


class SlotStretches:
    """Stretches of the parameters in some buckets."""

    def __init__(self, buckets: Sequence[Bucket], axes: AxisMap):
        self._axes, self._turns, turn = axes, dict[int, int](), 0
        self._ranks: dict[int, tuple[int, ...]] = {}
        for bucket in buckets:
            kind = bucket.over
            if id(kind) not in self._ranks:
                # Ranks of a length hold the same; those of the next have the next part.
                near = [rank - axes.mesh.rank for rank in kind.holders]
                self._ranks[id(kind)] = tuple(rank + step for rank in kind.shard.ranks for step in near)
            self._turns[id(bucket)] = turn
            turn += -(-bucket.length // deal_out((), bucket.length, len(kind.holders) or 1).share)

    def of(self, slot: Slot) -> Stretch | None:
        """What of a parameter's master this rank holds; None: nothing."""
        bucket = slot.bucket
        assert bucket is not None
        if not slot.is_in(bucket.own):
            return None
        kind, (start, end) = bucket.over, slot.inside(bucket.own)
        ranks = self._ranks[id(kind)]
        times = len(kind.holders)
        deal = deal_out(ranks, bucket.length, times, start=slot.start, turn=self._turns[id(bucket)])
        flat = bucket.master.detach()[start - bucket.own.start : end - bucket.own.start]
        part = self._axes.part_of(slot.name, slot.param)
        return Stretch(self._axes.saved_name(slot.name), part, deal, start - slot.start, flat)

    def states(self, adoption: SlotAdoption) -> Iterator[Stretch]:
        """An optimizer's states of this rank's pieces. CheckpointError for one that fits no part of its parameter."""
        for slot, piece in adoption.pieces.items():
            found = self.of(slot)
            assert found is not None
            for key, value in adoption.optimizer.state.get(piece, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                name = f"{found.name}/{key}"
                if value.ndim and value.shape == piece.shape:
                    stride = slot.stride if value.shape == slot.shape else None
                    yield Stretch(name, found.part, found.deal, found.start, flat_of(value, stride))
                    continue
                if value.ndim and piece.numel() < slot.numel:
                    raise not_joinable(name, value.shape)
                yield alone(name, value, found.deal.holder(0))

    def take_states(self, adoption: SlotAdoption, source: StateSource) -> None:
        """Give an optimizer its states. CheckpointError for one that does not fit its parameter."""
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
        # Step counters stay where the optimizer wants them: fused kernels read them on the device.
        adoption.optimizer.state[piece][key] = read_whole(source, full_name).to(piece.device)


def placed_pieces(adoption: SlotAdoption, axes: AxisMap) -> Iterator[tuple[nn.Parameter, PlacedPart]]:
    """An optimizer's pieces, each with where it lies in the whole parameter."""
    for slot, piece in adoption.pieces.items():
        assert slot.bucket is not None
        start = slot.inside(slot.bucket.own)[0] - slot.start
        part = axes.part_of(slot.name, slot.param)
        yield piece, PlacedPart(axes.saved_name(slot.name), part, start, piece.device)


class Untrained:
    """Frozen parameters and buffers: whole on every rank, and the first rank's.

    Args:
        model: laid over the mesh.
        axes: of its parameters.
        formats: of parameters.
        value_of: a parameter's values; None where they come later, on each rank by itself.
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
        for name, buffer in model.named_buffers():
            settled = broadcast(buffer.detach().contiguous(), axes.settling(name, buffer))
            if settled.data_ptr() != buffer.data_ptr():
                buffer.copy_(settled)
        lasting = model.state_dict(keep_vars=True)
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in lasting}
        # Statistics that forward keeps (batch norm): after each step the first rank's count, on all ranks.
        self._moving = [
            (buffer, axes.settling(name, buffer))
            for name, buffer in self._buffers.items()
            if buffer.is_floating_point()
        ]

    def follow(self) -> None:
        """After a step: what training moves becomes the first rank's."""
        for buffer, axis in self._moving:
            broadcast(buffer, axis)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By name, what a checkpoint keeps."""
        yield from self._frozen.items()
        yield from self._buffers.items()

    def check(self) -> None:
        """ModelError where somebody has unfrozen a parameter."""
        if any(param.requires_grad for param in self._frozen.values()):
            raise ModelError("model: a frozen parameter was unfrozen after parallelize. Do that before parallelize.")


class SeenWeights:
    """The weights that forward uses, of buckets whose differences travel, in checkpoints.

    Args:
        buckets: of the model.
        axes: of the model.
    """

    def __init__(self, buckets: Sequence[Bucket], axes: AxisMap):
        self._buckets, self._axes = buckets, axes

    def stretches(self) -> Iterator[Stretch]:
        """Yield this rank's part of them; no collective."""
        placed = SlotStretches(self._buckets, self._axes)
        for bucket in self._buckets:
            for slot in bucket.slots if bucket.differs else ():
                found = placed.of(slot)
                if found is not None:
                    start, end = slot.inside(bucket.own)
                    yield replace(found, flat=bucket.weights.detach()[start:end])

    @torch.no_grad()
    def take(self, source: StateSource) -> None:
        """Let forward use what a checkpoint says, where it says it. A collective."""
        for one in self.stretches() if source.entries else ():
            if one.name in source.entries:
                one.fill(source)
        for bucket in self._buckets if source.entries else ():
            if bucket.differs:
                all_gather(bucket.weights[bucket.own], bucket.over.shard, out=bucket.weights)
