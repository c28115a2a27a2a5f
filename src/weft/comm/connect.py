"""Choice of the transport of an axis. Its ranks agree on one when the axis is first used, and keep it.

| ranks of the axis | tensors on | transport |
|---|---|---|
| all on one host (same boot, process namespace and user; x86-64 Linux) | CPU, gloo | shared memory |
| on several hosts, with 2, 4, 8 ... neighbors on each | CPU, gloo | two levels: within hosts, then between them |
| all others, and several hosts with `route=flat` | CPU, gloo | gloo exchange: gloo moves the bytes, we compute sums |
| any | CUDA (nccl), or CPU with another backend than gloo | the backend's collectives |
| any | CUDA in a gloo group, such as several ranks on one GPU | staged: copied to the host, then as above |

Within a host, the backend's collectives send bf16 and fp16 unconverted, at half the bytes, if their sum is requested in
fp32.

With `route=auto` and measured links (`weft calibrate --hosts`), each call uses the fastest transport for its operation
and size. On the CPU, the transport never changes a bit of the result. The rationale is in docs/adr.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from weft.comm.mesh import Axis, Mesh, join_group
from weft.comm.private_torch import Backend, all_reduce, backend_of, timeout_s
from weft.comm.transports.backend import BackendLink, ExchangeLink
from weft.comm.transports.link import Link, StagedLink
from weft.comm.transports.shared_memory import SharedLink
from weft.comm.transports.two_level import (
    ChosenLink,
    Hosts,
    TwoLevelLink,
    exchange_hosts,
    measured_routes,
    share_memory,
)
from weft.devices import access
from weft.errors import CommError

#: Largest axis for which the ranks check if they are on one host.
MOST_OF_A_HOST = 16
#: Transports that work for any ranks of one host. The two-level transport needs several hosts.
TRANSPORTS = (SharedLink.transport, ExchangeLink.transport, BackendLink.transport, StagedLink.transport)


@dataclass(frozen=True, slots=True)
class Choice:
    """Transport on which an axis's ranks agreed.

    Attributes:
        ranks: global ranks of the axis.
        device: device type of the tensors.
        planned_s: predicted time (s) of its calls so far, or None if links were not measured.
    """

    ranks: tuple[int, ...]
    device: str
    transport: str
    reason: str
    planned_s: float | None = None


def transports(mesh: Mesh) -> list[Choice]:
    """Return the transport of each axis of the mesh that has communicated."""
    found: list[Choice] = []
    for (group, device), link in mesh.world.links.items():
        link = cast(Link, link)
        ranks = tuple(dist.get_process_group_ranks(cast(dist.ProcessGroup, group)))
        planned_s = link.planned_s if isinstance(link, ChosenLink) else None
        found.append(Choice(ranks, str(device), link.transport, link.reason, planned_s))
    return found


def links_of(axis: Axis) -> list[Link]:
    return cast("list[Link]", list(axis.links.values()))


def link_of(axis: Axis, device: torch.device) -> Link:
    """Return the axis's link for tensors on `device`. The first call is a collective over the axis."""
    # Looked up by group instead of ranks: hashing thousands of ranks takes tens of microseconds, several times per
    # collective.
    link = axis.links.get((axis.group, device.type))
    return cast(Link, link) if link is not None else join(axis, device.type)


def sends_short_summands(axis: Axis, device: torch.device) -> bool:
    """Return True if a reduce_scatter sends bf16 and fp16 unconverted although the sum is requested in fp32.

    The first call is a collective over the axis.
    """
    if axis.size == 1:
        return False
    link = link_of(axis, device)
    return isinstance(link, BackendLink) and link.sends_short_summands


def join(axis: Axis, device: str, transport: str | None = None) -> Link:
    """Choose the axis's transport, or use the given one, instead of an earlier choice. All ranks of the axis call this.

    device: device type of the tensors, such as "cpu". transport: name of the transport to use, or None for the best
    one. Raises CommError if the ranks cannot connect, or cannot use the given transport. Raises ConfigError if the file
    of link measurements is missing or invalid.
    """
    assert axis.group is not None, "an axis of size 1 has no other rank"
    axis.pulse.waiting = _Rendezvous(axis)
    try:
        link = _join(axis, axis.group, device, transport)
    except RuntimeError as error:
        raise CommError(
            f"axis {axis.label}: ranks {', '.join(map(str, axis.ranks))} cannot connect: {error}. "
            f"Look at the logs of these ranks: one has probably ended."
        ) from error
    finally:
        axis.pulse.waiting = None
        axis.pulse.moved += 1
    axis.links[(axis.group, device)] = link
    return link


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """The first rendezvous of an axis's ranks, as a wait that the hang watch can report."""

    axis: Axis

    def where(self) -> tuple[str, tuple[int, ...]]:
        return f"the first connection over {self.axis.label}", self.axis.ranks

    def late(self) -> tuple[int, ...]:
        return ()


def _join(axis: Axis, group: dist.ProcessGroup, device: str, transport: str | None) -> Link:
    asked = f"{transport} was requested" if transport else ""
    backend = backend_for(group, torch.device(device))
    is_gloo = backend.name() == "gloo"
    if access.kind_of(torch.device(device)).through_host and not transport:
        # The link of CPU tensors, because other ranks of the axis may be CPUs.
        return StagedLink(link_of(axis, torch.device("cpu")), f"{device} has no backend of its own")
    if transport == StagedLink.transport or (device != "cpu" and is_gloo and not transport):
        return StagedLink(_join(axis, group, "cpu", None), asked or f"gloo cannot access the memory of {device}")
    foreign = device != "cpu" or not is_gloo
    if transport == BackendLink.transport or (foreign and not transport):
        reason = asked or f"{backend.name()} is the backend for {device}"
        return BackendLink(group, axis.ranks, reason, functools.partial(_on_one_host, axis, group))
    hosts = exchange_hosts(axis, group)
    link = _link_by_position(axis, group, hosts, device, transport)
    if transport is None and axis.route == "auto" and axis.link_profile:
        return _by_measurement(axis, group, hosts, link)
    return link


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """Return the group's backend that carries tensors of a device, perhaps through host memory."""
    through_host = access.kind_of(device).through_host
    return backend_of(group, torch.device("cpu") if through_host else device)


def _on_one_host(axis: Axis, group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of the axis are on one host. Collective; False for more than MOST_OF_A_HOST ranks."""
    if axis.size > MOST_OF_A_HOST:
        return False
    waiting, axis.pulse.waiting = axis.pulse.waiting, _Rendezvous(axis)
    try:
        return len(set(exchange_hosts(axis, group).numbers)) == 1
    finally:
        axis.pulse.waiting = waiting


def _by_measurement(axis: Axis, group: dist.ProcessGroup, hosts: Hosts, link: Link) -> Link:
    """Return a link that picks the fastest measured transport per call.

    Without measurements for this axis, return `link`, and append the cause to its `reason`.
    """
    usable = tuple(dict.fromkeys((link.transport, ExchangeLink.transport)))
    ways, why = measured_routes(axis, group, hosts, link.transport, usable)
    if ways is None:
        link.reason += f"; {why}" if why else ""
        return link
    links = {link.transport: link}
    if any(name not in links for way in ways.best.values() for _, name in way):
        # Reuse the flat link of the two-level link: if two links posted stages in one group, their order would differ
        # by rank.
        exchange = link.flat if isinstance(link, TwoLevelLink) else None
        links[ExchangeLink.transport] = exchange or ExchangeLink(group, axis.ranks, axis.rank, why, hosts.numbers)
    return ChosenLink(links, link.transport, axis.size, ways, f"{link.reason}; {why}")


def _link_by_position(axis: Axis, group: dist.ProcessGroup, hosts: Hosts, device: str, transport: str | None) -> Link:
    """Return the link that the hosts of the ranks allow, or the requested one.

    Raises CommError if they do not allow the requested one, or route=two_level on several hosts.
    """
    asked = f"{transport} was requested" if transport else ""
    limit_s = timeout_s(backend_of(group, torch.device(device)))
    why = hosts.why or f"its ranks are on {len(set(hosts.memories))} hosts, namespaces or users that share no memory"
    if hosts.shares_memory and transport in (None, SharedLink.transport):
        segments, why = share_memory(axis, group, axis.size)
        if segments:
            reason = asked or f"all {axis.size} ranks are on one host"
            return SharedLink(segments[0], axis.ranks, limit_s, reason)
    if transport == SharedLink.transport:
        raise CommError(f"axis {axis.label}: its ranks cannot share memory: {why}. Use another transport.")
    if transport == TwoLevelLink.transport or (axis.route != "flat" and transport is None):
        link, refusal = _two_levels(axis, group, hosts, asked)
        if link is not None:
            return link
        if transport or (axis.route == "two_level" and len(set(hosts.numbers)) > 1):
            raise CommError(
                f"route=two_level: axis {axis.label}: {refusal}. Use route=auto, or put 2, 4, 8 ... neighbors of the "
                "axis on each host."
            )
    return ExchangeLink(group, axis.ranks, axis.rank, asked or why, hosts.numbers)


def _two_levels(axis: Axis, group: dist.ProcessGroup, hosts: Hosts, asked: str) -> tuple[Link | None, str]:
    """Return the two-level link, or None and the reason. All ranks get the same result."""
    block = hosts.block
    if block == 1:
        return None, "its hosts do not have equal blocks of 2, 4, 8 ... neighboring ranks that share memory"
    segments, why = share_memory(axis, group, block, number=2)
    if not segments:
        return None, why
    host, place = divmod(axis.rank, block)
    neighbours, peers = axis.ranks[host * block :][:block], axis.ranks[place::block]
    limit_s, words = timeout_s(backend_of(group, torch.device("cpu"))), "the ranks of one host"
    within = (SharedLink(segments[0], neighbours, limit_s, words), SharedLink(segments[1], neighbours, limit_s, words))
    # Groups for this axis only: another axis may have the same peers, and would post operations in another order on
    # each rank.
    name = f"between hosts of {zlib.crc32(repr(axis.ranks).encode()):08x}"
    peer_group = join_group(peers, name)
    between = ExchangeLink(
        peer_group, peers, host, "ranks of equal position", tuple(range(len(peers))), f"second {name}"
    )
    flat = ExchangeLink(group, axis.ranks, axis.rank, words, hosts.numbers)
    reason = asked or f"{len(peers)} hosts hold {block} neighboring ranks each"
    return TwoLevelLink(within, between, flat, axis.rank, block, reason), ""


def try_backend(device: torch.device) -> None:
    """Start a process group of this process alone, and sum a tensor of the device with the device's backend.

    Raises RuntimeError or ValueError if the backend cannot do this.
    """
    here = torch.device("cpu") if access.kind_of(device).through_host else device
    dist.init_process_group(access.group_backend(device), store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage] - documented by torch
    try:
        numbers = torch.arange(4.0, device=here)
        group = dist.group.WORLD
        assert group is not None, "the group was started above"
        all_reduce(numbers, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
        found = [float(number) for number in numbers]
        if found != [0.0, 1.0, 2.0, 3.0]:
            raise RuntimeError(f"the sum of one rank's numbers is {found}")
    finally:
        dist.destroy_process_group()
