"""Which ranks of an axis share a host, and the memory that they then share."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from weft import env
from weft.comm.links import Segment, host_mark
from weft.comm.private_torch import all_gather, all_reduce, as_bytes
from weft.mesh import Axis

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


def meet_hosts(axis: Axis, group: dist.ProcessGroup) -> Hosts:
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
