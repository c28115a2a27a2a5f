"""Links over torch process groups: the backend's collectives, and gloo with sums computed here.

Also conversions of dtypes that NCCL does not accept, for which torch raises "Unconvertible NCCL type". Support of fp8
depends on the releases of NCCL and torch, so fp8 is converted too.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.mesh import join_group
from weft.comm.private_torch import (
    all_gather_single,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    reduce_scatter_single,
)
from weft.comm.transports.link import Combiner, Link, Operation, SentBytes, failed, unobserved
from weft.comm.transports.routes import same_memory
from weft.comm.transports.scattered_tensor import Parts

#: Dtypes that every supported release of NCCL and torch accepts. bool is sent as uint8.
NCCL_FORMATS = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor as flat bytes, for operations that only move data of any dtype."""
    return tensor.view(-1).view(torch.uint8)


def as_moved(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor for an operation that only moves data: itself, or its bytes."""
    return tensor if tensor.dtype in NCCL_FORMATS else as_bytes(tensor)


def as_added(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor for a sum: itself, or the real and imaginary parts of a complex tensor, 1-D."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


# The backend's collectives (nccl and others), and gloo as transport of bytes that are added here.

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

#: An all_reduce of at most LITTLE_BYTES sends the full tensor to every rank. A smaller all_gather than
#: OWN_GATHER_BYTES between two ranks uses gloo's collective.
LITTLE_BYTES, OWN_GATHER_BYTES = 1 << 16, 1 << 20

#: Stages of an operation. Each yields the works that must complete before the next stage.
Stages = Generator[list[dist.Work], None, None]


#: For each dtype of a sum, the shorter dtypes that it represents exactly.
_SHORT = {torch.float32: (torch.bfloat16, torch.float16)}


class BackendLink(Link):
    """A link on which each operation is one call to the process group.

    It cannot be polled: gloo's reduce_scatter reports completion only when waited for, and nccl's works are bound to
    streams.

    Within a host, bf16 or fp16 gradients whose sum is requested in fp32 are sent unconverted by an all_to_all, and each
    rank adds its slice in fp32. This equals an fp32 reduce_scatter with half the bytes, always in rank order. Between
    hosts a reduce_scatter sends less, because it adds along the route.

    ranks: global ranks, in order of the axis. on_one_host: returns True if all ranks are on one host. Collective;
    called once.
    """

    transport = "backend"
    self_driven = True

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], reason: str, on_one_host: Callable[[], bool]):
        self.reason, self._group, self._ranks = reason, group, ranks
        self._works: dict[Operation, dist.Work] = {}
        self._on_one_host = on_one_host

    @functools.cached_property
    def sends_short_summands(self) -> bool:
        """True if summands in a shorter format than their sum are sent unconverted. The first access is collective."""
        return self._on_one_host()

    def start(self, operation: Operation) -> None:
        try:
            short = self._short_format(operation)
            self._works[operation] = self._call(operation) if short is None else self._send_short(operation, short)
        except RuntimeError as error:
            raise failed(operation, error) from error

    def _short_format(self, operation: Operation) -> torch.dtype | None:
        """Return the summands' dtype if they are sent unconverted, else None."""
        source = operation.source
        if operation.kind != "reduce_scatter" or operation.op != "sum" or not isinstance(source, Parts):
            return None
        found = source.common_dtype
        return found if found in _SHORT.get(operation.out.dtype, ()) and self.sends_short_summands else None

    def _send_short(self, operation: Operation, dtype: torch.dtype) -> dist.Work:
        parts = operation.source
        assert isinstance(parts, Parts)
        with torch.no_grad(), unobserved():
            operation.source = flat = parts.joined(dtype) if parts.full_part is None else parts.full_part
            received = torch.empty_like(flat)
        rows_RN, out = received.view(len(self._ranks), -1), operation.out

        def add_rows() -> None:
            with torch.no_grad(), unobserved():
                torch.sum(rows_RN, 0, dtype=out.dtype, out=out)

        operation.then = add_rows
        return all_to_all_single(as_bytes(received), as_bytes(flat), None, None, group=self._group, async_op=True)

    def _call(self, operation: Operation) -> dist.Work:
        travels = as_added if operation.kind in ("all_reduce", "reduce_scatter") else as_moved
        source, out, group = travels(_joined(operation)), travels(operation.out), self._group
        match operation.kind:
            case "all_reduce":
                return all_reduce(out, op=_OPS[operation.op], group=group, async_op=True)
            case "all_gather":
                return all_gather_single(out, source, group=group, async_op=True)
            case "reduce_scatter":
                return reduce_scatter_single(out, source, op=_OPS[operation.op], group=group, async_op=True)
            case "broadcast":
                return broadcast(out, src=self._ranks[operation.root], group=group, async_op=True)
            case "all_to_all":
                width = operation.out.dtype.itemsize // out.dtype.itemsize
                counts = ([numel * width for numel in part] for part in (operation.receive, operation.send))
                return all_to_all_single(out, source, *counts, group=group, async_op=True)
            case _:
                return barrier(group=group, async_op=True)

    def block(self, operation: Operation) -> bool:
        work = self._works.pop(operation)
        try:
            work.wait()
        except RuntimeError as error:
            raise failed(operation, error) from error
        operation.finished = True
        return True


class ExchangeLink(Link):
    """A link on which gloo moves bytes, and sums are computed here in the same fixed tree as over shared memory.

    Relative to gloo's collectives (measured with torch 2.13), reduce_scatter as all_to_all plus a local sum takes 0.4
    to 0.9 of the time, and all_gather as one broadcast from each rank 0.3 to 0.8. Only with two ranks and little data
    it takes more.

    ranks: global ranks, in order of the axis. hosts: a number for each rank's host; empty if all are on one host.
    purpose: distinguishes groups of the same ranks that must stay separate.
    """

    transport = "gloo exchange"

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        rank: int,
        reason: str,
        hosts: tuple[int, ...] = (),
        purpose: str = "exchange",
    ):
        self.reason, self._group = reason, group
        self._ranks, self._rank = ranks, rank
        self._sent = SentBytes(rank, hosts or (0,) * len(ranks))
        self._combine = Combiner()
        self._queue: deque[tuple[Operation, Stages]] = deque()
        self._works: dict[Operation, list[dist.Work]] = {}
        # gloo matches calls by their number in a group. First stages are posted when operations start. Second stages
        # are posted when the first are complete, which is at a different time on each rank, so they use a separate
        # group.
        self._second_group = join_group(ranks, purpose) if len(ranks) > 2 else group

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def start(self, operation: Operation) -> None:
        _joined(operation)
        stages = self._stages(operation)
        try:
            with unobserved():
                self._works[operation] = next(stages, list[dist.Work]())
        except RuntimeError as error:
            raise failed(operation, error) from error
        self._queue.append((operation, stages))

    def advance(self) -> bool:
        moved = False
        while self._queue and all(work.is_completed() for work in self._works[self._queue[0][0]]):
            self._next_stage()
            moved = True
        return moved

    def block(self, operation: Operation) -> bool:
        while not operation.finished:
            self._next_stage()
        return True

    def _next_stage(self) -> None:
        operation, stages = self._queue[0]
        try:
            for work in self._works[operation]:
                work.wait()
            with torch.no_grad(), unobserved():
                self._works[operation] = next(stages)
        except StopIteration:
            operation.finished = True
            del self._works[operation]
            self._queue.popleft()
        except RuntimeError as error:
            raise failed(operation, error) from error

    def _stages(self, operation: Operation) -> Stages:
        match operation.kind:
            case "all_reduce":
                return self._all_reduce(operation)
            case "all_gather":
                return self._all_gather(operation)
            case "reduce_scatter":
                return self._reduce_scatter(operation)
            case "broadcast":
                return self._broadcast(operation)
            case "all_to_all":
                return self._exchange(operation)
            case _:
                return self._barrier()

    def _all_reduce(self, operation: Operation) -> Stages:
        out, size = operation.out, len(self._ranks)
        # gloo's all_reduce gives the same bits for integers, and for two ranks with a single rounding. Its maximum may
        # drop a NaN, depending on the order.
        is_whole = out.dtype in (torch.int8, torch.uint8, torch.int32, torch.int64)
        if is_whole or (size == 2 and operation.op == "sum" and out.dtype in (torch.float32, torch.float64)):
            self._sent.ring(operation, out.nbytes)
            yield [all_reduce(out, op=_OPS[operation.op], group=self._group, async_op=True)]
            return
        if size == 2 or out.nbytes <= LITTLE_BYTES:
            # Every rank sends its full tensor to all others: one stage.
            received = torch.empty((size, out.numel()), dtype=out.dtype)
            received[self._rank].copy_(out)
            yield self._broadcast_parts(operation, list(received), self._group)
            self._combine(list(received), operation.op, out)
            return
        bounds = [rank * out.numel() // size for rank in range(size + 1)]
        lengths = [last - first for first, last in itertools.pairwise(bounds)]
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        received = torch.empty((size, lengths[self._rank]), dtype=out.dtype)
        yield [self._all_to_all(operation, received, out, [lengths[self._rank]] * size, lengths)]
        self._combine(list(received), operation.op, out[own])
        parts = [out[first:last] for first, last in itertools.pairwise(bounds)]
        yield self._broadcast_parts(operation, parts, self._second_group)

    def _reduce_scatter(self, operation: Operation) -> Stages:
        out, size = operation.out, len(self._ranks)
        received = torch.empty((size, out.numel()), dtype=out.dtype)
        yield [self._all_to_all(operation, received, _joined(operation), None, None)]
        self._combine(list(received), operation.op, out)

    def _all_gather(self, operation: Operation) -> Stages:
        shards = list(operation.out.view(len(self._ranks), -1))
        own = _joined(operation)
        if not same_memory(own, shards[self._rank]):
            shards[self._rank].copy_(own)
        if len(shards) == 2 and operation.out.nbytes < OWN_GATHER_BYTES:
            out, source = as_bytes(operation.out), as_bytes(shards[self._rank])
            self._sent.to(operation, 1 - self._rank, source.nbytes)
            yield [all_gather_single(out, source, group=self._group, async_op=True)]
            return
        yield self._broadcast_parts(operation, shards, self._group)

    def _broadcast(self, operation: Operation) -> Stages:
        root = self._ranks[operation.root]
        self._sent.tree(operation, operation.root, operation.out.nbytes)
        yield [broadcast(as_bytes(operation.out), src=root, group=self._group, async_op=True)]

    def _exchange(self, operation: Operation) -> Stages:
        counts = list(operation.receive), list(operation.send)
        yield [self._all_to_all(operation, operation.out, _joined(operation), *counts)]

    def _barrier(self) -> Stages:
        yield [barrier(group=self._group, async_op=True)]

    def _all_to_all(
        self,
        operation: Operation,
        out: torch.Tensor,
        source: torch.Tensor,
        receive: list[int] | None,
        send: list[int] | None,
    ) -> dist.Work:
        width, size = out.dtype.itemsize, len(self._ranks)
        for place, numel in enumerate(send or [source.numel() // size] * size):
            self._sent.to(operation, place, numel * width)
        return all_to_all_single(
            as_bytes(out),
            as_bytes(source),
            None if receive is None else [numel * width for numel in receive],
            None if send is None else [numel * width for numel in send],
            group=self._group,
            async_op=True,
        )

    def _broadcast_parts(
        self, operation: Operation, parts: list[torch.Tensor], group: dist.ProcessGroup
    ) -> list[dist.Work]:
        for place, part in enumerate(parts):
            self._sent.tree(operation, place, part.nbytes)
        return [
            broadcast(as_bytes(part), src=source, group=group, async_op=True)
            for source, part in zip(self._ranks, parts, strict=True)
        ]


def _joined(operation: Operation) -> torch.Tensor:
    """Return the source as one flat tensor.

    Parts are copied once, and the copy replaces `operation.source`. For an all_reduce they are copied to the output.
    """
    source = operation.source
    if isinstance(source, Parts):
        whole = operation.kind == "all_reduce"
        operation.source = source = source.copy_to(operation.out) if whole else source.joined()
    return source
