"""The mesh and its axes from the view of one rank, and the process groups of its axes."""

from __future__ import annotations

import datetime
import gc
import ipaddress
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft import env
from weft.comm.gpu_settings import multiply_as_planned
from weft.comm.heartbeat import Heartbeat
from weft.comm.missing_ranks import connection_error, note_arrival, noticed, wait_for_host
from weft.comm.rank_positions import ENDS, EXPERT_AXES, Reader, joined, members_of, strides
from weft.config.plan import AXES, Plan
from weft.devices import access
from weft.devices.kinds import obstacle
from weft.errors import CommError, LaunchError, PlanError, WeftError
from weft.private_torch import (
    PrefixStore,
    Store,
    TCPStore,
    default_device_types,
    default_timeout,
    groups_made,
    naming_group,
)

# Axes and their groups.


class Waited(Protocol):
    """Wait of a device's stream for a collective. Its duration is available only later."""

    def seconds(self) -> float:
        """Return the seconds. Blocks the host until they are available."""
        ...


class RecordsCall(Protocol):
    """A callback that records each collective."""

    def __call__(
        self, axis: str, operation: str, num_bytes: int, seconds: float | Waited, sent_bytes: int, off_host_bytes: int
    ) -> None:
        """Record one call.

        num_bytes: size of the tensor on this rank, in its wire format. sent_bytes: bytes that this rank sent to others.
        off_host_bytes: the part of `sent_bytes` that left its host.
        """
        ...


def ignore(
    axis: str, operation: str, num_bytes: int, seconds: float | Waited, sent_bytes: int, off_host_bytes: int
) -> None:
    """Ignore a call: the default `record` of a mesh."""


#: How bytes move between hosts. flat: directly between ranks. two_level: first within each host. auto: the faster. The
#: route does not change results.
ROUTES = ("auto", "flat", "two_level")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, or several joined, from the view of this rank.

    Attributes:
        rank: this rank's index on the axis.
        ranks: global ranks of the group, in order of the axis.
        group: torch's process group, or None if size is 1.
        used: names of the joined axes that have several ranks.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    record: RecordsCall = field(default=ignore, repr=False, compare=False)
    #: State of comm between calls, for the lifetime of the mesh. One dict, shared by all axes of a mesh.
    links: dict[tuple[object, ...], object] = field(
        default_factory=dict[tuple[object, ...], object], repr=False, compare=False
    )
    #: Progress of this rank, for the hang watch. One object for all axes of a mesh.
    pulse: Heartbeat = field(default_factory=Heartbeat, repr=False, compare=False)
    #: Collectives in flight whose second stage has not started. One list, shared by all axes of a mesh.
    staged: list[Any] = field(default_factory=list[Any], repr=False, compare=False)
    #: Torch operators by name that replace this axis's collectives in torch.compile graphs; see `comm.autograd`.
    operators: dict[str, object] = field(default_factory=dict[str, object], repr=False, compare=False)
    #: Route of bytes between hosts: one of ROUTES.
    route: str = field(default="auto", repr=False, compare=False)
    #: Link measurements for route=auto: a file, "auto" for the file in the cache folder, or "".
    link_profile: str = field(default="", repr=False, compare=False)
    #: The host of each rank, by global rank, of ranks that have connected. One dict, shared by all axes of a mesh.
    hosts: dict[int, bytes] = field(default_factory=dict[int, bytes], repr=False, compare=False)
    used: str = field(default="", repr=False, compare=False)

    @property
    def label(self) -> str:
        """Display name, without axes of size 1. `name` is the same under every plan."""
        return self.used or self.name


# The mesh: every rank's position on the plan's axes, and its process group along each axis.

#: Default time (s) that a collective waits for a rank.
LIMIT_S = 1800.0
#: Timeout (s) of requests to the launcher's store.
_STORE_TIMEOUT = datetime.timedelta(seconds=60)

#: torch.distributed, for its functions that have no types.
_untyped: Any = dist


class Mesh:
    """Axes by name: `mesh["tp"]`, or several joined: `mesh["dp_replicate", "dp_shard"]`.

    `mesh["ep"]` holds the ranks over which a layer's experts are distributed, `mesh["beside_ep"]` the ranks with the
    same experts. `mesh["tp/2"]` holds 2 adjacent ranks of tp, `mesh["ends"]` the first and the last stage.

    Args:
        plan: the sizes of the axes. `build_mesh` checks them against the number of ranks.
        rank: this process's global rank.
        device: where this rank computes.
        record: called after each collective with its counts for a ledger.
        route: route of bytes between hosts, one of ROUTES.
        link_profile: link measurements for route=auto: a file, "auto" or "".
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        device: torch.device,
        record: RecordsCall = ignore,
        route: str = "auto",
        link_profile: str = "",
    ):
        self.plan, self.rank = plan, rank
        self.world_size = plan.world_size
        self.device, self._record = device, record
        self._route, self._link_profile = route, link_profile
        self._hosts: dict[int, bytes] = {}
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._links: dict[tuple[object, ...], object] = {}
        self._staged: list[Any] = []
        self.pulse = Heartbeat()
        #: The mesh of all replicas: itself.
        self.whole: Mesh = self
        self._replica: Mesh | None = None
        for name in AXES:
            self._axes[(name,)] = self._build((name,))
        #: This rank's index among the ranks that read different samples: its index on `data`, unless several worlds
        #: share the samples.
        self.reader = Reader.for_rank(rank, self.ranks_over(("dp_replicate", "dp_shard")))

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """Return the axis of that name, or the joined axis of several names.

        The first call for these names creates a process group, so all ranks of the axis must call it. Raises PlanError
        for an unknown name, for axes that cannot be joined, and for "ends" on a stage between the first and the last.
        """
        key = self._key((names,) if isinstance(names, str) else names)
        if key not in self._axes:
            self._axes[key] = self._build(key)
        return self._axes[key]

    @property
    def stage_plan(self) -> Plan:
        """The plan with the recompute policy and the offloaded shares of this rank's stages."""
        return self.plan.on_stage(self["pp"].rank)

    @property
    def data(self) -> Axis:
        """The ranks that read different samples: dp_replicate and dp_shard joined."""
        return self["dp_replicate", "dp_shard"]

    @property
    def batch(self) -> Axis:
        """The ranks whose gradients and token counts add up: `data`, and cp, which shards sequences."""
        return self["dp_replicate", "dp_shard", "cp"] if self.plan.cp > 1 else self.data

    @property
    def world(self) -> Axis:
        """All ranks."""
        return self[AXES]

    @property
    def replica(self) -> Mesh:
        """The mesh of this rank's replica if the plan's replicas use local SGD, else this mesh."""
        if self._replica is None:
            self._replica = self if self.plan.sync == "step" else SubMesh(self, "dp_replicate")
        return self._replica

    def built_axes(self) -> list[Axis]:
        """Return the axes that were built so far."""
        return list(self._axes.values())

    def ranks_over(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the global ranks that differ from this one only along those axes, in order. Creates no group."""
        return members_of(self.plan, self.rank, self._key(names))

    def _key(self, names: tuple[str, ...]) -> tuple[str, ...]:
        known = strides(self.plan, names)
        unknown = [name for name in names if name not in known and name != ENDS]
        if unknown:
            raise PlanError(f"mesh axis {unknown[0]!r}: no such axis. Use one of {', '.join(AXES)}, ep.")
        if set(names) & set(EXPERT_AXES) and any(name.partition("/")[0] in AXES[2:] for name in names):
            raise PlanError(
                f"mesh axes {' and '.join(names)}: ep is a view over dp_shard x cp x tp, so it joins none of them. "
                f"Join it with beside_ep, dp_replicate or pp."
            )
        # Outermost first, so that ranks ascend: torch sorts the ranks of a group.
        order = (ENDS, *self.plan.axis_order, *EXPERT_AXES)
        return tuple(sorted(dict.fromkeys(names), key=lambda name: order.index(name.partition("/")[0])))

    def _build(self, names: tuple[str, ...]) -> Axis:
        ranks = members_of(self.plan, self.rank, names)
        if self.rank not in ranks:
            raise PlanError(f"mesh axis 'ends': rank {self.rank} is on a stage between the first and the last one.")
        places = strides(self.plan, names)
        several = [name for name in names if name != ENDS and places[name][1] > 1]
        return Axis(
            name="world" if set(names) == set(AXES) else joined(names),
            used="" if set(names) == set(AXES) else joined(several),
            size=len(ranks),
            rank=ranks.index(self.rank),
            ranks=ranks,
            group=self._group(ranks),
            record=self._record,
            route=self._route,
            link_profile=self._link_profile,
            hosts=self._hosts,
            links=self._links,
            staged=self._staged,
            pulse=self.pulse,
        )

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if len(ranks) == self.world_size:
            return dist.group.WORLD
        return join_group(ranks)


class SubMesh(Mesh):
    """The ranks with one index on an axis as a separate world: that axis has one rank, and `world` has only them.

    Ranks keep their global numbers. Axes, groups, links and the heartbeat are shared with the full mesh.

    Args:
        whole: the full mesh.
        axis: dp_replicate (the result is one replica) or pp (the ranks of one stage).
    """

    def __init__(self, whole: Mesh, axis: str):
        self.plan = whole.plan.replace(**{axis: 1}, compress="none")
        self.rank, self.device, self.pulse = whole.rank, whole.device, whole.pulse
        self.world_size = self.plan.world_size
        self.whole, self._replica, self.reader = whole, self, whole.reader
        self._left_out = axis

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """Return the axis of that name, or the joined axis of several names, among these ranks."""
        return self.whole[self._kept(names)]

    def built_axes(self) -> list[Axis]:
        """Return the axes that the full mesh has built until now."""
        return self.whole.built_axes()

    def ranks_over(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the global ranks among these that differ from this one only along those axes."""
        return self.whole.ranks_over(self._kept(names))

    def _kept(self, names: str | tuple[str, ...]) -> tuple[str, ...]:
        several = (names,) if isinstance(names, str) else names
        return tuple(name for name in several if name.partition("/")[0] != self._left_out)


def join_group(ranks: tuple[int, ...], purpose: str = "axis") -> dist.ProcessGroup:
    """Return the process group of these ranks. The first call creates it; later calls return the same one.

    A group holds sockets and threads, so a later mesh over the same ranks reuses the existing group. Only the members
    need to call this. If torch.distributed is not initialized, it is initialized for this process alone.
    """
    if not dist.is_initialized():  # a single-process run, whose fully_shard needs a group
        dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage] - documented by torch
    description = f"weft {purpose} {' '.join(map(str, ranks))}"
    for group in groups_made():
        if group.group_desc == description:
            return group
    with naming_group(description):
        # Local synchronization: only the members communicate, so a rank does not pay for groups that it is not in.
        made: dist.ProcessGroup = _untyped.new_group(
            list(ranks), timeout=default_timeout(), use_local_synchronization=True, group_desc=description
        )
    return made


def build_mesh(
    plan: Plan,
    device: torch.device | str = "cpu",
    record: RecordsCall = ignore,
    route: str = "auto",
    link_profile: str = "",
) -> Mesh:
    """Return the mesh of `plan` on this rank. Call `join_ranks` first, unless the plan has one rank.

    Also sets whether torch rounds fp32 matmuls on a GPU to TF32, as in `multiply_as_planned`.

    Args:
        plan: the sizes of the axes.
        device: where this rank computes.
        record: called after each collective with its counts, such as `Ledger().record`.
        route: route of bytes between hosts: "auto", "flat" or "two_level".
        link_profile: for route=auto, a file of `weft calibrate --hosts`, or "auto" for the one in the cache folder, if
            any.

    Raises:
        PlanError: if the number of started ranks differs from the plan's, the kind of device cannot run the plan, or
            the route is unknown.
    """
    if route not in ROUTES:
        raise PlanError(f"route={route}: not one of {', '.join(ROUTES)}. Use auto.")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if plan.world_size != world_size:
        sizes = " * ".join(f"{axis}={size}" for axis, size in plan.axis_sizes().items() if size > 1) or "one rank"
        raise PlanError(
            f"plan={plan}: it needs {plan.world_size} ranks ({sizes}), but {world_size} were started. Start "
            f"{plan.world_size} ranks, or use '*' for one axis, such as dp_replicate=*."
        )
    multiply_as_planned(plan.precision, torch.device(device))
    kind = access.kind_of(torch.device(device))
    if refused := obstacle(kind, plan.precision, graphs=False, compiled=plan.compile):
        raise PlanError(f"launch.device={kind.name}: {refused}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Mesh(plan, rank, torch.device(device), record, route, link_profile)


#: How often this process has joined the ranks at an address.
_joined = Counter[tuple[str, int]]()


def join_ranks(
    place: env.RankEnv,
    device: torch.device,
    timeout_s: float = LIMIT_S,
    store: Store | None = None,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Join the other ranks: start the default process group: gloo, and the device's own backend.

    Does nothing for a single rank, unless torchrun started it, or if there is a process group already. Raises CommError
    if ranks of `weft train` cannot connect, or an existing group does not fit. Raises LaunchError if ranks of another
    launcher cannot connect.

    Args:
        timeout_s: seconds that a collective waits for a rank. An existing process group keeps its timeout.
        store: the store from `open_store`, if the caller has opened it already.
        tell: called with a line about ranks that are missing after some seconds; None to write it to stderr.
    """
    if place.world_size == 1 and place.starter != "torchrun":
        return
    backend = access.group_backend(device)
    if dist.is_initialized():
        _check_joined(place, device, backend)
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    store = store or open_store(place, timeout_s)
    try:
        store.set_timeout(timeout)
        # Ranks of one machine. By default gloo listens on the address to which the hostname resolves.
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
        names = [found for _, found in socket.if_nameindex()]
        if _as_loopback(place.master_addr) is not None and loopback in names:
            env.default_for_libraries(GLOO_SOCKET_IFNAME=loopback)
        # A rank that joins, leaves and joins again must not read the keys of the first time. The count is kept here
        # and not in the store, where other processes could change it.
        _joined[place.master_addr, place.master_port] += 1
        joined = _joined[place.master_addr, place.master_port]
        with noticed(place, store, tell):
            dist.init_process_group(
                backend,
                store=PrefixStore(f"weft/{joined}", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if access.has_cuda_kernels(device) else None,
            )
    except (dist.DistError, OSError, RuntimeError, ValueError) as error:
        raise _rendezvous_error(place, store, error, timeout_s) from error


def open_store(place: env.RankEnv, timeout_s: float = LIMIT_S) -> Store:
    """Return the store of this job's ranks. On a single machine it listens on the loopback interface only.

    Rank 0 may host it, so keep it until all ranks have left. Also sets RANK, WORLD_SIZE and the other environment
    variables of torch's rendezvous. Raises CommError if the ranks of `weft train` cannot connect. Raises LaunchError if
    ranks of another launcher cannot connect.
    """
    env.export_rank(place)
    address = _as_loopback(place.master_addr)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        with noticed(place, None, None):
            if address is not None and place.rank == 0 and not env.keeps_agent_store():
                store: Store = loopback_store(address, place.master_port, timeout)
            else:
                if place.starter != "weft":
                    wait_for_host(place, timeout_s)
                store = next(_untyped.rendezvous("env://", place.rank, place.world_size, timeout=timeout))[0]
            note_arrival(store, place.rank)
    except (dist.DistError, OSError, RuntimeError, ValueError) as error:
        raise _rendezvous_error(place, None, error, timeout_s) from error
    return store


def _rendezvous_error(place: env.RankEnv, store: Store | None, error: Exception, limit_s: float) -> WeftError:
    # If `weft train` started the ranks, one of them has failed, and the launcher shows its error.
    kind = CommError if place.starter == "weft" else LaunchError
    return kind(connection_error(place, store, error, limit_s))


def _check_joined(place: env.RankEnv, device: torch.device, backend: str) -> None:
    """Raise CommError if the plan cannot use an existing process group that Weft did not create."""
    found = dist.get_rank(), dist.get_world_size()
    if found != (place.rank, place.world_size):
        raise CommError(
            f"torch.distributed is initialised as rank {found[0]} of {found[1]}, but this process was started as rank "
            f"{place.rank} of {place.world_size}. Leave init_process_group out: weft.init calls it."
        )
    missing = sorted(access.grouped_types(device) - default_device_types())
    if missing:
        raise CommError(
            f"torch.distributed is initialised without a backend for {' and '.join(missing)}. Leave init_process_group "
            f"out: weft.init calls it. Or write init_process_group({backend!r})."
        )


def loopback_store(address: str, port: int, timeout: datetime.timedelta = _STORE_TIMEOUT) -> TCPStore:
    """Return a store for other processes of this machine.

    It listens on `address` only, unlike torch's stores, which listen on all interfaces. port: 0 for a free one (read it
    from `.port`). Raises OSError if the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((address, port))
        port = own.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=own.detach(),
        )


def _as_loopback(host: str) -> str | None:
    """Return the loopback address of `host`, or None if it is another machine or cannot be determined."""
    try:
        address = ipaddress.ip_address(env.LOOPBACK if host == "localhost" else host)
    except ValueError:
        return None
    return str(address) if address.is_loopback else None


def leave_unusable_group(device: torch.device) -> None:
    """Leave a process group that another library started without a backend for the host or the device, if there is one.

    `join_ranks` then starts one that has both. All ranks call it.
    """
    if dist.is_initialized() and access.grouped_types(device) - default_device_types():
        leave_ranks()


def leave_ranks() -> None:
    """Wait for all ranks and destroy the process group, if there is one.

    Free model, optimizer and step first: gloo aborts on live collectives.
    """
    if not dist.is_initialized():
        return
    gc.collect()
    _untyped.barrier()
    dist.destroy_process_group()
