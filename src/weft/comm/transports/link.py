"""Interface of transports: operations, links that carry them in order, and time spent waiting."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.comm.private_torch import num_modes
from weft.comm.transports.scattered_tensor import Parts
from weft.devices import access
from weft.errors import CommError
from weft.private_torch import without_modes


class StreamWait:
    """Time that the compute stream waits for a collective, from two events that are read later.

    The host continues without waiting, so its clock cannot measure this.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: Any = access.record_event(device, timed=True)
        self._end: Any = None

    @classmethod
    def begin(cls, device: torch.device) -> StreamWait | None:
        """Begin to time a wait of the current stream.

        Returns None if the host waits, or if the current stream is not the compute stream: a wait on another stream
        does not delay computation.
        """
        return cls(device) if access.on_default_stream(device) else None

    def end(self, arrived: torch.Event | None = None) -> StreamWait:
        """End the timed wait.

        arrived: event of the awaited result on another stream, perhaps before the wait; None to record an event now.
        """
        self._end = access.record_event(self._device, timed=True) if arrived is None else arrived
        return self

    def seconds(self) -> float:
        """Return the duration of the wait. Blocks the host until it is available."""
        self._start.synchronize()
        self._end.synchronize()
        return max(0.0, self._start.elapsed_time(self._end) / 1000)


def waited(wait: StreamWait | None, device: torch.device, host_s: float) -> float | StreamWait:
    """End a wait and return its time (s) for the ledger: `wait`, which is read later, or a number.

    wait: result of `StreamWait.begin`. If it is None, the time is 0 on a device with streams, and else `host_s`, the
    seconds by the host's clock.
    """
    if wait is not None:
        return wait.end()
    return 0.0 if access.has_streams(device) else host_s


# Interface of all transports: a link joins the ranks of one axis and runs operations in the order of their start.


@dataclass(slots=True, eq=False)
class Operation:
    """One collective in flight. Tensors are flat and contiguous; `source` may be in parts.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier" or "all_to_all".
        op: "sum", "max" or "min".
        root: the axis's rank that broadcasts.
        send, receive: for all_to_all, numbers of elements to and from each rank of the axis.
        most: for all_to_all, the maximum number of elements from one rank to another, equal on all ranks.
        then: computes the result from the received data. The waiting code calls it once, and its time is not counted as
            waiting.
        sent_bytes, off_host_bytes: once finished, the bytes sent to other ranks and to other hosts. Links of a backend
            such as nccl do not count them.
        finished: True once the result is in `out`.
    """

    kind: str
    axis: str
    source: torch.Tensor | Parts
    out: torch.Tensor
    op: str = "sum"
    root: int = 0
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    most: int = 0
    then: Callable[[], None] | None = field(default=None, init=False)
    sent_bytes: int = field(default=0, init=False)
    off_host_bytes: int = field(default=0, init=False)
    finished: bool = field(default=False, init=False)

    def __str__(self) -> str:
        return f"{self.kind} over {self.axis}"

    @property
    def combined_in(self) -> torch.dtype:
        """The dtype in which values are combined before they are rounded once."""
        return combined_in(self.out.dtype, self.op)

    def count(self, num_bytes: int, off_host: bool) -> None:
        """Add bytes that this rank sends to another."""
        self.sent_bytes += num_bytes
        self.off_host_bytes += num_bytes if off_host else 0


def combined_in(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which values of `dtype` are combined before they are rounded once."""
    return torch.float32 if op == "sum" and dtype in (torch.bfloat16, torch.float16) else dtype


class SentBytes:
    """Counts the bytes that the rank with index `rank` sends over gloo.

    hosts: a host number for each index on the axis.
    """

    def __init__(self, rank: int, hosts: tuple[int, ...]):
        self._rank, self._hosts = rank, hosts

    def to(self, operation: Operation, place: int, num_bytes: int) -> None:
        """Count bytes to another rank. Bytes to this rank itself are not counted."""
        if place != self._rank:
            operation.count(num_bytes, self._hosts[place] != self._hosts[self._rank])

    def ring(self, operation: Operation, num_bytes: int) -> None:
        """Count gloo's ring all_reduce: each rank sends all but 1 / size of the tensor to the previous rank, twice."""
        size = len(self._hosts)
        self.to(operation, (self._rank - 1) % size, 2 * (size - 1) * num_bytes // size)

    def tree(self, operation: Operation, root: int, num_bytes: int) -> None:
        """Count gloo's broadcast: a binomial tree over indices relative to the root."""
        size, step = len(self._hosts), 1
        place = (self._rank - root) % size
        while step < size:  # the first `step` have the bytes by now, and each sends them to the one `step` further on
            if place < step and place + step < size:
                self.to(operation, (place + step + root) % size, num_bytes)
            step *= 2


class Link:
    """The ranks of one axis, joined by one transport. `reason` is why this transport was chosen.

    With `self_driven`, operations progress without this thread, and only `block` is needed. With nccl, `block` orders
    the current stream behind the operation, so call it on the stream that uses the result.
    """

    transport: str
    reason: str
    self_driven = False

    def start(self, operation: Operation) -> None:
        """Begin an operation. Never waits for another rank."""
        raise NotImplementedError

    def advance(self) -> bool:
        """Continue the operations in flight without waiting. Returns True if there was progress."""
        return False

    @property
    def busy(self) -> bool:
        """True if an operation is in flight that `advance` can progress."""
        return False

    def block(self, operation: Operation) -> bool:
        """Wait in the backend until `operation` is finished, without advancing other links.

        Return False if the link cannot do this.
        """
        return False

    def late(self) -> tuple[int, ...]:
        """Return the global ranks that this rank waits for, or () if unknown. Any thread may call it."""
        return ()

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise CommError if `operation` can no longer complete: a rank has exited, or the timeout has passed."""


#: time.sleep(0) returns immediately on Linux without yielding the core.
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


class SpinBackoff:
    """A wait loop that yields the core to other ranks, of which there may be more than cores.

    It yields the core at first, because the next message usually arrives soon, then sleeps, for longer over time.
    Measured on 2 cores: small steps of 8 ranks take 0.8 of the time if they yield for 2 ms instead of 0.1 ms, because a
    sleep is longer than the wait. Steps of a second, and steps of 4 ranks, take the same time.
    """

    YIELD_S, LOOK_S = 0.002, 0.1

    def __init__(self) -> None:
        self._start = self._looked = time.perf_counter()

    def rest(self) -> float | None:
        """Yield the core or sleep once. Return the seconds waited if it is time to check the other ranks, else None."""
        now = time.perf_counter()
        waited = now - self._start
        if waited < self.YIELD_S:
            _yield_core()
        else:
            # The longer the wait, the longer the sleep: a hundredth of it, at most 2 ms.
            time.sleep(min(waited / 100, 0.002))
        if now - self._looked < self.LOOK_S:
            return None
        self._looked = now
        return waited


def unobserved() -> AbstractContextManager[object]:
    """Hide the enclosed operations from dispatch modes, except for a mode that fake tensors need.

    The work done during a wait depends on timing, so it differs between two runs of the same forward. Selective
    recompute counts operations with a dispatch mode and would treat the second run as a different computation.
    """
    return without_modes() if num_modes() else nullcontext()


def finish(operation: Operation, link: Link, links: list[Link]) -> None:
    """Continue all `links` until `operation` is finished.

    link: the link that carries the operation. links: all links of this rank, including `link`.

    Raises CommError if a rank has exited or the group's timeout has passed. The message names axis and operation.
    """
    if link.self_driven:
        link.block(operation)
    patience = SpinBackoff()
    while not operation.finished:
        moved = False
        others = False
        for other in links:
            if other.busy:
                others = others or other is not link
                moved = other.advance() or moved
        if operation.finished or (not others and link.block(operation)):
            break
        if moved:
            patience = SpinBackoff()
            continue
        waited_s = patience.rest()
        if waited_s is not None:
            link.look(operation, waited_s)


def failed(operation: Operation, error: Exception) -> CommError:
    """Make a CommError from an error of the backend."""
    text = str(error).strip().splitlines()
    return CommError(
        f"{operation}: {text[0] if text else type(error).__name__}. "
        f"Look at the logs of the other ranks: one of them has probably ended, or called something else."
    )


# An operation encoded as one integer, which ranks compare before they use each other's data.

KINDS = ("barrier", "broadcast", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
OPS = ("sum", "max", "min")
#: The order is the same on all ranks. Dtypes that are not listed share the last number.
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def sign(operation: Operation) -> int:
    """Return kind, op, dtype, root and number of elements as one integer. Operations with equal signatures match."""
    dtype = operation.source.dtype
    code = DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
    # Ranks may send different sizes to each other; the maximum must be equal.
    signature = operation.most if operation.kind == "all_to_all" else operation.source.numel()
    for value, limit in ((operation.root, 1 << 12), (code, 16), (OPS.index(operation.op), 4)):
        signature = signature * limit + value % limit
    return signature * 8 + KINDS.index(operation.kind)


def explain_signature(signature: int) -> str:
    """Return a signature as text, such as "all_reduce (sum) of 12 float32"."""
    signature, kind = divmod(signature, 8)
    signature, op = divmod(signature, 4)
    signature, code = divmod(signature, 16)
    numel, root = divmod(signature, 1 << 12)
    name = KINDS[kind]
    if name == "barrier":
        return name
    dtype = str(DTYPES[code]).removeprefix("torch.") if code < len(DTYPES) else "values of another type"
    detail = f" from {root}" if name == "broadcast" else f" ({OPS[op]})" if "reduce" in name else ""
    amount = f"at most {numel}" if name == "all_to_all" else str(numel)
    return f"{name}{detail} of {amount} {dtype}"


# Sums, maxima and minima of the ranks' parts, always in one tree over ranks, so that all transports give the same
# bits.

#: Bytes combined at a time: small enough for a core's cache while all parts are added.
BLOCK_BYTES = 1 << 19

_FUNCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def branch(size: int) -> int:
    """Return the number of leading parts that form the left subtree: the largest 2^k below `size`."""
    return 1 << (size - 1).bit_length() - 1


class Combiner:
    """Combines parts of equal length. Reuses scratch memory between calls: BLOCK_BYTES for each level of the tree."""

    def __init__(self) -> None:
        self._scratch: list[torch.Tensor] = []

    def __call__(self, parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
        """Combine parts in the order of the tree. `out` may be the memory of one of the parts.

        Sums of bf16 and fp16 are accumulated in fp32 and rounded once. Two parts need no scratch, because their sum is
        rounded once anyway.
        """
        function, size = _FUNCTIONS[op], len(parts)
        if size == 2:
            function(parts[0], parts[1], out=out)
            return
        dtype, middle = combined_in(out.dtype, op), branch(size)
        step = BLOCK_BYTES // dtype.itemsize
        for first in range(0, out.numel(), step):
            block = slice(first, min(first + step, out.numel()))
            cut = [part[block] for part in parts]
            left = self._fold(cut[:middle], op, dtype, 0)
            right = self._fold(cut[middle:], op, dtype, 1)
            # Only the last step writes to `out`, after every part was read.
            if dtype == out.dtype:
                function(left, right, out=out[block])
            else:
                out[block].copy_(left.add_(right))

    def _fold(self, parts: list[torch.Tensor], op: str, dtype: torch.dtype, level: int) -> torch.Tensor:
        """Combine the parts in the scratch memory of a level. A single part is returned without a copy."""
        if len(parts) == 1:
            return parts[0]
        middle = branch(len(parts))
        total = self._room(parts[0].numel(), dtype, level)
        left = self._fold(parts[:middle], op, dtype, level)
        right = self._fold(parts[middle:], op, dtype, level + 1)
        if dtype == parts[0].dtype:
            _FUNCTIONS[op](left, right, out=total)
        else:
            (total.copy_(left) if middle == 1 else left).add_(right)
        return total

    def _room(self, numel: int, dtype: torch.dtype, level: int) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        while len(self._scratch) <= level:
            self._scratch.append(torch.empty(0, dtype=torch.uint8))
        if self._scratch[level].numel() < num_bytes:
            self._scratch[level] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[level][:num_bytes].view(dtype)


# A link for devices whose ranks cannot reach each other: tensors are copied through host memory and a CPU link.


@dataclass(slots=True)
class _Staged:
    """One operation on the device, and the same one on the host."""

    on_device: Operation
    on_host: Operation


class StagedLink(Link):
    """Copies to the host, runs the operation there on `inner`, and copies the result back."""

    transport = "staged through the host"

    def __init__(self, inner: Link, reason: str):
        self.reason = f"{reason}; {inner.transport} on the host: {inner.reason}"
        self._inner = inner
        self._under_way: deque[_Staged] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def start(self, operation: Operation) -> None:
        with torch.no_grad(), unobserved():
            on_host = _on_host(operation)
        self._under_way.append(_Staged(operation, on_host))
        self._inner.start(on_host)

    def advance(self) -> bool:
        moved = self._inner.advance()
        return self._bring_back() or moved

    def block(self, operation: Operation) -> bool:
        staged = next((one for one in self._under_way if one.on_device is operation), None)
        if staged is None:
            return operation.finished
        if not self._inner.block(staged.on_host):
            return False
        self._bring_back()
        return True

    def late(self) -> tuple[int, ...]:
        return self._inner.late()

    def look(self, operation: Operation, waited_s: float) -> None:
        staged = next((one for one in self._under_way if one.on_device is operation), None)
        self._inner.look(staged.on_host if staged is not None else operation, waited_s)

    def _bring_back(self) -> bool:
        """Copy finished results to the device, in the order of the operations. Return True if there were any."""
        moved = False
        while self._under_way and self._under_way[0].on_host.finished:
            staged = self._under_way.popleft()
            with torch.no_grad(), unobserved():
                staged.on_device.out.copy_(staged.on_host.out)
            staged.on_device.sent_bytes = staged.on_host.sent_bytes
            staged.on_device.off_host_bytes = staged.on_host.off_host_bytes
            staged.on_device.finished = moved = True
        return moved


def _on_host(operation: Operation) -> Operation:
    """Return the operation with its tensors copied to the host. Waits until the device has computed them."""
    source, out = operation.source, operation.out
    source = source.joined() if isinstance(source, Parts) else source
    if operation.kind in ("all_reduce", "broadcast", "barrier"):
        # In place: input and result use the same memory.
        given = out if operation.kind != "all_reduce" else source
        whole = given.detach().to("cpu", copy=True)
        return replace(operation, source=whole, out=whole)
    whole = source.detach().to("cpu", copy=True)
    return replace(operation, source=whole, out=torch.empty_like(out, device="cpu"))
