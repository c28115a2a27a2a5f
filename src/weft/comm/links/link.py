"""What every transport offers: a link joins the ranks of one axis and carries operations in the order they start.

Rule for callers: all ranks of an axis start the same operations in the same order. They may wait for them in any
order, and differently on each rank: a wait also carries on everything else that is under way on its mesh.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from weft.comm.links.parts import Parts
from weft.comm.private_torch import num_modes
from weft.errors import CommError
from weft.private_torch import without_modes


@dataclass(slots=True, eq=False)
class Operation:
    """One collective under way. Tensors are flat and contiguous; `source` may lie in parts.

    kind: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier" or "all_to_all". op: "sum", "max" or
    "min". root: the axis's rank that broadcasts. finished: the result is in `out`.
    send, receive: elements to and from each rank of the axis (all_to_all). most: the most elements that go from one
    rank to another in it; all ranks give the same.
    then: makes the result of what has come; whoever waited calls it, once, and its time is no waiting.
    sent_bytes, off_host_bytes: what this rank has handed to other ranks, and what of it to other hosts, once finished:
    links that know count it, which those of a backend (nccl) do not.
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
        """The format that values are combined in before they are rounded once."""
        return combined_in(self.out.dtype, self.op)

    def count(self, num_bytes: int, off_host: bool) -> None:
        """Add bytes that this rank hands to another."""
        self.sent_bytes += num_bytes
        self.off_host_bytes += num_bytes if off_host else 0


def combined_in(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the format that values of `dtype` are combined in before they are rounded once."""
    return torch.float32 if op == "sum" and dtype in (torch.bfloat16, torch.float16) else dtype


class SentBytes:
    """Counts what gloo has a rank send. rank: its place on the axis. hosts: a number for the host of each place."""

    def __init__(self, rank: int, hosts: tuple[int, ...]):
        self._rank, self._hosts = rank, hosts

    def to(self, operation: Operation, place: int, num_bytes: int) -> None:
        """Count what goes to one other rank; what stays here is none of it."""
        if place != self._rank:
            operation.count(num_bytes, self._hosts[place] != self._hosts[self._rank])

    def ring(self, operation: Operation, num_bytes: int) -> None:
        """Count gloo's own all_reduce: each rank sends to the one before it, all but its part, twice."""
        size = len(self._hosts)
        self.to(operation, (self._rank - 1) % size, 2 * (size - 1) * num_bytes // size)

    def tree(self, operation: Operation, root: int, num_bytes: int) -> None:
        """Count gloo's broadcast: a binomial tree over places counted from the root."""
        size, step = len(self._hosts), 1
        place = (self._rank - root) % size
        while step < size:  # the first `step` have the bytes by now, and each sends them to the one `step` further on
            if place < step and place + step < size:
                self.to(operation, (place + step + root) % size, num_bytes)
            step *= 2


class Link(Protocol):
    """The ranks of one axis, joined by one transport. `reason` says why this transport was taken.

    self_driven: operations go on without this thread; `block` is all there is to do. With nccl it orders the current
    stream behind the operation, so it must be called on the stream that uses the result.
    """

    transport: str
    reason: str
    self_driven: bool

    def start(self, operation: Operation) -> None:
        """Begin; never waits for another rank."""
        ...

    def advance(self) -> bool:
        """Carry on what is under way as far as it goes without waiting; True when something moved."""
        ...

    @property
    def busy(self) -> bool:
        """Something is under way that `advance` can carry on."""
        ...

    def block(self, operation: Operation) -> bool:
        """Wait for `operation` in the backend, with nothing else carried on. False where the link cannot."""
        ...

    def late(self) -> tuple[int, ...]:
        """Return the global ranks that this rank waits for; empty where the transport does not know.

        Any thread may ask.
        """
        ...

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise CommError when `operation` cannot end any more: a rank is gone, or the time is over."""
        ...


#: time.sleep(0) returns at once on Linux, with the core still this rank's.
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


class Patience:
    """Waiting that leaves the core to others: ranks may be more than cores.

    Yields the core at first (the next word of the others is near), then sleeps, longer as time goes by. Measured on 2
    cores: small steps of 8 ranks take 0.8 of the time when they yield for 2 ms in place of 0.1 ms, since a sleep is
    longer than what it waits for; steps of a second, and of 4 ranks, take the same.
    """

    YIELD_S, LOOK_S = 0.002, 0.1

    def __init__(self) -> None:
        self._start = self._looked = time.perf_counter()

    def rest(self) -> float | None:
        """Rest once. Returns the seconds waited so far when it is time to look after the other ranks."""
        now = time.perf_counter()
        waited = now - self._start
        if waited < self.YIELD_S:
            _yield_core()
        else:
            # Longer sleeps where waiting has been long: a hundredth of it, at most 2 ms.
            time.sleep(min(waited / 100, 0.002))
        if now - self._looked < self.LOOK_S:
            return None
        self._looked = now
        return waited


def unobserved() -> AbstractContextManager[object]:
    """Hide what is done inside from dispatch modes, but for one that tensors without values need: that one stays.

    What a wait carries on depends on time, so it differs between two runs of the same forward; selective recompute
    counts operations by such a mode, and would take the second run for another computation.
    """
    return without_modes() if num_modes() else nullcontext()


def finish(operation: Operation, link: Link, links: list[Link]) -> None:
    """Carry on all `links` until `operation` is finished.

    Args:
        operation: has been started.
        link: the one that carries it.
        links: all of this rank, `link` among them.

    Raises:
        CommError: naming axis and operation, when a rank is gone or the group's timeout is over.
    """
    if link.self_driven:
        link.block(operation)
    patience = Patience()
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
            patience = Patience()
            continue
        waited_s = patience.rest()
        if waited_s is not None:
            link.look(operation, waited_s)


def failed(operation: Operation, error: Exception) -> CommError:
    """Make the CommError for what the backend raised."""
    text = str(error).strip().splitlines()
    return CommError(
        f"{operation}: {text[0] if text else type(error).__name__}. "
        f"Look at the logs of the other ranks: one of them has probably ended, or called something else."
    )
