"""Accesses to the same memory from two streams that nothing orders, found while they are launched.

Which stream has seen what is kept by torch's own CUDA sanitizer (`torch.cuda._sanitizer`). It looks at first addresses;
here memory is compared by range, since views of flat buffers begin in one and end in another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.cuda._sanitizer import StreamSynchronizations
from torch.multiprocessing.reductions import StorageWeakRef

from weft.gpu_sim.counts import line_of

#: The default stream, by torch's number.
DEFAULT = 0


class Access(NamedTuple):
    """One kernel's use of bytes [first, last) of a storage."""

    first: int
    last: int
    stream: int
    number: int
    kernel: str
    line: str
    writes: bool


@dataclass(frozen=True, slots=True)
class Touched:
    """What of a storage is used: first byte, the one behind the last, and whether it is written."""

    storage: StorageWeakRef
    ranges: set[tuple[int, int, bool]]


@dataclass(slots=True)
class _Memory:
    """A storage's accesses that a later one may still collide with. home: the stream that was current at its making."""

    alive: StorageWeakRef
    home: int
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class Races:
    """Collects accesses and what orders them. found: descriptions, with how often."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.order = StreamSynchronizations()
        self._number = 0
        self._memory: dict[int, _Memory] = {}
        # Storages that other streams than their own have used: these alone can be freed too early.
        self._visited: set[int] = set()

    def launch(self, stream: int, kernel: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """A kernel is put on a stream."""
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
        """The same for a graph, whose tensors may be gone: memory that was inside of it alone is no others'."""
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
        """Memory was taken from the allocator, which gives it to others of `stream` when the tensor is gone."""
        self._look_for_freed(stream)
        self._of(tensor, stream)

    def used_by(self, tensor: torch.Tensor, stream: int) -> None:
        """`tensor.record_stream(stream)`: its memory goes to others only after what `stream` has to do."""
        memory = self._memory[self._of(tensor, stream)]
        memory.recorded.add(stream)

    def _of(self, tensor: torch.Tensor, stream: int) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # The weak reference keeps the address from being given to another storage while this one is remembered.
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
                self._notify_all(new, old)
            # What an ordered access covers whole, and says no less of, is asked in its place from here on.
            covered = ordered and new.first <= old.first and old.last <= new.last and (new.writes or not old.writes)
            if not covered:
                kept.append(old)
        kept.append(new)
        memory.accesses = kept

    def _notify_all(self, new: Access, old: Access) -> None:
        now, before = ("writes" if one.writes else "reads" for one in (new, old))
        self.found[
            f"{new.kernel} @ {new.line} {now} on stream {new.stream} what {old.kernel} @ {old.line} {before} "
            f"on stream {old.stream}, and nothing orders them"
        ] += 1

    def _look_for_freed(self, stream: int) -> None:
        """Memory that the allocator may give to what `stream` does next, while another stream may still use it."""
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
    """First byte and the one behind the last, in its storage."""
    width = tensor.element_size()
    first = int(tensor.storage_offset()) * width
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + int(reach + 1) * width
