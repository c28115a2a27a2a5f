"""Race detection: accesses to the same memory from two streams without an order, found at launch.

The order of streams comes from torch's CUDA sanitizer (`torch.cuda._sanitizer`). The sanitizer compares first
addresses. Here memory is compared by range, because views of flat buffers can overlap partially.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.cuda._sanitizer import StreamSynchronizations
from torch.multiprocessing.reductions import StorageWeakRef

from tools.gpu_sim.counts import line_of

#: Torch's number of the default stream.
DEFAULT = 0


class Access(NamedTuple):
    """One kernel's access to bytes [first, last) of a storage."""

    first: int
    last: int
    stream: int
    number: int
    kernel: str
    line: str
    writes: bool


@dataclass(frozen=True, slots=True)
class Touched:
    """Accessed ranges of a storage, each with first byte, end byte (exclusive), and True for a write."""

    storage: StorageWeakRef
    ranges: set[tuple[int, int, bool]]


@dataclass(slots=True)
class _Memory:
    """Accesses of a storage that may still race with later ones. `home` is the current stream at its allocation."""

    alive: StorageWeakRef
    home: int
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class Races:
    """Collects accesses and their order. `found` counts races by description."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.order = StreamSynchronizations()
        self._number = 0
        self._memory: dict[int, _Memory] = {}
        # Storages that were used on streams other than their home. Only these can be freed too early.
        self._visited: set[int] = set()

    def launch(self, stream: int, kernel: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Record a kernel launch on a stream."""
        self._look_for_freed(stream)
        self._number += 1
        self.order.update_seq_num(stream, self._number)
        line = line_of()
        touched: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        for tensors, writing in ((writes, True), (reads, False)):
            for tensor in tensors:
                if tensor.device.type != "cuda" or not tensor.numel():
                    continue
                memory = self._of(tensor, stream)
                touched[memory].append((*range_of(tensor), writing))
        for memory, ranges in touched.items():
            for first, last, writing in ranges:
                self._access(memory, Access(first, last, stream, self._number, kernel, line, writing))

    def launch_on(self, stream: int, kernel: str, memories: Mapping[int, Touched]) -> None:
        """Record a graph launch. Its tensors may be freed, and memory that only the graph used cannot race."""
        self._look_for_freed(stream)
        self._number += 1
        self.order.update_seq_num(stream, self._number)
        line = line_of()
        for key, memory in memories.items():
            if memory.storage.expired():
                continue
            if key not in self._memory:
                self._memory[key] = _Memory(memory.storage, stream)
            if stream != self._memory[key].home:
                self._visited.add(key)
            for first, last, writing in memory.ranges:
                self._access(key, Access(first, last, stream, self._number, kernel, line, writing))

    def made(self, tensor: torch.Tensor, stream: int) -> None:
        """Record an allocation. The allocator reuses the memory on `stream` when the tensor is freed."""
        self._look_for_freed(stream)
        self._of(tensor, stream)

    def used_by(self, tensor: torch.Tensor, stream: int) -> None:
        """Record `tensor.record_stream(stream)`, which delays reuse of the memory until `stream` has done its work."""
        memory = self._memory[self._of(tensor, stream)]
        memory.recorded.add(stream)

    def _of(self, tensor: torch.Tensor, stream: int) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # The weak reference prevents reuse of the address while this storage is tracked.
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = _Memory(StorageWeakRef(storage), stream)
        if stream != memory.home:
            self._visited.add(key)
        return key

    def _access(self, key: int, new: Access) -> None:
        memory = self._memory[key]
        kept = []
        for old in memory.accesses:
            overlaps = old.first < new.last and new.first < old.last
            ordered = self.order.is_ordered_after(new.stream, old.number, old.stream)
            if overlaps and not ordered and (old.writes or new.writes):
                self._report_race(new, old)
            # A new access replaces an old one that it covers, is ordered after, and conflicts at least as much as.
            covered = ordered and new.first <= old.first and old.last <= new.last and (new.writes or not old.writes)
            if not covered:
                kept.append(old)
        kept.append(new)
        memory.accesses = kept

    def _report_race(self, new: Access, old: Access) -> None:
        now, before = ("writes" if one.writes else "reads" for one in (new, old))
        self.found[
            f"{new.kernel} @ {new.line} {now} on stream {new.stream} what {old.kernel} @ {old.line} {before} "
            f"on stream {old.stream}, and nothing orders them"
        ] += 1

    def _look_for_freed(self, stream: int) -> None:
        """Find freed memory that `stream` may reuse while another stream may still use it."""
        gone = [key for key in self._visited if self._memory[key].home == stream and self._memory[key].alive.expired()]
        for key in gone:
            memory = self._memory.pop(key)
            self._visited.discard(key)
            for old in memory.accesses:
                late = not self.order.is_ordered_after(memory.home, old.number, old.stream)
                if old.stream != memory.home and old.stream not in memory.recorded and late:
                    self.found[
                        f"memory of stream {memory.home} is free for others while {old.kernel} @ {old.line} may still "
                        f"use it on stream {old.stream}: no record_stream, and nothing waits"
                    ] += 1
        if self._number % 512 == 0:
            for key in [key for key, memory in self._memory.items() if memory.alive.expired()]:
                self._memory.pop(key)
                self._visited.discard(key)


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte and the end byte (exclusive) in the tensor's storage."""
    width = tensor.element_size()
    first = int(tensor.storage_offset()) * width
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + int(reach + 1) * width
