"""The two-level link: which ranks of an axis share a host, the memory that they share, and the levels of operations."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft import env
from weft.comm.mesh import Axis
from weft.comm.private_torch import all_gather, all_reduce, as_bytes, broadcast
from weft.comm.transports.link import Link, Operation, unobserved
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.transports.shared_memory import Segment, host_mark
from weft.errors import ConfigError
from weft.planner.measured import profile_tables as here
from weft.planner.measured.links import LinkProfile, RouteChoices

_MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Hosts:
    """Host information that the ranks of an axis exchanged, the same on all of them except `why`.

    `numbers` holds a host number for each index of the axis, in order of appearance; bytes between equal numbers do not
    leave the host. `memories` holds a number for each index likewise, equal for ranks that can share memory; -1 means
    that a rank cannot share memory. `why` is the reason if this rank cannot, else "".
    """

    numbers: tuple[int, ...]
    memories: tuple[int, ...]
    why: str

    @property
    def shares_memory(self) -> bool:
        """True if all ranks can share one memory."""
        return set(self.memories) == {0}

    @property
    def layout(self) -> tuple[int, int] | None:
        """(number of hosts, ranks per host), or None if hosts have different numbers of ranks."""
        counts = {self.numbers.count(number) for number in self.numbers}
        return (len(set(self.numbers)), counts.pop()) if len(counts) == 1 else None

    @property
    def block(self) -> int:
        """Ranks per host, if several hosts have equal blocks of 2^k consecutive ranks that share memory; else 1.

        Such a block is a subtree of the reduction tree.
        """
        size, found = len(self.memories), self.memories.count(0)
        blocks = tuple(place // max(found, 1) for place in range(size))
        alike = found > 1 and found < size and self.memories == blocks and size % found == 0
        return found if alike and found & (found - 1) == 0 else 1


def exchange_hosts(axis: Axis, group: dist.ProcessGroup) -> Hosts:
    """Exchange which host each rank is on, and record it in `axis.hosts`. All ranks of the axis must call it."""
    mark, why = host_mark()
    own = torch.frombuffer(bytearray(mark.ljust(_MARK_BYTES, b"\0") + _network_mark()), dtype=torch.uint8)
    found = [as_bytes(row) for row in _all_rows(axis, group, own)]
    axis.hosts.update(zip(axis.ranks, (row[_MARK_BYTES:] for row in found), strict=True))
    memories = [row[:_MARK_BYTES] for row in found]
    known = [one for one in dict.fromkeys(memories) if any(one)]
    networks = list(dict.fromkeys(row[_MARK_BYTES:] for row in found))
    return Hosts(
        numbers=tuple(networks.index(row[_MARK_BYTES:]) for row in found),
        memories=tuple(known.index(one) if any(one) else -1 for one in memories),
        why=why,
    )


def share_memory(axis: Axis, group: dist.ProcessGroup, block: int, number: int = 1) -> tuple[list[Segment], str]:
    """Map shared memory for each block of `block` adjacent ranks. Collective.

    Return (segments of this rank's block, "") on all ranks of the axis, or ([], reason) on all of them.

    Args:
        block: number of ranks that share one memory; the size of the axis for all.
        number: number of segments per block.
    """
    place, why = axis.rank % block, ""
    segments: list[Segment] = []
    told = b""
    if place == 0:
        try:
            for _ in range(number):
                segment, (pid, fd, token) = Segment.make(block)
                segments.append(segment)
                told += pid.to_bytes(8, "little") + fd.to_bytes(8, "little") + token
        except OSError as error:
            segments, told = [], b""
            why = f"{Segment.total_bytes(block)} bytes of shared memory cannot be allocated ({error.strerror})"
    words = torch.frombuffer(bytearray(told.ljust(32 * number, b"\0")), dtype=torch.uint8)
    leader = axis.rank - place
    words = as_bytes(_all_rows(axis, group, words)[leader])
    if place != 0:
        try:
            for first in range(0, len(words), 32):
                pid, fd = (int.from_bytes(words[first + at :][:8], "little") for at in (0, 8))
                if pid:
                    segments.append(Segment.find((pid, fd, words[first + 16 : first + 32]), place, block))
        except OSError as error:
            why = f"the memory of rank {axis.ranks[leader]} cannot be opened ({error.strerror})"
    agreed = torch.tensor([len(segments) == number], dtype=torch.int32)
    all_reduce(agreed, op=dist.ReduceOp.MIN, group=group, async_op=True).wait()
    if not agreed.item():
        return [], why or "another rank of the axis could not map the shared memory"
    return segments, ""


def _all_rows(axis: Axis, group: dist.ProcessGroup, own: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.zeros_like(own) for _ in axis.ranks]
    all_gather(rows, own, group=group, async_op=True).wait()
    return rows


def _network_mark() -> bytes:
    """Return 16 bytes that are equal on ranks of one network namespace, between which bytes do not leave the host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot, network = platform.node(), ""
    return hashlib.sha256(f"{boot} {network} {env.pretended_host()}".encode()).digest()[:16]


# Hosts with equal blocks of ranks: data leaves a host once for all of its ranks, each of which sends a part.

#: Tensors up to this size use the flat link: one synchronization instead of three.
LITTLE_BYTES = 1 << 13
#: The levels, in the order of an operation.
FIRST, BETWEEN, LAST, DONE = range(4)

#: A level, and a function that makes its operations, which run in parallel.
Stage = tuple[int, Callable[[], list[Operation]]]


@dataclass(slots=True)
class _Passing:
    """An operation in progress. `level` is the last level it has begun, `end` runs after the last one."""

    operation: Operation
    stages: deque[Stage]
    end: Callable[[], object]
    level: int = -1
    under_way: list[Operation] = field(default_factory=list[Operation])


class TwoLevelLink(Link):
    """A link that runs operations in levels: within each host, between hosts, and within each host again.

    within: links of the ranks of this host, one for the first level and one for the last. between: link of the ranks
    that have the same index as this one on each host. flat: link of all ranks, for small tensors and other operations.
    """

    transport = "two levels"

    def __init__(self, within: tuple[Link, Link], between: Link, flat: Link, place: int, block: int, reason: str):
        self.reason = reason
        self._links = {FIRST: within[0], BETWEEN: between, LAST: within[1]}
        self.flat = flat
        self._host, self._place = divmod(place, block)
        self._block = block
        self._queue: deque[_Passing] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self.flat.busy

    def start(self, operation: Operation) -> None:
        stages = None if operation.out.nbytes <= LITTLE_BYTES else self._stages(operation)
        if stages is None:
            self.flat.start(operation)
            return
        self._queue.append(_Passing(operation, deque(stages[0]), stages[1]))
        self.advance()

    def advance(self) -> bool:
        moved = self.flat.advance()
        for link in self._links.values():
            moved = link.advance() or moved
        with torch.no_grad(), unobserved():
            return self._pass_on() or moved

    def _pass_on(self) -> bool:
        """Begin the next level of each operation, if all earlier operations have begun or passed that level.

        Also finish operations without further levels. Return True if there was progress.
        """
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
        for part in one.under_way:
            one.operation.sent_bytes += part.sent_bytes
            one.operation.off_host_bytes += part.off_host_bytes
        one.under_way = []

    def block(self, operation: Operation) -> bool:
        """Wait until the flat link completes the operation. Returns False if any operation runs in levels.

        Another rank may wait for an operation in levels before it begins `operation`. It then needs this rank to
        advance the former.
        """
        if self._queue or operation.finished:
            return operation.finished
        return self.flat.block(operation)

    def late(self) -> tuple[int, ...]:
        found = (self._links[one.level].late() for one in tuple(self._queue) if one.level in self._links)
        return tuple(sorted({rank for ranks in found for rank in ranks}))

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise the error of a link of this host, if any. Between hosts the backend enforces the group's timeout."""
        for one in tuple(self._queue):
            for part in one.under_way:
                if not part.finished:
                    self._links[one.level].look(part, waited_s)

    def _stages(self, operation: Operation) -> tuple[list[Stage], Callable[[], object]] | None:
        """Return the levels of an operation and a function that completes it, or None if it uses the flat link."""
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
            # Rounded once, before it is gathered, as in a single sum over all ranks.
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
        """Return one level's operation. Its errors name the full operation."""
        return replace(whole, kind=kind, axis=f"{whole.axis} ({whole.kind})", source=source, out=out, root=root)


# A link for an axis whose calls use the fastest measured transport for their operation and size.


class ChosenLink(Link):
    """A link that runs each operation on one of several links, chosen by measurement."""

    def __init__(self, links: Mapping[str, Link], fixed: str, size: int, ways: RouteChoices, reason: str):
        self.reason = reason
        #: The transports that calls use, beginning with the fixed one.
        self.transport = " or ".join(dict.fromkeys([fixed, *(name for way in ways.best.values() for _, name in way)]))
        self._links, self._fixed, self._size, self._ways = links, fixed, size, ways
        self._carried: dict[Operation, Link] = {}
        #: Predicted time of all calls so far by measurement, in seconds.
        self.planned_s = 0.0

    @property
    def busy(self) -> bool:
        return any(link.busy for link in self._links.values())

    def start(self, operation: Operation) -> None:
        num_bytes = operation.out.nbytes * (self._size if operation.kind == "reduce_scatter" else 1)
        transport = self._ways.transport(operation.kind, num_bytes, self._fixed)
        self.planned_s += self._ways.seconds(operation.kind, num_bytes, transport)
        self._carried = {one: link for one, link in self._carried.items() if not one.finished}
        self._carried[operation] = self._links[transport]
        self._links[transport].start(operation)

    def advance(self) -> bool:
        moved = [link.advance() for link in self._links.values() if link.busy]
        return any(moved)

    def block(self, operation: Operation) -> bool:
        """Wait until the operation's link completes it. Returns False if it cannot, or other links have operations."""
        own = self._carried[operation]
        if any(link is not own and not one.finished for one, link in self._carried.items()):
            return False
        return own.block(operation)

    def late(self) -> tuple[int, ...]:
        return tuple(sorted({rank for link in self._links.values() for rank in link.late()}))

    def look(self, operation: Operation, waited_s: float) -> None:
        if operation in self._carried:
            self._carried[operation].look(operation, waited_s)


# Rank 0 of an axis reads the measurements of matching links and sends them to the other ranks.

#: The value of Axis.link_profile for the file in the cache folder, if it exists.
AUTO = "auto"


def measured_routes(
    axis: Axis, group: dist.ProcessGroup, hosts: Hosts, fixed: str, usable: tuple[str, ...]
) -> tuple[RouteChoices | None, str]:
    """Return the measured route choices and the reason, or None and the reason ("" if there is no file).

    All ranks of the axis call this. The first one reads its file and sends the result, so all ranks have the same.

    Raises:
        ConfigError: on all ranks, if the given file is missing or invalid.
    """
    told: dict[str, Any] = {}
    if axis.rank == 0:
        try:
            told = _look_up(axis, hosts, fixed, usable)
        except ConfigError as error:
            told = {"error": str(error)}
    told = _from_first(axis, group, told)
    if "error" in told:
        raise ConfigError(told["error"])
    return (RouteChoices(**told["ways"]) if "ways" in told else None), str(told.get("why", ""))


def _look_up(axis: Axis, hosts: Hosts, fixed: str, usable: tuple[str, ...]) -> dict[str, Any]:
    path = LinkProfile.default_path() if axis.link_profile == AUTO else Path(axis.link_profile)
    if axis.link_profile == AUTO and not path.exists():
        return {}
    profile = LinkProfile.load(path)
    if changes := profile.machine.differences(here.this_host()):
        return {"why": f"{path} was measured with {'; '.join(changes)}: measure again with weft calibrate --hosts"}
    layout = hosts.layout
    ways = profile.route_choices(*layout, fixed, usable) if layout else None
    if ways is None:
        words = "ranks spread unevenly" if layout is None else f"{layout[0]} hosts of {layout[1]} ranks"
        return {"why": f"{path} has no measurement of {words}"}
    better = f": {', '.join(ways.gains)}" if ways.gains else ", where no other way was a tenth faster"
    return {"ways": asdict(ways), "why": f"links were measured on {profile.made}{better}"}


def _from_first(axis: Axis, group: dist.ProcessGroup, told: dict[str, Any]) -> dict[str, Any]:
    """Broadcast a JSON object from the axis's first rank."""
    text = json.dumps(told).encode()
    length = torch.tensor([len(text)])
    all_reduce(length, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
    words = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
    broadcast(words, src=axis.ranks[0], group=group, async_op=True).wait()
    return json.loads(as_bytes(words))
