"""Parameters of a model in flat buckets."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import broadcast
from weft.errors import ModelError
from weft.memory.offload import Host, HostPart, choose
from weft.parallel.state.flat_slices import FlatSlice
from weft.parallel.state.materialize import Materialise
from weft.parallel.state.placement import AxisMap
from weft.parallel.state.precision import Precision, cast_inputs, formats
from weft.parallel.zero_flat.buckets import Bucket, Slot, WeightOf, fill, gather_parts, lay_out, put_in_order
from weft.parallel.zero_flat.optimizer_states import SlotSlices, Untrained
from weft.private_torch import version_of


class FlatParameters:
    """Slots and buckets of a model's parameters, and its tensors outside buckets.

    Args:
        model: model; its parameters may be on the meta device.
        host: host memory for the plan's share of optimizer states, or None.
        bucket_bytes: bytes of master weights in a bucket.
    """

    buckets: list[Bucket]

    def __init__(
        self,
        model: nn.Module,
        axes: AxisMap,
        precision: Precision,
        materialise: Materialise,
        host: Host | None,
        bucket_bytes: int,
    ):
        self._axes, self._master, self._host, self._bucket_bytes = axes, precision.master, host, bucket_bytes
        cast_inputs(model, precision)
        self._formats = formats(model, precision)
        materialise.make(model.parameters(), self._formats)
        holders = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self.slots = [Slot(name, param, 0, is_shared=holders[id(param)] > 1) for name, param in named]
        self.ids = {id(slot.param) for slot in self.slots}
        self.kinds = {slot: axes.of(slot.name, slot.shape) for slot in self.slots}
        self.untrained = Untrained(model, axes, self._formats, materialise.value_of)
        sizes = [(slot.name, slot.numel) for slot in reversed(self.slots)]  # in the order of backward
        self.on_host = choose(sizes, axes.mesh.stage_plan.offload_share("optimizer")) if host else frozenset[str]()

    @property
    def is_sharded(self) -> bool:
        return any(axes.shard.size > 1 for axes in self.kinds.values())

    @property
    def placed(self) -> SlotSlices:
        """Flat slices of the slots in the current bucket layout."""
        return SlotSlices(self.buckets, self._axes)

    def lay_out(self, source: WeightOf, unsharded: frozenset[str] = frozenset(), *, settle: bool) -> None:
        """Lay out and fill buckets. settle: True to broadcast the first rank's weights, because ranks may differ."""
        self.buckets = []
        options: dict[str, Any] = {"whole": unsharded, "host": self.on_host, "bucket_bytes": self._bucket_bytes}
        options["shard_shares"] = self._axes.mesh.plan.shard_shares
        for axes in dict.fromkeys(self.kinds.values()):
            slots = [slot for slot in self.slots if self.kinds[slot] is axes]
            if axes.waits:  # stages register their modules in different orders
                slots.sort(key=lambda slot: self._axes.saved_name(slot.name), reverse=True)
            found = lay_out(slots, self._formats, self._master, axes.shard, **options)
            for bucket in found:
                bucket.over = axes
                bucket.differs = axes.shard.size > 1 and self._axes.mesh.plan.gather == "diff4"
            self.buckets += found
        put_in_order(self.buckets, self.slots, self._axes.saved_name)
        for bucket in self.buckets:
            if bucket.on_host and self._host is not None:
                bucket.host = HostPart(self._host, bucket.length, bucket.master.dtype)
            same: Callable[[torch.Tensor], torch.Tensor] = functools.partial(broadcast, axis=bucket.over.same)
            fill(bucket, source, same if settle else lambda flat: flat)

    def unshard(self, names: frozenset[str]) -> None:
        """Lay out the buckets again such that these parameters are unsharded too. Gradients stay in `.grad`."""
        unsharded = names | {slot.name for slot in self.slots if slot.bucket.whole}
        grads = {slot: slot.param.grad for slot in self.slots}
        weights = dict(self.full())
        for bucket in self.buckets:
            if bucket.host is not None:
                bucket.host.release()
        self.lay_out(lambda slot: weights[slot.name], unsharded, settle=False)
        for slot, grad in grads.items():
            slot.grad, slot.param.grad = None, grad

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield unrounded weights, gathered over the shard axes, but not over tp and ep. All ranks must call it."""
        for bucket in self.buckets:
            flat = bucket.weights
            if bucket.is_mixed:
                shard = bucket.master
                flat = shard if bucket.num_shards == 1 else gather_parts(bucket, shard.to(flat.device)).wait()
            yield from ((slot.name, slot.of(flat)) for slot in bucket.slots)

    def local(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        for slot in self.slots:
            shard = slot.view_in(slot.bucket.master, slot.bucket.own)
            if shard is not None:
                yield slot, shard.detach()

    def counted(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield this rank's shards of the master weights, each with the number of ranks that store the same shard."""
        return ((shard, slot.bucket.over.share[1]) for slot, shard in self.local())

    def slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the model: masters of trained parameters, and other tensors. Local."""
        yield from filter(None, map(self.placed.of, self.slots))
        yield from (self._axes.slice_of(name, tensor) for name, tensor in self.untrained.tensors())

    def check(self, wait: Callable[[], None]) -> None:
        """Update the master of each parameter whose values were changed by the user.

        wait: waits for pending weights. Raises ModelError for a parameter that was moved, frozen, unfrozen or cast
        after `parallelize`.
        """
        for slot in self.slots:
            check_written(slot, wait)
        self.untrained.check()


def check_written(slot: Slot, wait: Callable[[], None]) -> None:
    """Update the master of a parameter that the user changed. Raises ModelError if it was moved, frozen or cast."""
    param = slot.param
    if param.data_ptr() != slot.address or not param.requires_grad:
        what = "moved to other memory or another format" if param.requires_grad else "frozen"
        raise ModelError(f"parameter {slot.name!r}: it was {what} after parallelize. Do that before parallelize.")
    if version_of(param) != slot.version:
        wait()
        take_master(slot, param.detach())


def take_master(slot: Slot, whole: torch.Tensor) -> None:
    """Update this rank's part of the master after the user changed a parameter. whole: its full new values."""
    slot.version = version_of(slot.param)
    bucket = slot.bucket
    piece = slot.view_in(bucket.master, bucket.own)
    if bucket.is_mixed and piece is not None:
        if bucket.host is not None:
            bucket.host.wait()
        with torch.no_grad():
            piece.copy_(slot.elements_in(whole.detach().to(device=piece.device, dtype=piece.dtype), bucket.own))


class LoadHooks:
    """Hooks of a module's load_state_dict that update master weights from the unrounded tensors.

    Copies of a `LoadHooks`, as in a copied module, do nothing.
    """

    def __init__(self, slots: Sequence[Slot] = (), wait: Callable[[], None] | None = None):
        self._slots, self._wait = slots, wait
        self._loaded: Mapping[str, Any] = {}

    def before(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Store the state that is about to be loaded."""
        del module, rest
        self._loaded = {name.removeprefix(prefix): tensor for name, tensor in state.items()}

    def after(self, module: nn.Module, incompatible: Any) -> None:
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
