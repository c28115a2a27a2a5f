"""Flat buckets: the parameters of a module side by side in memory, so that one collective moves many of them.

A bucket's parameters share one format. Its flat tensors hold `num_shards` equal parts; part r belongs to rank r of
the shard axis, which alone keeps master weights and optimizer states for it. Where parameters lie is all that tells
the two ways of sharding apart: `slices` lets a parameter cross the borders between parts, `whole` does not, for
optimizers that must see whole matrices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from weft.comm.collectives import all_reduce, start_all_reduce
from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.low_rank import Matrix, matrices_of
from weft.config import partitioning as shares
from weft.errors import ModelError
from weft.memory.offload import HostPart
from weft.parallel.state.placement import Axes
from weft.private_torch import version_of
from weft.units import format_bytes

#: Parameters and parts begin at multiples of this many elements: aligned for vector units and for GPU copies.
ALIGNMENT = 16
#: `whole` accepts this share of a bucket as fill between the parts.
MOST_FILL = 0.05
#: So much fill, where it is more than the parameters, is refused: many ranks and few matrices.
MOST_FILL_BYTES = 2**30


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one parameter in its bucket.

    start: its first element in the flat tensors. is_shared: whether several modules have it.
    grad: its view into the bucket's gradient, while there is one.
    expected, fired: how often autograd delivers a gradient for it in one backward, at most so far and this time.
    """

    name: str
    param: nn.Parameter
    start: int
    bucket: Bucket | None = None
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    is_shared: bool = False
    grad: torch.Tensor | None = None
    expected: int = 1
    fired: int = 0
    address: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        self.shape = self.param.shape
        # The parameter's own order in memory (channels_last) where it is dense.
        self.stride = torch.empty_like(self.param, device="meta").stride()

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's view into a flat tensor of the whole bucket."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def inside(self, part: slice) -> tuple[int, int]:
        """First element and end, counted in the bucket, of what lies in a part; equal where nothing does."""
        start = max(self.start, part.start)
        return start, max(start, min(self.start + self.numel, part.stop))

    def is_in(self, part: slice) -> bool:
        """Whether any of it lies in a part; a parameter without elements lies where it starts."""
        return self.start < part.stop and self.start + max(self.numel, 1) > part.start

    def cut(self, whole: torch.Tensor, part: slice) -> torch.Tensor:
        """What of a whole tensor of the parameter's shape lies in a part: the parameter's own shape, or 1-D."""
        start, end = self.inside(part)
        if end - start == self.numel:
            return whole
        if self.stride != whole.stride():
            whole = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((self.numel,), (1,))[start - self.start : end - self.start]

    def piece(self, shard: torch.Tensor, part: slice) -> torch.Tensor | None:
        """What of the parameter lies in the flat tensor of a part: its own shape where all of it does, else 1-D."""
        if not self.is_in(part):
            return None
        start, end = self.inside(part)
        offset = start - part.start
        if end - start == self.numel:
            return shard.as_strided(self.shape, self.stride, shard.storage_offset() + offset)
        return shard[offset : offset + end - start]


class Arriving(Protocol):
    """New weights on their way."""

    def wait(self) -> torch.Tensor:
        """Wait until they are there, and return them."""
        ...


@dataclass(slots=True, eq=False)
class Bucket:
    """Slots that travel together, in `num_shards` parts of `length` elements.

    weights: flat, of the compute format; the parameters are views into it. master: this rank's part of the unrounded
    weights; a slice of `weights` where nothing is rounded. own: this rank's part of the flat tensors.
    grads: flat, whole, of the master's format; None while nobody needs it. shard: this rank's part of the sums.
    loose: the sums where autograd put them, in any format, each with its slot, where they are not in `shard`.
    collected: whether gradients of this step are in `grads`, not only where autograd put them.
    differs: whether what travels of new weights are differences, so that masters are tensors of their own.
    is_rounded: whether `weights` have the master as the optimizer left it.
    on_host: whether the master is on the host, and its gradient for the optimizer too: `host` holds both.
    axes: over whom it is divided and summed. arriving: the gather that brings new weights, while it is under way.
    """

    index: int
    slots: list[Slot]
    length: int
    num_shards: int
    own: slice
    whole: bool
    weights: torch.Tensor
    master: torch.Tensor
    gaps: list[slice]
    on_host: bool = False
    differs: bool = False
    grads: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    loose: list[tuple[Slot, torch.Tensor]] | None = None
    collected: bool = False
    is_rounded: bool = False
    host: HostPart | None = None
    axes: Axes | None = None
    arriving: Arriving | None = None

    @property
    def over(self) -> Axes:
        """The axes of its parameters, once they are known."""
        assert self.axes is not None
        return self.axes

    @property
    def size(self) -> int:
        return self.length * self.num_shards

    @property
    def is_mixed(self) -> bool:
        """Whether masters are tensors of their own."""
        return self.on_host or self.differs or self.weights.dtype != self.master.dtype

    def found(self) -> list[tuple[Slot, torch.Tensor]] | None:
        """The gradients where autograd put them, each dense as its parameter is; None where some are missing."""
        found: list[tuple[Slot, torch.Tensor]] = []
        for slot in self.slots:
            grad = slot.param.grad
            if grad is None or grad.layout != torch.strided or not grad.is_floating_point():
                return None
            if grad.stride() != slot.stride:
                grad = torch.empty_strided(slot.shape, slot.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            found.append((slot, grad.detach()))
        return found if any(slot.numel for slot in self.slots) else None

    def parts(self) -> Parts | None:
        """The same as parts of a flat tensor."""
        found = self.found()
        if found is None:
            return None
        lines = [(slot.start, grad.as_strided((slot.numel,), (1,))) for slot, grad in found]
        return Parts(lines, self.size, self.master.dtype)

    def use_grads(self, flat: torch.Tensor) -> None:
        """Take `flat` for whole gradients. Its contents may be anything; what no parameter owns becomes zero."""
        self.grads = flat
        for gap in self.gaps:
            flat[gap].zero_()
        for slot in self.slots:
            slot.grad = slot.of(flat)

    def collect(self) -> None:
        """Bring loose sums into `shard`."""
        if self.loose is None:
            return
        if self.grads is None:
            self.use_grads(torch.empty(self.size, dtype=self.master.dtype, device=self.weights.device))
        assert self.grads is not None
        for slot, grad in self.loose:
            slot.of(self.grads).copy_(grad)
        self.loose, self.shard, self.collected = None, self.grads[self.own], True

    def drop_grads(self) -> torch.Tensor | None:
        """Give the whole gradients up; the parameters have none from here."""
        flat, self.grads, self.collected = self.grads, None, False
        for slot in self.slots:
            slot.grad = None
            slot.param.grad = None
        return flat


#: The whole, unrounded weight of a slot; None where its values come later.
WeightOf = Callable[[Slot], torch.Tensor | None]


def fill(bucket: Bucket, source: WeightOf, settle: Callable[[torch.Tensor], object]) -> None:
    """Make weights and masters from whole, unrounded tensors, and the parameters views of the weights.

    settle: what makes the flat, unrounded weights equal on all ranks, in place.
    """
    full = torch.zeros(bucket.size, dtype=bucket.master.dtype, device=bucket.master.device)
    known = [(slot, weight) for slot in bucket.slots if (weight := source(slot)) is not None]
    for slot, weight in known:
        slot.of(full).copy_(weight)
    if known:
        settle(full)
    if bucket.is_mixed:
        bucket.weights = full.to(bucket.weights.dtype)
        own = full[bucket.own]
        if bucket.host:
            bucket.master = bucket.host.master.copy_(own)
        else:  # where other ranks have the rest, its memory goes
            bucket.master = own if own.numel() == full.numel() else own.clone()
    else:
        bucket.weights, bucket.master = full, full[bucket.own]
    for slot in bucket.slots:
        view = slot.of(bucket.weights)
        slot.param.grad = None
        slot.param.data = view
        # Autograd gives gradients in the format that it computed them in: they are read once, where they are summed up.
        # One that several modules use is the exception, since autograd adds their gradients.
        slot.param.grad_dtype = full.dtype if slot.is_shared else None
        slot.bucket, slot.address, slot.version = bucket, view.data_ptr(), version_of(slot.param)


def lay_out(
    slots: Sequence[Slot],
    formats: dict[nn.Parameter, torch.dtype],
    master: torch.dtype,
    shard: Axis,
    *,
    whole: frozenset[str] = frozenset(),
    host: frozenset[str] = frozenset(),
    bucket_bytes: int = shares.bucket_bytes("cpu"),
) -> list[Bucket]:
    """Buckets, without contents yet, in the order in which backward completes them: the last parameters first.

    whole: names of the parameters that must not cross the borders between parts. host: of those whose masters are
    on the host. Raises ModelError where so many ranks would leave most of the memory empty.
    """
    kinds: dict[tuple[object, ...], list[Slot]] = {}
    for slot in reversed(slots):
        key = (slot.name in whole and shard.size > 1, slot.name in host, formats[slot.param], slot.param.device)
        kinds.setdefault(key, []).append(slot)
    limit = max(1, bucket_bytes // master.itemsize)
    groups: list[tuple[list[Slot], int, bool]] = []
    for key, members in kinds.items():
        # The first is small on a GPU too: so that gradients begin to travel soon.
        first = max(1, min(bucket_bytes, shares.bucket_bytes("cpu")) // master.itemsize)
        found = _whole(members, limit, shard.size) if key[0] else _slices(members, (first, limit), shard.size)
        _refuse_fill(found, shard, master.itemsize)
        groups += found
    position = {id(slot): index for index, slot in enumerate(reversed(slots))}
    groups.sort(key=lambda group: max(position[id(slot)] for slot in group[0]))
    buckets = [_bucket(index, *group, formats, master, shard) for index, group in enumerate(groups)]
    for bucket in buckets:
        bucket.on_host = bucket.slots[0].name in host
    return buckets


def put_in_order(buckets: list[Bucket], slots: Sequence[Slot], saved_name: Callable[[str], str]) -> None:
    """Sort buckets of several kinds by the order in which backward completes them.

    Those that wait for other stages come last. Their order follows from their names, which are the same on all stages.

    Args:
        buckets: sorted in place.
        slots: in the order of the model.
        saved_name: gives a parameter's name in checkpoints.
    """
    position = {id(slot): index for index, slot in enumerate(reversed(slots))}

    def order(bucket: Bucket) -> tuple[bool, str, int]:
        if bucket.over.waits:
            return True, max(saved_name(slot.name) for slot in bucket.slots), bucket.index
        return False, "", max(position[id(slot)] for slot in bucket.slots)

    buckets.sort(key=order)
    for index, bucket in enumerate(buckets):
        bucket.index = index


def _bucket(
    index: int,
    slots: list[Slot],
    length: int,
    whole: bool,
    formats: dict[nn.Parameter, torch.dtype],
    master: torch.dtype,
    shard: Axis,
) -> Bucket:
    device, size = slots[0].param.device, length * shard.size
    return Bucket(
        index=index,
        slots=slots,
        length=length,
        num_shards=shard.size,
        own=slice(length * shard.rank, length * (shard.rank + 1)),
        whole=whole,
        weights=torch.empty(0, dtype=formats[slots[0].param], device=device),
        master=torch.empty(0, dtype=master, device=device),
        gaps=_gaps(slots, size),
    )


def _slices(slots: Iterable[Slot], limits: tuple[int, int], num_shards: int) -> list[tuple[list[Slot], int, bool]]:
    """One after another, cut where a bucket is full. limits: elements of the first, and of each other."""
    groups: list[list[Slot]] = []
    end = 0
    for slot in slots:
        if not groups or end + slot.numel > limits[len(groups) > 1]:
            groups.append([])
            end = 0
        groups[-1].append(slot)
        slot.start = end
        end += _aligned(slot.numel)
    found: list[tuple[list[Slot], int, bool]] = []
    for group in groups:
        length = _aligned(-(-(group[-1].start + _aligned(group[-1].numel)) // num_shards))
        found.append((group, length, False))
    return found


def _whole(slots: list[Slot], limit: int, num_shards: int) -> list[tuple[list[Slot], int, bool]]:
    """Each parameter in one part; a bucket is as small as it can be without much fill."""
    groups: list[list[Slot]] = [[]]
    for slot in slots:
        if _fits(groups[-1], limit, num_shards):
            groups.append([])
        groups[-1].append(slot)
    while len(groups) > 1 and not _fits(groups[-1], 1, num_shards):
        last = groups.pop()
        groups[-1] += last
    return [(group, _spread(group, num_shards), True) for group in groups]


def _refuse_fill(groups: list[tuple[list[Slot], int, bool]], shard: Axis, itemsize: int) -> None:
    """ModelError where more than half of the flat memory, and more than MOST_FILL_BYTES, would hold nothing."""
    numel = sum(slot.numel for group, _, _ in groups for slot in group)
    fill = sum(length * shard.size for _, length, _ in groups) - numel
    if fill <= numel or fill * itemsize <= MOST_FILL_BYTES:
        return
    most = max(1, numel // max(slot.numel for group, _, _ in groups for slot in group))
    raise ModelError(
        f"{shard.name}={shard.size}: the optimizer needs whole matrices, and dividing them over so many ranks pads "
        f"{format_bytes(numel * itemsize)} of weights with {format_bytes(fill * itemsize)}. Use {shard.name}={most} "
        "or less with the other ranks in dp_replicate, or AdamW."
    )


def _fits(group: list[Slot], least: int, num_shards: int) -> bool:
    numel = sum(_aligned(slot.numel) for slot in group)
    return numel >= least and _spread(group, num_shards) * num_shards <= numel * (1 + MOST_FILL)


def _spread(group: list[Slot], num_shards: int) -> int:
    """Place each parameter, the largest first, in the part that is emptiest; returns the length of a part."""
    ends = [(0, part) for part in range(min(num_shards, len(group)))]  # a heap; further parts stay empty
    places: list[tuple[Slot, int, int]] = []
    for slot in sorted(group, key=lambda slot: -slot.numel):
        end, part = ends[0]
        places.append((slot, part, end))
        heapq.heapreplace(ends, (end + _aligned(slot.numel), part))
    length = max(max(ends)[0], ALIGNMENT)
    for slot, part, offset in places:
        slot.start = part * length + offset
    return length


def _gaps(slots: list[Slot], size: int) -> list[slice]:
    gaps: list[slice] = []
    end = 0
    for slot in sorted(slots, key=lambda slot: slot.start):
        if slot.start > end:
            gaps.append(slice(end, slot.start))
        end = max(end, slot.start + slot.numel)  # an empty parameter may lie where another begins
    if end < size:
        gaps.append(slice(end, size))
    return gaps


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


# Over which ranks a bucket's gradients add up, one way after another, and what travels on each.

#: The ways of a bucket's gradients: to the ranks that divide it, over those with equal parts, and in a user's own loop.
_WAYS = ("shard", "replicas", "own")


class BucketSums:
    """Starts sums of buckets. coders: what travels in place of gradients.

    What `compress` names travels over the outermost data axis alone, and last: of sums that are exact.
    """

    def __init__(self, coders: Coders):
        self.coders = coders

    def discard(self, bucket: Bucket) -> None:
        """Forget what the wires of a bucket would carry from this step."""
        for way in _WAYS:
            self._coder(bucket, way).discard()
            self._outer_coder(bucket, way).discard()

    def shard_coder(self, bucket: Bucket) -> Coder:
        """Return the wire of the way to the ranks that divide a bucket."""
        return self._sending(bucket, "shard") if self.divides(bucket) else self._coder(bucket, "shard")

    def divides(self, bucket: Bucket) -> bool:
        """Whether what goes over the outermost axis are the parts of the ranks that divide a bucket."""
        return bucket.num_shards > 1 and bucket.over.outer.ranks == bucket.over.shard.ranks

    def debtor(self, bucket: Bucket) -> Coder | None:
        """Return the coder that owes what it rounds off of a bucket; None: none does."""
        if not self.coders.outer_wire.feeds_back or bucket.over.outer.size == 1:
            return None
        return self._outer_coder(bucket, "shard" if self.divides(bucket) else "replicas")

    def over_replicas(self, bucket: Bucket, sums: torch.Tensor, parts: Parts | None = None) -> Pending:
        """Begin to add up, in place, over those with equal parts.

        Args:
            bucket: of the gradients.
            sums: what this rank has of them, and gets.
            parts: where they lie, if not in `sums` yet.
        """
        over, coder = bucket.over, self._coder(bucket, "replicas")
        if over.outer.size == 1 or self.divides(bucket):
            return start_all_reduce(sums, over.replicate, parts=parts, wire=coder)
        if parts is None:
            # What a wire made of a block that was not finite covers what lies between parameters too, and would stay.
            own = slice(0, bucket.size) if bucket.num_shards == 1 else bucket.own
            for gap in bucket.gaps:
                sums[max(gap.start - own.start, 0) : max(gap.stop - own.start, 0)].zero_()
        if over.beside.size > 1:
            start_all_reduce(sums, over.beside, parts=parts, wire=coder).wait()
            parts = None
        return start_all_reduce(sums, over.outer, parts=parts, wire=self._sending(bucket, "replicas"))

    def over_all(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Begin to add up a whole bucket, in place, in a user's own loop."""
        over, coder = bucket.over, self._coder(bucket, "own")
        if over.outer.size == 1:
            return start_all_reduce(flat, over.over, wire=coder)
        all_reduce(flat, over.inner, wire=coder)
        return start_all_reduce(flat, over.outer, wire=self._outer_coder(bucket, "own"))

    def _coder(self, bucket: Bucket, way: str) -> Coder:
        return self.coders[f"{bucket.slots[0].name} {way}"]

    def _outer_coder(self, bucket: Bucket, way: str) -> Coder:
        return self.coders.outer(f"{bucket.slots[0].name} {way}")

    def _sending(self, bucket: Bucket, way: str) -> Coder:
        """The same, which knows where matrices lie."""
        coder = self._outer_coder(bucket, way)
        if rank := coder.wire.spec.rank:
            # Row by row: a part of a bucket holds whole rows of a matrix and pieces of two, which travel as they are.
            span = slice(0, bucket.size) if self.divides(bucket) or bucket.num_shards == 1 else bucket.own
            coder.matrices = () if self.coders.is_exact else matrices_in(bucket, span, rank)
        return coder


def matrices_in(bucket: Bucket, span: slice, rank: int) -> list[Matrix]:
    """Return the matrices of a bucket's parameters, or those of their rows that lie in a span, counted from its start.

    Args:
        bucket: of the parameters.
        span: first element and end in the bucket.
        rank: at which a matrix must be worth its while.
    """
    found: list[Matrix] = []
    for slot in bucket.slots:
        start, end = slot.inside(span)
        sizes = sorted(zip(slot.stride, slot.shape, strict=True), reverse=True)
        shape = [size for _, size in sizes]
        found += matrices_of(shape, start - slot.start, end - slot.start, slot.start - span.start, rank)
    return sorted(found)
