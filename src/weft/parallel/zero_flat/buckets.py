"""Flat buckets: parameters of a module in contiguous memory, so that one collective communicates many of them.

All parameters of a bucket have one dtype. Its flat tensors hold `num_shards` parts, which are equal unless the plan has
`shard_shares`. Part r belongs to rank r of the shard axis, the only rank with master weights and optimizer states for
it. There are two layouts: usually, a parameter may cross part boundaries. With `whole` it does not, for optimizers that
need full matrices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from weft.comm.collectives import (
    PaddedGather,
    PaddedReduceScatter,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.low_rank import Matrix, matrices_of
from weft.config import partitioning as shares
from weft.errors import ModelError
from weft.memory.host_link import Waitable
from weft.memory.offload import HostPart
from weft.parallel.state.placement import Axes
from weft.private_torch import version_of
from weft.units import format_bytes

#: Parameters and parts start at multiples of this many elements, aligned for vector units and GPU copies.
ALIGNMENT = 16
#: Maximum fraction of padding in a bucket of the layout `whole`.
MOST_FILL = 0.05
#: Padding above this size raises an error if it also exceeds the parameters: too many ranks for few matrices.
MOST_FILL_BYTES = 2**30


@dataclass(slots=True, eq=False)
class Slot:
    """Location of one parameter in its bucket.

    Attributes:
        start: index of its first element in the flat tensors.
        is_shared: True if several modules use the parameter.
        grad: its view of the bucket's gradient, while that exists.
        expected, fired: how often autograd delivers its gradient in one backward: maximum so far, and current count.
        address, version: memory address and version counter of the parameter, to detect that it was moved or changed.
    """

    name: str
    param: nn.Parameter
    start: int
    bucket: Bucket = field(init=False)
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
        # The parameter's own memory order (channels_last) if it is dense.
        self.stride = torch.empty_like(self.param, device="meta").stride()

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's view of a flat tensor of the full bucket."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def inside(self, part: slice) -> tuple[int, int]:
        """Return start and end of the slot's overlap with a part, as indices in the bucket; equal if there is none."""
        start = max(self.start, part.start)
        return start, max(start, min(self.start + self.numel, part.stop))

    def is_in(self, part: slice) -> bool:
        """Return True if the slot overlaps a part. A parameter without elements is in the part with its start."""
        return self.start < part.stop and self.start + max(self.numel, 1) > part.start

    def elements_in(self, whole: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the elements of a full tensor that are in a part: in the parameter's shape if all are, else 1-D."""
        start, end = self.inside(part)
        if end - start == self.numel:
            return whole
        if self.stride != whole.stride():
            whole = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((self.numel,), (1,))[start - self.start : end - self.start]

    def view_in(self, shard: torch.Tensor, part: slice) -> torch.Tensor | None:
        """Return the parameter's view of a part: in its shape, 1-D if only some elements are there, or None."""
        if not self.is_in(part):
            return None
        start, end = self.inside(part)
        offset = start - part.start
        if end - start == self.numel:
            return shard.as_strided(self.shape, self.stride, shard.storage_offset() + offset)
        return shard[offset : offset + end - start]


class Arriving(Protocol):
    """New weights whose all-gather is in flight."""

    def wait(self) -> torch.Tensor: ...


@dataclass(slots=True, eq=False)
class Bucket:
    """Slots that are communicated together, in `num_shards` parts. This rank's part has `length` elements.

    Attributes:
        sizes: elements of each part if they are unequal; () if all have `length` elements.
        own: range of this rank's part in the flat tensors.
        whole: True for the layout in which no parameter crosses part boundaries.
        gaps: ranges of the flat tensors that contain no parameter.
        weights: flat, in the compute dtype; the parameters are views of it.
        master: this rank's part of the unrounded weights; a slice of `weights` if nothing is rounded.
        grads: full flat gradients in the master dtype, or None if unused.
        shard: this rank's part of the gradient sums.
        loose: sums that are still in autograd's tensors and not in `shard`, in any dtype, with their slots.
        collected: True if gradients of this step are in `grads`, not only in autograd's tensors.
        differs: True if weight differences are communicated instead of weights, so that masters are separate tensors.
        is_rounded: True if `weights` hold the rounded master as the optimizer left it.
        on_host: True if the master and its gradient for the optimizer are on the host. `host` stores both.
        over: axes over which the bucket is sharded and summed.
        arriving: all-gather of new weights in flight, or None.
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
    sizes: tuple[int, ...] = ()
    on_host: bool = False
    differs: bool = False
    grads: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    loose: list[tuple[Slot, torch.Tensor]] | None = None
    collected: bool = False
    is_rounded: bool = False
    host: HostPart | None = None
    over: Axes = field(init=False)
    arriving: Arriving | None = None

    @property
    def size(self) -> int:
        return sum(self.sizes) or self.length * self.num_shards

    @property
    def is_mixed(self) -> bool:
        return self.on_host or self.differs or self.weights.dtype != self.master.dtype

    def found(self) -> list[tuple[Slot, torch.Tensor]] | None:
        """Return the gradients in autograd's tensors, with the parameters' strides.

        Return None if a gradient is missing, sparse or not floating-point, or if no parameter has elements.
        """
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
        """Return the gradients of `found` as parts of a flat tensor, or None if `found` returns None."""
        if (found := self.found()) is None:
            return None
        lines = [(slot.start, grad.as_strided((slot.numel,), (1,))) for slot, grad in found]
        return Parts(lines, self.size, self.master.dtype)

    def use_grads(self, flat: torch.Tensor) -> None:
        """Use `flat` for full gradients. Its values may be uninitialized; elements of no parameter are set to zero."""
        self.grads = flat
        for gap in self.gaps:
            flat[gap].zero_()
        for slot in self.slots:
            slot.grad = slot.of(flat)

    def collect(self) -> None:
        if self.loose is None:
            return
        if self.grads is None:
            self.use_grads(torch.empty(self.size, dtype=self.master.dtype, device=self.weights.device))
        assert self.grads is not None
        for slot, grad in self.loose:
            slot.of(self.grads).copy_(grad)
        self.loose, self.shard, self.collected = None, self.grads[self.own], True

    def drop_grads(self) -> torch.Tensor | None:
        """Remove the full gradients from the bucket, and return them. The parameters have no gradient afterwards."""
        flat, self.grads, self.collected = self.grads, None, False
        for slot in self.slots:
            slot.grad = None
            slot.param.grad = None
        return flat


#: The full, unrounded weight of a slot; None if its values are loaded later.
WeightOf = Callable[[Slot], torch.Tensor | None]


def fill(bucket: Bucket, source: WeightOf, settle: Callable[[torch.Tensor], object]) -> None:
    """Fill weights and masters from full, unrounded tensors, and make the parameters views of the weights.

    settle: function that makes the flat, unrounded weights equal on all ranks, in place.
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
        else:  # clone, so that the other ranks' parts are freed
            bucket.master = own if own.numel() == full.numel() else own.clone()
    else:
        bucket.weights, bucket.master = full, full[bucket.own]
    for slot in bucket.slots:
        view = slot.of(bucket.weights)
        slot.param.grad = None
        slot.param.data = view
        # Autograd leaves gradients in the dtype of their computation, because they are read only once, when they are
        # summed. A parameter that several modules use is the exception, because autograd adds its gradients.
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
    shard_shares: Sequence[int] = (),
) -> list[Bucket]:
    """Build empty buckets in the order in which backward completes them: the last parameters first.

    whole: names of parameters that must not cross part boundaries. host: names of parameters whose masters are on the
    host. shard_shares: shares of the ranks, or () for equal parts. Raises ModelError if most of the memory would be
    padding with this number of ranks, and for unequal shares with `whole`.
    """
    weights = tuple(shard_shares) if len(shard_shares) == shard.size > 1 else (1,) * shard.size
    if shard_shares and whole:
        raise ModelError(
            "shard_shares: the optimizer needs full matrices, which are not divided by shares. Leave shard_shares out, "
            "or use AdamW or SGD."
        )
    before = sum(weights[: shard.rank])
    kinds: dict[tuple[object, ...], list[Slot]] = {}
    for slot in reversed(slots):
        key = (slot.name in whole and shard.size > 1, slot.name in host, formats[slot.param], slot.param.device)
        kinds.setdefault(key, []).append(slot)
    limit = max(1, bucket_bytes // master.itemsize)
    groups: list[tuple[list[Slot], int, bool]] = []
    for key, members in kinds.items():
        # The first bucket is small on a GPU too, so that gradient communication starts early.
        first = max(1, min(bucket_bytes, shares.bucket_bytes("cpu")) // master.itemsize)
        found = _undivided(members, limit, shard.size) if key[0] else _slices(members, (first, limit), sum(weights))
        _refuse_fill(found, shard, master.itemsize)
        groups += found
    position = {id(slot): index for index, slot in enumerate(reversed(slots))}
    groups.sort(key=lambda group: max(position[id(slot)] for slot in group[0]))
    return [
        Bucket(
            index,
            members,
            length * weights[shard.rank],
            num_shards=shard.size,
            own=slice(length * before, length * (before + weights[shard.rank])),
            whole=is_whole,
            weights=torch.empty(0, dtype=formats[members[0].param], device=members[0].param.device),
            master=torch.empty(0, dtype=master, device=members[0].param.device),
            gaps=_gaps(members, length * sum(weights)),
            sizes=() if len(set(weights)) == 1 else tuple(length * weight for weight in weights),
            on_host=members[0].name in host,
        )
        for index, (members, length, is_whole) in enumerate(groups)
    ]


def put_in_order(buckets: list[Bucket], slots: Sequence[Slot], saved_name: Callable[[str], str]) -> None:
    """Sort the list of buckets of several kinds by the order in which backward completes them, and renumber them.

    Buckets whose reduction waits for other stages come last, in the order of their names, which are equal on all
    stages. slots: slots in the order of the model. saved_name: returns a parameter's name in checkpoints.
    """
    position = {id(slot): index for index, slot in enumerate(reversed(slots))}

    def order(bucket: Bucket) -> tuple[bool, str, int]:
        if bucket.over.waits:
            return True, max(saved_name(slot.name) for slot in bucket.slots), bucket.index
        return False, "", max(position[id(slot)] for slot in bucket.slots)

    buckets.sort(key=order)
    for index, bucket in enumerate(buckets):
        bucket.index = index


def _slices(slots: Iterable[Slot], limits: tuple[int, int], num_shards: int) -> list[tuple[list[Slot], int, bool]]:
    """Lay out slots one after another, and set `slot.start`. Return (slots, elements per shard, False) of each bucket.

    limits: maximum number of elements of the first and of other buckets.
    """
    groups: list[list[Slot]] = []
    end = 0
    for slot in slots:
        if not groups or end + slot.numel > limits[len(groups) > 1]:
            groups.append([])
            end = 0
        groups[-1].append(slot)
        slot.start = end
        end += _aligned(slot.numel)
    ends = [group[-1].start + _aligned(group[-1].numel) for group in groups]
    return [(group, _aligned(-(-end // num_shards)), False) for group, end in zip(groups, ends, strict=True)]


def _undivided(slots: list[Slot], limit: int, num_shards: int) -> list[tuple[list[Slot], int, bool]]:
    """Lay out each parameter within one shard. Return (slots, elements per shard, True) of each bucket.

    A bucket ends once it has `limit` elements and its padding is within MOST_FILL. The last bucket may have fewer
    elements, and a single bucket more padding.
    """
    groups: list[list[Slot]] = [[]]
    for slot in slots:
        if _fits(groups[-1], limit, num_shards):
            groups.append([])
        groups[-1].append(slot)
    while len(groups) > 1 and not _fits(groups[-1], 1, num_shards):
        last = groups.pop()
        groups[-1] += last
    return [(group, _balance(group, num_shards), True) for group in groups]


def _refuse_fill(groups: list[tuple[list[Slot], int, bool]], shard: Axis, itemsize: int) -> None:
    """Raise ModelError if padding exceeds the parameters, and also MOST_FILL_BYTES."""
    numel = sum(slot.numel for group, _, _ in groups for slot in group)
    fill = sum(length * shard.size for _, length, _ in groups) - numel
    if fill <= numel or fill * itemsize <= MOST_FILL_BYTES:
        return
    most = max(1, numel // max(slot.numel for group, _, _ in groups for slot in group))
    raise ModelError(
        f"{shard.name}={shard.size}: the optimizer needs full matrices, and dividing them over this number of ranks "
        f"pads {format_bytes(numel * itemsize)} of weights with {format_bytes(fill * itemsize)}. Use "
        f"{shard.name}={most} or less with the other ranks in dp_replicate, or AdamW."
    )


def _fits(group: list[Slot], least: int, num_shards: int) -> bool:
    numel = sum(_aligned(slot.numel) for slot in group)
    return numel >= least and _balance(group, num_shards) * num_shards <= numel * (1 + MOST_FILL)


def _balance(group: list[Slot], num_shards: int) -> int:
    """Assign each parameter, largest first, to the part with the fewest elements, and set `slot.start`.

    Return the length of a part.
    """
    ends = [(0, part) for part in range(min(num_shards, len(group)))]  # a heap; other parts stay empty
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
    gaps, end = list[slice](), 0
    for slot in sorted(slots, key=lambda slot: slot.start):
        if slot.start > end:
            gaps.append(slice(end, slot.start))
        end = max(end, slot.start + slot.numel)  # an empty parameter may share the start of another one
    if end < size:
        gaps.append(slice(end, size))
    return gaps


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


# Collectives over the parts of a bucket.


def gather_parts(bucket: Bucket, part: torch.Tensor, out: torch.Tensor | None = None) -> Arriving:
    """Start the all-gather of a bucket's parts over its shard axis. part: this rank's part. out: the flat result."""
    if bucket.sizes:
        return PaddedGather(part, bucket.over.shard, bucket.sizes, out)
    return start_all_gather(part, bucket.over.shard, out=out)


# Collectives that sum a bucket's gradients one after another, and the wire format of each.

#: Kinds of gradient sums of a bucket: over its shards, over its replicas, and in a custom training loop.
_WAYS = ("shard", "replicas", "own")


class BucketSums:
    """Starts the gradient sums of buckets. coders: they encode gradients for communication.

    The `compress` format applies only to the outermost data axis, which is summed last, after exact sums.
    """

    def __init__(self, coders: Coders):
        self.coders = coders

    def discard(self, bucket: Bucket) -> None:
        """Drop the state that this step added to a bucket's wire formats."""
        for way in _WAYS:
            self._coder(bucket, way).discard()
            self._outer_coder(bucket, way).discard()

    def shard_coder(self, bucket: Bucket) -> Coder:
        """Return the coder of the sum over the ranks that shard a bucket."""
        return self._sending(bucket, "shard") if self.divides(bucket) else self._coder(bucket, "shard")

    def divides(self, bucket: Bucket) -> bool:
        """Return True if the shard axis of a bucket is the outermost axis."""
        return bucket.num_shards > 1 and bucket.over.outer.ranks == bucket.over.shard.ranks

    def debtor(self, bucket: Bucket) -> Coder | None:
        """Return the coder that stores the error feedback of a bucket, or None."""
        if not self.coders.outer_wire.feeds_back or bucket.over.outer.size == 1:
            return None
        return self._outer_coder(bucket, "shard" if self.divides(bucket) else "replicas")

    def over_shards(self, bucket: Bucket, flat: torch.Tensor | Parts, out: torch.Tensor) -> Waitable:
        """Start the sum of which every rank gets its part. flat: gradients of all parts. out: this rank's part."""
        if bucket.sizes and isinstance(flat, torch.Tensor):
            return PaddedReduceScatter(flat, bucket.over.shard, bucket.sizes, out)
        return start_reduce_scatter(flat, bucket.over.shard, out=out, wire=self.shard_coder(bucket))

    def over_replicas(self, bucket: Bucket, sums: torch.Tensor, parts: Parts | None = None) -> Pending:
        """Start the sum over the ranks with equal parts. parts: the input, if it is not in `sums`."""
        over, coder = bucket.over, self._coder(bucket, "replicas")
        if over.outer.size == 1 or self.divides(bucket):
            return start_all_reduce(sums, over.replicate, parts=parts, wire=coder)
        if parts is None:
            # Decoding a block that is not finite also fills the padding between parameters. No later step resets it.
            own = slice(0, bucket.size) if bucket.num_shards == 1 else bucket.own
            for gap in bucket.gaps:
                sums[max(gap.start - own.start, 0) : max(gap.stop - own.start, 0)].zero_()
        if over.beside.size > 1:
            start_all_reduce(sums, over.beside, parts=parts, wire=coder).wait()
            parts = None
        return start_all_reduce(sums, over.outer, parts=parts, wire=self._sending(bucket, "replicas"))

    def over_all(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Start the sum of a full bucket in a custom training loop."""
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
        """Return the coder over the outermost data axis.

        For low-rank compression, set which ranges of the bucket are matrices.
        """
        coder = self._outer_coder(bucket, way)
        if rank := coder.wire.spec.rank:
            # By rows, because a bucket's part contains full rows of a matrix and parts of two rows, which are sent
            # uncompressed.
            span = slice(0, bucket.size) if self.divides(bucket) or bucket.num_shards == 1 else bucket.own
            coder.matrices = () if self.coders.is_exact else matrices_in(bucket, span, rank)
        return coder


def matrices_in(bucket: Bucket, span: slice, rank: int) -> list[Matrix]:
    """Return the matrices of a bucket's parameters in a span, with offsets relative to its start.

    If a span contains only some rows of a matrix, its full rows are returned. rank: rank of the approximation; matrices
    for which it does not save enough are omitted.
    """
    found: list[Matrix] = []
    for slot in bucket.slots:
        start, end = slot.inside(span)
        sizes = sorted(zip(slot.stride, slot.shape, strict=True), reverse=True)
        shape = [size for _, size in sizes]
        found += matrices_of(shape, start - slot.start, end - slot.start, slot.start - span.start, rank)
    return sorted(found)
