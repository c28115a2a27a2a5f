"""Which ranks of an axis share a host, and the memory that they then share."""

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
    """What the ranks of an axis told each other, the same on all of them.

    numbers: of the host of each place on the axis, counted as they come: bytes between two of one number leave no host.
    memories: the same of those that can share memory; -1: this one cannot. why: this rank cannot; empty: it can.
    """

    numbers: tuple[int, ...]
    memories: tuple[int, ...]
    why: str

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can share one memory."""
        return set(self.memories) == {0}

    @property
    def layout(self) -> tuple[int, int] | None:
        """Return how many hosts there are and how many ranks each has; None where these differ."""
        counts = {self.numbers.count(number) for number in self.numbers}
        return (len(set(self.numbers)), counts.pop()) if len(counts) == 1 else None

    @property
    def block(self) -> int:
        """Return how many neighbours of each host share memory, where hosts hold equal blocks of 2^k; else 1.

        Such a block is a branch of the tree that sums are made in.
        """
        size, found = len(self.memories), self.memories.count(0)
        blocks = tuple(place // max(found, 1) for place in range(size))
        alike = found > 1 and found < size and self.memories == blocks and size % found == 0
        return found if alike and found & (found - 1) == 0 else 1


def exchange_hosts(axis: Axis, group: dist.ProcessGroup) -> Hosts:
    """Let the ranks tell each other where they are; the axis keeps it for all of its mesh. A collective.

    Args:
        axis: the ranks.
        group: of gloo, of these ranks.
    """
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
    """Let each `block` neighbours map memory that they share: `number` of segments, or none and why. A collective.

    The same answer on all ranks of the axis.

    Args:
        axis: the ranks.
        group: of gloo, of these ranks.
        block: ranks that share one memory; the size of the axis: all.
        number: of segments.
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
    """Return 16 bytes that are equal on ranks of one network namespace: bytes between them leave no host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot, network = platform.node(), ""
    return hashlib.sha256(f"{boot} {network} {env.pretended_host()}".encode()).digest()[:16]


# Hosts with equal blocks of ranks: bytes leave a host once for all of its ranks, each of which sends a part.

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


# An axis whose calls take the transport that was measured to be the faster for their operation and size.


class ChosenLink:
    """Carries each operation over one of several links.

    Args:
        links: by transport.
        fixed: the transport of what was not measured.
        size: ranks of the axis.
        ways: what was measured.
        reason: why links were chosen so, in words.
    """

    self_driven = False

    def __init__(self, links: Mapping[str, Link], fixed: str, size: int, ways: RouteChoices, reason: str):
        self.reason = reason
        #: The transports that calls take, that of the fixed rule first.
        self.transport = " or ".join(dict.fromkeys([fixed, *(name for way in ways.best.values() for _, name in way)]))
        self._links, self._fixed, self._size, self._ways = links, fixed, size, ways
        self._carried: dict[Operation, Link] = {}
        #: What all calls so far should have taken by measurement, in seconds.
        self.planned_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return any(link.busy for link in self._links.values())

    def start(self, operation: Operation) -> None:
        """Begin the operation on its link."""
        num_bytes = operation.out.nbytes * (self._size if operation.kind == "reduce_scatter" else 1)
        transport = self._ways.transport(operation.kind, num_bytes, self._fixed)
        self.planned_s += self._ways.seconds(operation.kind, num_bytes, transport)
        self._carried = {one: link for one, link in self._carried.items() if not one.finished}
        self._carried[operation] = self._links[transport]
        self._links[transport].start(operation)

    def advance(self) -> bool:
        """Carry on all links; True when something moved."""
        moved = [link.advance() for link in self._links.values() if link.busy]
        return any(moved)

    def block(self, operation: Operation) -> bool:
        """Wait in the operation's link, where nothing is under way on the others; False where it cannot."""
        own = self._carried[operation]
        if any(link is not own and not one.finished for one, link in self._carried.items()):
            return False
        return own.block(operation)

    def late(self) -> tuple[int, ...]:
        """Return the ranks that one of the links waits for."""
        return tuple(sorted({rank for link in self._links.values() for rank in link.late()}))

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise what the operation's link raises."""
        if operation in self._carried:
            self._carried[operation].look(operation, waited_s)


# The ranks of an axis hear from its first one what was measured of links such as theirs.

#: The value of Axis.link_profile that stands for the file in the cache folder, where there is one.
AUTO = "auto"


def measured_routes(
    axis: Axis, group: dist.ProcessGroup, hosts: Hosts, fixed: str, usable: tuple[str, ...]
) -> tuple[RouteChoices | None, str]:
    """Return what to take by measurement, and why; or None, and why not (empty: there is no file of measurements).

    All ranks of the axis call this together: the first one reads its file and tells the others, so all hold the same.

    Args:
        axis: the ranks.
        group: of gloo, of these ranks.
        hosts: where they are.
        fixed: the transport of the fixed rule.
        usable: transports that the axis can take.

    Raises:
        ConfigError: on all ranks, where the file named is missing or wrong.
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
    """What the first rank says."""
    text = json.dumps(told).encode()
    length = torch.tensor([len(text)])
    all_reduce(length, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
    words = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8)
    broadcast(words, src=axis.ranks[0], group=group, async_op=True).wait()
    return json.loads(as_bytes(words))
