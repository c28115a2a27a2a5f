"""Overlap of ZeRO-1/2 weight all-gathers with the next forward.

The all-gathers start in the order in which forward needs the weights, so all but the first overlap with it. Each
repeated block waits for its own weights when it is called, and so does a layer outside blocks in models of transformers
and Weft. This requires that the module was called in an earlier forward, because some models read a block's weights
without calling it. For all other weights, forward waits before it starts. Any read of parameters waits for all weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import start_all_gather
from weft.comm.wire.wire_format import find_wire
from weft.models.adapters import adapted
from weft.models.inspect import hugging_face, layers
from weft.models.inspect.blocks import repeated_blocks, replace_class
from weft.parallel.zero_flat.buckets import Bucket, Slot, gather_parts
from weft.private_torch import uncompiled


class AwaitsWeights(nn.Module):
    """Mixin that waits for the module's weights in `__call__`, and for all weights when parameters are read."""

    _weft_arrival: Arrival

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _outside_graphs(self._weft_arrival.begin)
        return super().__call__(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._weft_arrival.end()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._weft_arrival.end()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._weft_arrival.end()
        return super().load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the arguments to copy or pickle it as a module of the original class, which waits for nothing."""
        self._weft_arrival.end()
        _, own = type(self).__bases__
        return _made, (own,), {name: value for name, value in self.__dict__.items() if name != "_weft_arrival"}


class Arrival:
    """The wait of one module for the weights of its slots. It has a weak reference to the engine's prefetcher.

    slots: the slots, or None for all slots for which no other module waits.
    """

    def __init__(self, arrivals: WeightPrefetcher, slots: Sequence[Slot] | None = None):
        self._arrivals = weakref.ref(arrivals)
        self._slots = slots
        self.was_called = False

    def begin(self) -> None:
        """Wait for the module's weights at its call."""
        self.was_called = True
        if (found := self._arrivals()) is not None:
            found.wait_for_rest() if self._slots is None else found.wait_for(self._slots)

    def end(self) -> None:
        """Wait for all weights before parameters are read."""
        if not torch.compiler.is_compiling() and (found := self._arrivals()) is not None:
            found.wait()


class WeightDifference:
    """Update of a bucket's weights by quantized differences from its masters, instead of an all-gather (gather=diff4).

        seen += D(E(master - seen))

    `seen` is `weights`, which forward uses. It is bitwise equal on all ranks, because each rank decodes all parts. The
    rounding error of a difference remains between master and seen, and is part of the next step's difference, so no
    other state is needed. Scheme: weight differences of SDP4Bit (Jia et al. 2024, arXiv 2410.15526).
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket):
        self._wire, self._bucket = find_wire("diff4"), bucket
        step = bucket.master.detach() - bucket.weights[bucket.own].to(bucket.master.dtype)
        codes, _ = self._wire.encode(step.view(1, -1), None)
        self._pending = start_all_gather(codes.view(-1), bucket.over.shard)

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        """Wait for the differences of all ranks, and add them. Returns the weights."""
        bucket = self._bucket
        codes_RC = self._pending.wait().view(bucket.num_shards, -1)
        for rank, weights in enumerate(bucket.weights.view(bucket.num_shards, -1)):
            weights.add_(self._wire.decode(codes_RC[rank : rank + 1], bucket.length, bucket.master.dtype).view(-1))
        return bucket.weights


class WeightPrefetcher:
    """Tracks weight all-gathers of one model that are in flight, and the modules that wait for them."""

    def __init__(self, model: nn.Module, slots: Sequence[Slot]):
        self._model = weakref.ref(model)
        self._slots = slots
        self._units: dict[Slot, list[Arrival]] = {}
        self._waiting: list[Bucket] = []  # in the order of their start

    def watch(self) -> None:
        """Make modules wait for their own weights. Call it before the first forward, which may compile them.

        Does nothing if no bucket is sharded, or if it was called before.
        """
        model = self._model()
        if model is None or self._units or all(slot.bucket.num_shards == 1 for slot in self._slots):
            return
        by_param = {id(slot.param): slot for slot in self._slots}
        units = list(_units(model))
        inside = {part: unit for unit in units for part in unit.modules()}
        owners: dict[Slot, list[nn.Module | None]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                if id(param) in by_param:
                    owners.setdefault(by_param[id(param)], []).append(inside.get(module))
        held: dict[nn.Module, list[Slot]] = {}
        for slot, modules in owners.items():
            for module in dict.fromkeys(modules):
                if module is not None and None not in modules:
                    held.setdefault(module, []).append(slot)
        for module, members in held.items():
            arrival = Arrival(self, members)
            replace_class(module, AwaitsWeights, arrival=arrival)
            for slot in members:
                self._units.setdefault(slot, []).append(arrival)
        if held and not isinstance(model, AwaitsWeights):
            replace_class(model, AwaitsWeights, arrival=Arrival(self))

    def start(self, bucket: Bucket, *, is_update: bool) -> None:
        """Start the all-gather of a bucket's masters into the weights of all ranks. Collective over its shard axis.

        is_update: True after an optimizer step. Buckets that support differences then send only those.
        """
        own = bucket.weights[bucket.own]
        if bucket.differs and is_update:
            bucket.arriving = WeightDifference(bucket)
            self._waiting.append(bucket)
            return
        if bucket.host is not None:
            bucket.host.bring(own).wait()
        elif bucket.is_mixed and not bucket.is_rounded:
            own.copy_(bucket.master)
        bucket.is_rounded = False
        bucket.arriving = gather_parts(bucket, own, bucket.weights)
        self._waiting.append(bucket)

    @property
    def is_watched(self) -> bool:
        return bool(self._units)

    def start_rest(self, buckets: Sequence[Bucket], follow: bool, *, is_update: bool) -> None:
        """Start the all-gathers of buckets without a pending one, and wait for all of them.

        follow: True to return without waiting if modules wait for their weights, after `watch`.
        """
        for bucket in reversed(buckets):  # in the order of the next forward
            if bucket.arriving is None:
                self.start(bucket, is_update=is_update)
        if not (follow and self.is_watched):
            self.wait()

    def wait(self) -> None:
        for bucket in self._waiting:
            _wait_for_bucket(bucket)
        self._waiting = []

    def wait_for(self, slots: Sequence[Slot]) -> None:
        if self._waiting:
            for slot in slots:
                _wait_for_bucket(slot.bucket)

    def wait_for_rest(self) -> None:
        """Wait, before a forward, for the weights for which no module waits when it is called."""
        if self._waiting:
            for bucket in self._waiting:
                for units in map(self._units.get, bucket.slots):
                    if not units or not all(unit.was_called for unit in units):
                        _wait_for_bucket(bucket)
            self._waiting = [bucket for bucket in self._waiting if bucket.arriving is not None]


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that can wait for their own weights: blocks, and other layers of transformers and Weft models."""
    blocks = list(repeated_blocks(model).values())
    yield from blocks
    is_known = isinstance(model, layers.KnownModel) or hugging_face.is_hugging_face(model)
    if not is_known or adapted(model) is not None:  # merging an adapter makes its layers plain again
        return
    inside = {part for block in blocks for part in block.modules()}
    for module in model.modules():
        if module not in inside and module is not model and not list(module.children()) and list(module.parameters()):
            yield module


def _wait_for_bucket(bucket: Bucket) -> None:
    if bucket.arriving is not None:
        bucket.arriving.wait()
        bucket.arriving = None


def _made(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


@uncompiled
def _outside_graphs(act: Callable[[], None]) -> None:
    with torch.no_grad():
        act()
