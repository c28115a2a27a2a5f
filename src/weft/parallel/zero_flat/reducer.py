"""Gradient reduction: gradients move from autograd's tensors into buckets and are summed over the ranks.

A bucket is reduced when autograd has delivered its last gradient of the last microbatch, while backward continues.
Buckets are reduced in the same order on all ranks, independent of autograd's order. A parameter without a gradient
counts as zero, because ranks may take different branches.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.pending import Pending
from weft.comm.wire.coder import Coders
from weft.comm.wire.wire_format import Wire
from weft.errors import CommError
from weft.memory.host_link import Waitable
from weft.parallel.state.placement import AxisMap
from weft.parallel.zero.engine import GradientReducer, Phase
from weft.parallel.zero_flat.buckets import Bucket, BucketSums, Slot, gather_parts
from weft.private_torch import foreach_mul_, foreach_norm

#: Maximum number of buckets with full gradients in flight, if a completed one frees memory: at stage 2, and for
#: gradients in autograd's tensors. The next gradients then reuse that memory while it is still in the caches.
MOST_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class _PendingReduction:
    """A bucket's reduction in flight. add: sum to add to the shard, or None. final: True for the step's last one."""

    pending: Waitable
    add: torch.Tensor | None = None
    final: bool = True


@dataclass(slots=True)
class _Pass:
    """Reductions of one microbatch.

    Attributes:
        launches: True if buckets are reduced while backward runs.
        missing: for each bucket, the number of its parameters whose gradient is incomplete. It is 1 more for a bucket
            whose reduction waits for other pipeline stages, so that backward does not start it.
        next: index of the first bucket whose reduction has not started.
    """

    launches: bool = False
    missing: list[int] = field(default_factory=list)
    next: int = 0


class Reducer(GradientReducer):
    """Reduces the gradients of one step, bucket by bucket.

    `coders` store the state of wire formats. `holds`: True if no gradient may be communicated before the microbatch
    ends.

    Args:
        stage: 2 frees a bucket's full gradient as soon as it is reduced.
        note: called with each bucket that gets a gradient outside microbatches.
        wire, outer_wire: wire formats of gradients in general, and over the outermost data axis.
        each: True to reduce after each microbatch, not only after the last (stage 2).
    """

    def __init__(
        self,
        slots: list[Slot],
        axes: AxisMap,
        stage: int,
        device: torch.device,
        note: Callable[[Bucket], None],
        wire: Wire,
        outer_wire: Wire | None = None,
        each: bool = False,
    ):
        super().__init__()
        self.buckets: list[Bucket] = []
        self.holds = False
        self._slots, self._axes, self._stage, self._each, self._note = slots, axes, stage, each, note
        self.coders = Coders(wire, outer_wire)
        self.sums = BucketSums(self.coders)
        self._has_seen_backward = False
        self._pass = _Pass()
        self._under_way: dict[int, _PendingReduction] = {}
        self._replica_sums: list[Pending] = []
        self._reduced: set[int] = set()  # indices of buckets reduced in this step
        self._late: list[int] = []
        self._first_late = -1  # from the last sums, read after the next step has begun
        self._norm_squared = torch.zeros((), dtype=torch.float64, device=device)
        self._num_late = torch.zeros_like(self._norm_squared)
        #: Pending factor of all gradients, if the optimizer applies it when it reads them.
        self.factor: float | torch.Tensor = 1.0
        for index, slot in enumerate(slots):
            # A weak reference, because torch's garbage collector cannot reach these hooks: the reducer and its mesh
            # would leak.
            slot.param.register_post_accumulate_grad_hook(functools.partial(_arrived, weakref.ref(self), index))

    @property
    def has_unbucketed(self) -> bool:
        """True if some sums are still in autograd's tensors."""
        return any(bucket.loose is not None for bucket in self.buckets)

    def begin_step(self) -> None:
        for pending in (*(one.pending for one in self._under_way.values()), *self._replica_sums):
            pending.wait()
        self.phase = Phase.ACCUMULATE
        self._under_way, self._replica_sums, self._reduced, self._late = {}, [], set(), []
        self._pass.next, self.factor = 0, 1.0
        self.forget()
        self.clear(self._slots)

    def _begin_pass(self, last: bool) -> None:
        # In the first backward, the number of deliveries per parameter is still unknown.
        launches = self._has_seen_backward and (last or self._each) and not self.holds
        self._pass = _Pass(launches, [len(bucket.slots) + bucket.over.waits for bucket in self.buckets])
        for slot in self._slots:
            slot.fired = 0

    def _end_pass(self, last: bool, completed: bool) -> None:
        for slot in self._slots:
            slot.expected = max(slot.expected, slot.fired)
        self._has_seen_backward = True
        if self._each and not last and completed:
            self._reduce_rest(final=False)

    def finish(self, totals: torch.Tensor | None) -> None:
        self._reduce_rest()
        for pending in self._replica_sums:
            pending.wait()
        self._replica_sums = []
        for bucket in self.buckets:
            if (owed := self.coders.owed.get(bucket.slots[0].name)) is not None:
                shard_of(bucket).add_(owed, alpha=self.coders.unit)
        self.send()
        self._sum(totals)
        self.phase = Phase.REDUCED

    def send(self) -> None:
        """Start the copies of gradient sums to the host for buckets whose optimizer is there, if not started yet."""
        for bucket in self.buckets:
            if bucket.host is not None and not bucket.host.is_sent:
                bucket.host.send(shard_of(bucket))

    def forget(self) -> None:
        """Mark the gradient sums on the host as outdated."""
        for bucket in self.buckets:
            if bucket.host is not None:
                bucket.host.forget()

    def wait_for_sums(self) -> None:
        for bucket in self.buckets:
            if bucket.host is not None:
                bucket.host.wait()

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the full gradient, or NaN if `check` would raise."""
        return torch.where(self._num_late > 0, torch.nan, self._norm_squared.sqrt()) * self.factor

    def check(self) -> None:
        """Raise CommError, on all ranks, if autograd delivered a gradient after its bucket's reduction had started."""
        if not self._num_late:
            return
        first = torch.tensor([self._first_late], device=self._num_late.device)
        found = all_gather(first, self._axes.stage).tolist()
        ranks = [self._axes.stage.ranks[place] for place, index in enumerate(found) if index >= 0]
        name = self._slots[max(found)].name if ranks else "of another stage"
        raise CommError(
            f"parameter {name!r}: on rank {', '.join(map(str, ranks))} autograd delivered its gradient more often in "
            f"one backward than ever before, after its reduction had begun. Run the step again: Weft now waits for it."
        )

    def scale(self, factor: float) -> None:
        """Multiply all gradients now, including the factor that the optimizer would apply."""
        factor, self.factor = factor * float(self.factor), 1.0
        if factor != 1.0 and self.buckets:
            self.wait_for_sums()  # pending copies to the host must not be scaled twice
            foreach_mul_([shard_of(bucket) for bucket in self.buckets], factor)
            for bucket in self.buckets:
                if bucket.host is not None:
                    bucket.host.scale(factor)
            self._norm_squared *= factor * factor

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradient sums, multiplied by the pending factor. Collective over the shard axes."""
        for bucket in self.buckets:
            flat = shard_of(bucket) if bucket.num_shards == 1 else gather_parts(bucket, shard_of(bucket)).wait()
            flat = flat if self.factor == 1.0 else flat * self.factor
            yield from ((slot.name, slot.of(flat)) for slot in bucket.slots)

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that store this rank's gradients."""
        flat = [tensor for bucket in self.buckets for tensor in (bucket.grads, bucket.shard)]
        loose = [grad for bucket in self.buckets for _, grad in bucket.loose or ()]
        return [*(tensor for tensor in flat if tensor is not None), *loose]

    def clear(self, slots: list[Slot]) -> None:
        """Clear the gradients of these parameters. At stage 2, a bucket without other gradients frees its memory."""
        for slot in slots:
            slot.param.grad = None
        for bucket in self.buckets:
            if any(slot.param.grad is not None for slot in bucket.slots):
                continue
            bucket.loose = None
            self.sums.discard(bucket)
            if bucket.grads is not None:
                bucket.collected = False
                if self._stage == 2:
                    bucket.drop_grads()

    @torch.no_grad()
    def take(self, bucket: Bucket) -> torch.Tensor:
        """Copy each `.grad` into the bucket's full gradients, and return them: (bucket.size,), in the master dtype.

        Each `.grad` becomes a view of them. Missing gradients become zeros.
        """
        flat = self._room(bucket)
        for slot in bucket.slots:
            if slot.param.grad is not slot.grad:
                _take(slot)
        return flat

    def _room(self, bucket: Bucket) -> torch.Tensor:
        if bucket.grads is None:
            bucket.use_grads(torch.empty(bucket.size, dtype=bucket.master.dtype, device=bucket.weights.device))
        assert bucket.grads is not None
        bucket.collected = True
        return bucket.grads

    def arrived(self, index: int, param: nn.Parameter) -> None:
        """Process a gradient that autograd has delivered for this parameter."""
        slot = self._slots[index]
        bucket, phase = slot.bucket, self.phase
        if bucket.index < self._pass.next and phase.in_pass:
            self._late.append(index)
            slot.fired += 1
            return
        if bucket.collected or not self.stays(bucket, phase):
            self._room(bucket)
            if param.grad is not slot.grad:
                _take(slot)
        elif (
            param.grad is not None
            and param.grad.dtype != bucket.master.dtype
            and (phase is Phase.INNER_PASS or slot.expected > 1 or not self._has_seen_backward)
        ):
            param.grad = param.grad.to(bucket.master.dtype)  # autograd adds to it; narrow dtypes lose bits
        # Otherwise the gradient stays in autograd's tensor, and is communicated from there.
        if not phase.in_pass:
            self._note(bucket)
            return
        slot.fired += 1
        if self._pass.launches and slot.fired == slot.expected:
            missing = self._pass.missing
            missing[bucket.index] -= 1
            while self._pass.next < len(self.buckets) and missing[self._pass.next] == 0:
                self._launch(self.buckets[self._pass.next], phase is Phase.LAST_PASS)

    def stays(self, bucket: Bucket, phase: Phase) -> bool:
        """Return True if gradients of a microbatch stay in autograd's tensors until they are reduced.

        Stage 2 needs memory for them until then in any case. At lower stages, the buffer of their sum already exists,
        and later microbatches would allocate additional tensors.
        """
        if phase is Phase.INNER_PASS:
            return self._stage == 2 and bucket.num_shards > 1 and not self._each
        return phase is Phase.LAST_PASS

    def _launch(self, bucket: Bucket, final: bool) -> None:
        """Start the reduction of a bucket. An unsharded bucket is reduced only after the last microbatch (`final`)."""
        self._pass.next = bucket.index + 1
        if bucket.num_shards == 1:
            self._launch_all_reduce(bucket, final)
            return
        parts = bucket.parts() if final and not bucket.collected and not bucket.sizes else None
        flat = self.take(bucket) if parts is None else None
        for slot in bucket.slots:
            slot.param.grad = None
        add = None
        if self._stage == 1 and flat is not None:
            bucket.shard = flat[bucket.own]
        elif bucket.shard is None:
            bucket.shard = torch.zeros(bucket.length, dtype=bucket.master.dtype, device=bucket.weights.device)
        elif bucket.index in self._reduced:
            add = torch.zeros_like(bucket.shard)  # padding between parameters stays zero
        if self._stage == 2 or parts is not None or bucket.over.replicate.size > 1:
            self._limit_pending()
        out = bucket.shard if add is None else add
        what = flat if parts is None else parts
        assert what is not None
        pending = self.sums.over_shards(bucket, what, out)
        if add is None and bucket.over.replicate.size == 1:
            pending = self._send_early(bucket, pending)
        self._under_way[bucket.index] = _PendingReduction(pending, add, final)
        self._reduced.add(bucket.index)

    def _launch_all_reduce(self, bucket: Bucket, final: bool) -> None:
        alone = bucket.over.replicate.size == bucket.over.share[1] == 1 and bucket.host is None
        if alone and final and not bucket.collected and (found := bucket.found()) is not None:
            bucket.loose, bucket.shard = found, None  # on a single rank they already are the sums
            return
        parts = bucket.parts() if final and not bucket.collected else None
        flat = bucket.shard = self.take(bucket) if parts is None else self._room(bucket)
        if final:  # sharding saves nothing, so it is communicated once
            if parts is not None:
                self._limit_pending()
                for slot in bucket.slots:
                    slot.param.grad = None
            pending = self.sums.over_replicas(bucket, flat, parts)
            self._under_way[bucket.index] = _PendingReduction(self._send_early(bucket, pending))

    def _send_early(self, bucket: Bucket, pending: Waitable) -> Waitable:
        """Copy a bucket's sums to the host once they are complete, if its optimizer is there and they are final.

        pending: reduction that computes the sums. Return the handle to wait for: of the copy, else `pending`.
        """
        is_final = self.phase is Phase.LAST_PASS or not self._each
        if bucket.host is None or not bucket.host.is_early or not is_final or self.coders.owed:
            return pending
        return bucket.host.send(shard_of(bucket), pending)

    def _limit_pending(self) -> None:
        if len(self._under_way) >= MOST_UNDER_WAY:
            self._land(min(self._under_way))

    def _land(self, index: int) -> None:
        one, bucket = self._under_way.pop(index), self.buckets[index]
        one.pending.wait()
        if one.add is not None:
            shard_of(bucket).add_(one.add)
        if self._stage == 2 and bucket.num_shards > 1:
            bucket.drop_grads()
        if one.final and bucket.num_shards > 1 and bucket.over.replicate.size > 1:
            # Start it now, so that the sum over replicas overlaps with backward, as the first sum did.
            self._replica_sums.append(self.sums.over_replicas(bucket, shard_of(bucket)))

    def _reduce_rest(self, final: bool = True) -> None:
        for bucket in self.buckets[self._pass.next :]:
            self._launch(bucket, final)
        for index in sorted(self._under_way):
            self._land(index)

    def _sum(self, totals: torch.Tensor | None) -> None:
        """Sum over all ranks, in one all-reduce, the totals, number of late gradients and squared gradient norm.

        `totals` is overwritten with its sum.
        """
        extra = torch.zeros(2, dtype=torch.float64, device=self._norm_squared.device)
        self._first_late = self._late[0] if self._late else -1
        extra[0].fill_(len(self._late))  # an assignment would copy from the host and block
        # Ranks with equal sums each compute the norm of a different part.
        parts: list[torch.Tensor] = []
        for bucket in self.buckets:
            rank, number = bucket.over.share
            if bucket.loose is not None:
                parts += [grad for _, grad in bucket.loose]
            else:
                parts.append(shard_of(bucket).tensor_split(number)[rank])
        norms: list[torch.Tensor] = []
        for dtype in dict.fromkeys(part.dtype for part in parts):  # a GPU kernel supports one dtype
            alike = [part for part in parts if part.dtype == dtype]
            norms += foreach_norm(alike, 2.0, dtype=torch.promote_types(dtype, torch.float32))
        if norms:
            extra[1] = torch.stack(norms).double().square().sum()
        sums = all_reduce(extra if totals is None else torch.cat([totals, extra]), self._axes.world)
        if totals is not None:
            totals.copy_(sums[:-2])
        self._num_late, self._norm_squared = sums[-2].clone(), sums[-1].clone()


def shard_of(bucket: Bucket) -> torch.Tensor:
    """Return this rank's part of the gradient sums; at stage 0 all sums."""
    bucket.collect()
    assert bucket.shard is not None, "gradients were not reduced yet"
    return bucket.shard


def _arrived(reducer: Callable[[], Reducer | None], index: int, param: nn.Parameter) -> None:
    found = reducer()
    if found is not None:
        found.arrived(index, param)


@torch.no_grad()
def _take(slot: Slot) -> None:
    grad = slot.param.grad
    assert slot.grad is not None
    if grad is None:
        slot.grad.zero_()
    elif grad.layout == torch.strided:
        slot.grad.copy_(grad)
    else:
        slot.grad.zero_().add_(grad)  # the rows of a sparse embedding
    slot.param.grad = slot.grad
