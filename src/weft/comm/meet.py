"""How the ranks of an axis meet: once, when the axis is first used, they agree on one transport and keep it.

| ranks of the axis | tensors on | transport |
|---|---|---|
| all on one host (same boot, process namespace and user; x86-64 Linux) | CPU, gloo | shared memory |
| otherwise | CPU, gloo | gloo exchange: gloo moves bytes, sums are made here |
| any | CUDA (nccl), or CPU with another backend than gloo | the backend's own |
| any | CUDA in a group of gloo, as for several ranks on one GPU | staged: copied to the host, then as above |

On the CPU a transport never changes a bit of a result. Figures and reasons: docs/adr.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from weft.comm.links import BackendLink, ExchangeLink, Link, Segment, SharedLink, StagedLink, host_mark
from weft.comm.private_torch import all_gather, all_reduce, as_bytes, backend_of, broadcast, timeout_s
from weft.errors import CommError
from weft.mesh import Axis, Mesh

TRANSPORTS = (SharedLink.transport, ExchangeLink.transport, BackendLink.transport, StagedLink.transport)


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport that an axis's ranks agreed on. ranks: global. device: "cpu" or "cuda"."""

    ranks: tuple[int, ...]
    device: str
    transport: str
    reason: str


def transports(mesh: Mesh) -> list[Choice]:
    """Return how the axes of the mesh communicate, of those that have done so."""
    found: list[Choice] = []
    for (group, device), link in mesh.world.links.items():
        link = cast(Link, link)
        ranks = tuple(dist.get_process_group_ranks(cast(dist.ProcessGroup, group)))
        found.append(Choice(ranks, str(device), link.transport, link.reason))
    return found


def links_of(axis: Axis) -> list[Link]:
    """All links of the axis's mesh."""
    return cast("list[Link]", list(axis.links.values()))


def link_of(axis: Axis, device: torch.device) -> Link:
    """The link of the axis for tensors on `device`; at the first call all its ranks meet."""
    # By group, not by ranks: looking thousands of them up takes tens of microseconds, several times a collective.
    link = axis.links.get((axis.group, device.type))
    return cast(Link, link) if link is not None else join(axis, device.type)


def join(axis: Axis, device: str, transport: str | None = None) -> Link:
    """Choose the axis's transport anew, or take the one named (benchmarks and tests do). Called on all its ranks.

    Raises CommError when the ranks cannot meet, or cannot use the transport named.
    """
    assert axis.group is not None, "an axis of size 1 has nobody to meet"
    axis.pulse.waiting = _Meeting(axis)
    try:
        link = _join(axis, axis.group, device, transport)
    except RuntimeError as error:
        raise CommError(
            f"axis {axis.label}: ranks {', '.join(map(str, axis.ranks))} cannot meet: {error}. "
            f"Look at the logs of these ranks: one has probably ended."
        ) from error
    finally:
        axis.pulse.waiting = None
        axis.pulse.moved += 1
    axis.links[(axis.group, device)] = link
    return link


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The first meeting of an axis's ranks, as something that is waited for."""

    axis: Axis

    def where(self) -> tuple[str, tuple[int, ...]]:
        return f"the first meeting over {self.axis.label}", self.axis.ranks

    def late(self) -> tuple[int, ...]:
        return ()


def _join(axis: Axis, group: dist.ProcessGroup, device: str, transport: str | None) -> Link:
    backend = backend_of(group, torch.device(device))
    asked = f"{transport} was requested" if transport else ""
    is_gloo = backend.name() == "gloo"
    if transport == StagedLink.transport or (device != "cpu" and is_gloo and not transport):
        return StagedLink(_join(axis, group, "cpu", None), asked or f"gloo cannot access the memory of {device}")
    foreign = device != "cpu" or not is_gloo
    if transport == BackendLink.transport or (foreign and not transport):
        return BackendLink(group, axis.ranks, asked or f"{backend.name()} is the backend for {device}")
    if transport == ExchangeLink.transport:
        return ExchangeLink(group, axis.ranks, axis.rank, asked)
    segment, why = _share(axis, group)
    if segment is not None:
        return SharedLink(segment, axis.ranks, timeout_s(backend), asked or f"all {axis.size} ranks are on one host")
    if transport:
        raise CommError(f"axis {axis.label}: its ranks cannot share memory: {why}. Use another transport.")
    return ExchangeLink(group, axis.ranks, axis.rank, why)


def _share(axis: Axis, group: dist.ProcessGroup) -> tuple[Segment | None, str]:
    """The axis's shared memory, or None and why there is none; the same answer on all ranks."""
    mark, why = host_mark()
    marks = [torch.zeros(16, dtype=torch.uint8) for _ in axis.ranks]
    own = torch.frombuffer(bytearray(mark.ljust(16, b"\0")), dtype=torch.uint8)
    all_gather(marks, own, group=group, async_op=True).wait()
    found = {as_bytes(other) for other in marks}
    if len(found) > 1 or not mark:
        return None, why or f"its ranks are on {len(found)} hosts, namespaces or users that share no memory"
    segment, address = None, (0, 0, bytes(16))
    if axis.rank == 0:
        try:
            segment, address = Segment.make(axis.size)
        except OSError as error:
            why = f"{Segment.total_bytes(axis.size)} bytes of shared memory cannot be allocated ({error.strerror})"
    words = torch.zeros(32, dtype=torch.uint8)
    if segment is not None:
        pid, fd, token = address
        words = torch.frombuffer(
            bytearray(pid.to_bytes(8, "little") + fd.to_bytes(8, "little") + token), dtype=torch.uint8
        )
    broadcast(words, src=axis.ranks[0], group=group, async_op=True).wait()
    if axis.rank != 0:
        told = as_bytes(words)
        address = (int.from_bytes(told[:8], "little"), int.from_bytes(told[8:16], "little"), told[16:])
        try:
            segment = Segment.find(address, axis.rank, axis.size) if address[0] else None
        except OSError as error:
            why = f"the memory of rank {axis.ranks[0]} cannot be opened ({error.strerror})"
    agreed = torch.tensor([segment is not None], dtype=torch.int32)
    all_reduce(agreed, op=dist.ReduceOp.MIN, group=group, async_op=True).wait()
    if not agreed.item():
        return None, why or "another rank of the axis could not map the shared memory"
    return segment, ""
