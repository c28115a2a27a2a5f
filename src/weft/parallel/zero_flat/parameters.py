"""Parameters of a model in flat buckets."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_gather, broadcast
from weft.memory.offload import Host, HostPart, choose
from weft.parallel.state.flat_slices import FlatSlice
from weft.parallel.state.materialize import Materialise
from weft.parallel.state.placement import AxisMap
from weft.parallel.state.precision import Precision, cast_inputs, formats
from weft.parallel.zero_flat.buckets import Bucket, Slot, WeightOf, fill, lay_out, put_in_order
from weft.parallel.zero_flat.optimizer_states import SlotSlices, Untrained
from weft.parallel.zero_flat.own_loop import update_written


class FlatParameters:
    """Slots and buckets of a model's parameters, and its tensors outside of buckets.

    model: model; its parameters may be on the meta device. host: host memory for the plan's share of optimizer states,
    or None. bucket_bytes: bytes of masters in a bucket.
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
        self.on_host = choose(sizes, axes.mesh.plan.offload_share("optimizer")) if host else frozenset[str]()

    @property
    def is_sharded(self) -> bool:
        return any(axes.shard.size > 1 for axes in self.kinds.values())

    @property
    def placed(self) -> SlotSlices:
        """Flat slices of slots in the current layout."""
        return SlotSlices(self.buckets, self._axes)

    def lay_out(self, source: WeightOf, unsharded: frozenset[str] = frozenset(), *, settle: bool) -> None:
        """Lay out and fill buckets.

        settle: broadcast the first rank's weights, since ranks may have initialized them differently.
        """
        self.buckets = []
        options: dict[str, Any] = {"whole": unsharded, "host": self.on_host, "bucket_bytes": self._bucket_bytes}
        for axes in dict.fromkeys(self.kinds.values()):
            slots = [slot for slot in self.slots if self.kinds[slot] is axes]
            if axes.waits:  # stages register their modules in different orders
                slots.sort(key=lambda slot: self._axes.saved_name(slot.name), reverse=True)
            found = lay_out(slots, self._formats, self._master, axes.shard, **options)
            for bucket in found:
                bucket.axes = axes
                bucket.differs = axes.shard.size > 1 and self._axes.mesh.plan.gather == "diff4"
            self.buckets += found
        put_in_order(self.buckets, self.slots, self._axes.saved_name)
        for bucket in self.buckets:
            if bucket.on_host and self._host is not None:
                bucket.host = HostPart(self._host, bucket.length, bucket.master.dtype)
            same: Callable[[torch.Tensor], torch.Tensor] = functools.partial(broadcast, axis=bucket.over.same)
            fill(bucket, source, same if settle else lambda flat: flat)

    def unshard(self, names: frozenset[str]) -> None:
        """Lay the buckets out again with more unsharded parameters. Gradients stay in `.grad`."""
        unsharded = names | {slot.name for slot in self.slots if bucket_of(slot).whole}
        grads = {slot: slot.param.grad for slot in self.slots}
        weights = dict(self.full())
        for bucket in self.buckets:
            if bucket.host is not None:
                bucket.host.release()
        self.lay_out(lambda slot: weights[slot.name], unsharded, settle=False)
        for slot, grad in grads.items():
            slot.grad, slot.param.grad = None, grad

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield unrounded weights, gathered over the shard axes, but not over tp and ep. A collective."""
        for bucket in self.buckets:
            flat = bucket.weights
            if bucket.is_mixed:
                shard = bucket.master
                flat = shard if bucket.num_shards == 1 else all_gather(shard.to(flat.device), bucket.over.shard)
            yield from ((slot.name, slot.of(flat)) for slot in bucket.slots)

    def local(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Yield this rank's shards of the masters."""
        for slot in self.slots:
            shard = slot.view_in(bucket_of(slot).master, bucket_of(slot).own)
            if shard is not None:
                yield slot, shard.detach()

    def counted(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield this rank's shards of the masters, each with the number of ranks that store the same shard."""
        return ((shard, bucket_of(slot).over.share[1]) for slot, shard in self.local())

    def has_shards(self, names: Collection[str]) -> bool:
        """Return True if some of these parameters are sharded."""
        buckets = [bucket_of(slot) for slot in self.slots if slot.name in names]
        return any(not bucket.whole and bucket.num_shards > 1 for bucket in buckets)

    def slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the model, masters for trained parameters. No collective."""
        yield from filter(None, map(self.placed.of, self.slots))
        yield from (self._axes.slice_of(name, tensor) for name, tensor in self.untrained.tensors())

    def check(self, wait: Callable[[], None]) -> None:
        """Update the master of each parameter that was written to. wait: waits for pending weights.

        Raises ModelError for a parameter that was moved, frozen, unfrozen or cast after `parallelize`.
        """
        update_written(self.slots, wait)
        self.untrained.check()


def bucket_of(slot: Slot) -> Any:
    assert slot.bucket is not None
    return slot.bucket
