"""Hosts with equal blocks of ranks: bytes leave a host once for all of its ranks, each of which sends a part.

    all_reduce       within each host, reduce_scatter; between ranks of equal place, all_reduce; within, all_gather
    reduce_scatter   within, for each host's part; between, reduce_scatter
    all_gather       between, all_gather; within, for each host's part
    broadcast        between, from the root's place on; within, from that place

Over H hosts an all_reduce of S bytes sends 2 (H - 1) / H S from each, however many ranks a host has. A block is a
branch of the tree that sums are made in, so results are those of one sum over all ranks, bit for bit. The rest, and
what is little, goes the flat way.

Every rank has to begin what it does on each of the links below in one order, and stages begin when those before are
complete, which is at another time on each rank. So operations enter each level one after another, in the order in which
they were started, and the first and the last level have a memory each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from weft.comm.links import Link, Operation, Parts, unobserved

#: What is no larger goes the flat way: one meeting in place of three.
LITTLE_BYTES = 1 << 13
#: The levels, in the order in which operations pass them.
FIRST, BETWEEN, LAST, DONE = range(4)

#: A level, and what makes the operations of it, which go on side by side.
Stage = tuple[int, Callable[[], list[Operation]]]


@dataclass(slots=True)
class _Passing:
    """An operation on its way through the levels. level: the last that it has begun. end: done when it has passed."""

    operation: Operation
    stages: deque[Stage]
    end: Callable[[], object]
    level: int = -1
    under_way: list[Operation] = field(default_factory=list[Operation])


class TwoLevelLink:
    """Carries operations through the levels.

    Args:
        within: links of the ranks of this host, one for the first level and one for the last.
        between: of the ranks that have this one's place on each host.
        flat: of all ranks.
        place: this rank's on the axis.
        block: ranks of each host.
        reason: why this link was chosen, in words.
    """

    transport = "two levels"
    self_driven = False

    def __init__(self, within: tuple[Link, Link], between: Link, flat: Link, place: int, block: int, reason: str):
        self.reason = reason
        self._links = {FIRST: within[0], BETWEEN: between, LAST: within[1]}
        self.flat = flat
        self._host, self._place = divmod(place, block)
        self._block = block
        self._queue: deque[_Passing] = deque()

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return bool(self._queue) or self.flat.busy

    def start(self, operation: Operation) -> None:
        """Begin the operation's first level, where those before it have."""
        stages = None if operation.out.nbytes <= LITTLE_BYTES else self._stages(operation)
        if stages is None:
            self.flat.start(operation)
            return
        self._queue.append(_Passing(operation, deque(stages[0]), stages[1]))
        self.advance()

    def advance(self) -> bool:
        """Carry on all levels, and let operations pass from one to the next."""
        moved = self.flat.advance()
        for link in self._links.values():
            moved = link.advance() or moved
        with torch.no_grad(), unobserved():
            return self._pass_on() or moved

    def _pass_on(self) -> bool:
        """Let each operation begin what it may: a level that all those before it have begun, or passed."""
        moved, reached = False, DONE
        for one in self._queue:
            while all(part.finished for part in one.under_way):
                if not one.stages:
                    one.level = DONE
                    break
                level, make = one.stages[0]
                if level > reached:
                    break
                one.stages.popleft()
                self._count(one)
                one.under_way, one.level, moved = make(), level, True
                for part in one.under_way:
                    self._links[level].start(part)
            reached = min(reached, one.level)
        while self._queue and self._queue[0].level == DONE:
            one = self._queue.popleft()
            self._count(one)
            one.end()
            one.operation.finished = moved = True
        return moved

    def _count(self, one: _Passing) -> None:
        """What the parts of a level have sent."""
        for part in one.under_way:
            one.operation.sent_bytes += part.sent_bytes
            one.operation.off_host_bytes += part.off_host_bytes
        one.under_way = []

    def block(self, operation: Operation) -> bool:
        """Wait in the flat link, where the operation is there; False where anything passes through levels.

        Another rank may wait for that before it begins what this one waits for, and needs this one to carry it on.
        """
        if self._queue or operation.finished:
            return operation.finished
        return self.flat.block(operation)

    def late(self) -> tuple[int, ...]:
        """Return the ranks of this host that one of its links waits for."""
        found = (self._links[one.level].late() for one in tuple(self._queue) if one.level in self._links)
        return tuple(sorted({rank for ranks in found for rank in ranks}))

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise what the links of this host raise; between hosts the backend keeps the group's timeout itself."""
        for one in tuple(self._queue):
            for part in one.under_way:
                if not part.finished:
                    self._links[one.level].look(part, waited_s)

    def _stages(self, operation: Operation) -> tuple[list[Stage], Callable[[], object]] | None:
        """The levels of an operation and its end; None where it goes the flat way."""
        match operation.kind:
            case "all_reduce":
                return self._all_reduce(operation)
            case "reduce_scatter":
                return self._reduce_scatter(operation)
            case "all_gather":
                return self._all_gather(operation)
            case "broadcast":
                return self._broadcast(operation)
            case _:
                return None

    def _all_reduce(self, operation: Operation) -> tuple[list[Stage], Callable[[], object]]:
        out, source = operation.out, operation.source
        numel, dtype = out.numel(), operation.combined_in
        length = -(-numel // self._block)
        in_place = dtype == out.dtype and numel == length * self._block
        with torch.no_grad(), unobserved():
            sums = out if in_place else torch.zeros(length * self._block, dtype=dtype)
            if isinstance(source, Parts):
                source.copy_to(sums[:numel])
            elif source.data_ptr() != sums.data_ptr():
                sums[:numel].copy_(source)
        own = sums[self._place * length :][:length]

        def gather() -> list[Operation]:
            # Rounded before it goes around: once, as in one sum over all ranks.
            part = own.to(out.dtype)
            whole = out if numel == length * self._block else torch.empty(length * self._block, dtype=out.dtype)
            gathered.append(whole)
            return [self._part(operation, "all_gather", part, whole)]

        def end() -> None:
            if gathered[0].data_ptr() != out.data_ptr():
                out.copy_(gathered[0][:numel])

        gathered: list[torch.Tensor] = []
        stages: list[Stage] = [
            (FIRST, lambda: [self._part(operation, "reduce_scatter", sums, own)]),
            (BETWEEN, lambda: [self._part(operation, "all_reduce", own, own)]),
            (LAST, gather),
        ]
        return stages, end

    def _reduce_scatter(self, operation: Operation) -> tuple[list[Stage], Callable[[], object]]:
        out, source = operation.out, operation.source
        dtype, length = operation.combined_in, out.numel()
        with torch.no_grad(), unobserved():
            if isinstance(source, Parts):
                source = source.copy_to(torch.empty(source.numel(), dtype=dtype))
            rows = source.to(dtype).view(-1, self._block * length)  # a row: what belongs to one host
            sums = torch.empty(len(rows), length, dtype=dtype)
            total = out if dtype == out.dtype else torch.empty(length, dtype=dtype)
        stages: list[Stage] = [
            (FIRST, lambda: [self._part(operation, "reduce_scatter", *pair) for pair in zip(rows, sums, strict=True)]),
            (BETWEEN, lambda: [self._part(operation, "reduce_scatter", sums.view(-1), total)]),
        ]
        return stages, lambda: None if total is out else out.copy_(total)

    def _all_gather(self, operation: Operation) -> tuple[list[Stage], Callable[[], object]]:
        out, source = operation.out, operation.source
        assert isinstance(source, torch.Tensor)
        length = source.numel()
        rows = out.view(-1, self._block * length)
        mine = torch.empty(len(rows), length, dtype=out.dtype)
        stages: list[Stage] = [
            (BETWEEN, lambda: [self._part(operation, "all_gather", source, mine.view(-1))]),
            (LAST, lambda: [self._part(operation, "all_gather", *pair) for pair in zip(mine, rows, strict=True)]),
        ]
        return stages, lambda: None

    def _broadcast(self, operation: Operation) -> tuple[list[Stage], Callable[[], object]]:
        host, place = divmod(operation.root, self._block)
        out = operation.out
        stages: list[Stage] = [(LAST, lambda: [self._part(operation, "broadcast", out, out, place)])]
        if place == self._place:
            stages.insert(0, (BETWEEN, lambda: [self._part(operation, "broadcast", out, out, host)]))
        return stages, lambda: None

    def _part(self, whole: Operation, kind: str, source: torch.Tensor, out: torch.Tensor, root: int = 0) -> Operation:
        """One level's operation; errors name what it is a part of."""
        return replace(whole, kind=kind, axis=f"{whole.axis} ({whole.kind})", source=source, out=out, root=root)
