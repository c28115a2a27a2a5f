"""An axis of the mesh, as one rank sees it, and what is told of the collectives over it."""

from __future__ import annotations

import datetime
import gc
import ipaddress
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft import env
from weft.comm.gpu_settings import multiply_as_planned
from weft.comm.heartbeat import Heartbeat
from weft.comm.missing_ranks import could_not_meet, note_arrival, noticed, wait_for_host
from weft.config.plan import AXES, Plan
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


class Waited(Protocol):
    """How long a device's stream waited, which is known later."""

    def seconds(self) -> float:
        """Return the seconds; the host waits until they are known."""
        ...


class RecordsCall(Protocol):
    """Told of each collective."""

    def __call__(
        self, axis: str, operation: str, num_bytes: int, seconds: float | Waited, sent_bytes: int, off_host_bytes: int
    ) -> None:
        """Hear of one call.

        Args:
            axis: its name.
            operation: such as "all_reduce".
            num_bytes: of the tensor on this rank, as it travels.
            seconds: that the computation waited.
            sent_bytes: that this rank handed to others.
            off_host_bytes: what of them left its host.
        """
        ...


def ignore(
    axis: str, operation: str, num_bytes: int, seconds: float | Waited, sent_bytes: int, off_host_bytes: int
) -> None:
    """The record of a mesh that nobody counts."""


#: How bytes go between hosts: the better way, every rank to every rank, or first within each host. No number depends
#: on it.
ROUTES = ("auto", "flat", "two_level")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, or several joined, seen from this rank.

    rank: this rank's index on the axis. ranks: global ranks of the group, in order of the axis.
    group: torch's process group; None where size is 1. used: of joined axes, the names of those with several ranks.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    record: RecordsCall = field(default=ignore, repr=False, compare=False)
    #: What comm keeps between calls, for as long as the mesh lives: one dict, shared by all axes of a mesh.
    links: dict[tuple[object, ...], object] = field(
        default_factory=dict[tuple[object, ...], object], repr=False, compare=False
    )
    #: Where this rank stands, for the thread that watches: one for all axes of a mesh.
    pulse: Heartbeat = field(default_factory=Heartbeat, repr=False, compare=False)
    #: Collectives under way that have a second stage to begin; one list, shared by all axes of a mesh.
    staged: list[Any] = field(default_factory=list[Any], repr=False, compare=False)
    #: What graphs of torch.compile call in the place of collectives over it, by name: `comm.operators` puts it here.
    operators: dict[str, object] = field(default_factory=dict[str, object], repr=False, compare=False)
    #: How bytes go between hosts: one of ROUTES.
    route: str = field(default="auto", repr=False, compare=False)
    #: Of links that were measured, for route=auto: a file, "auto" for that in the cache folder, or nothing.
    link_profile: str = field(default="", repr=False, compare=False)
    #: The host of each rank, by global rank, of those that have met: one dict, shared by all axes of a mesh.
    hosts: dict[int, bytes] = field(default_factory=dict[int, bytes], repr=False, compare=False)
    used: str = field(default="", repr=False, compare=False)

    @property
    def label(self) -> str:
        """Its name for people: without the axes that have one rank. `name` is the same under every plan."""
        return self.used or self.name


# Where ranks stand on the plan's axes: plain arithmetic, without torch.

#: The second view of dp_shard x cp x tp, for experts: row-major, `ep` innermost. It does not mix with the first.
EXPERT_AXES = ("beside_ep", "ep")
#: The first and the last stage of a pipeline, which may share a weight.
ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Reader:
    """One rank among all that read different samples: number `rank` of `size`."""

    rank: int
    size: int

    @classmethod
    def among(cls, rank: int, ranks: tuple[int, ...]) -> Reader:
        """Return the place of a rank among some.

        Args:
            rank: a global one.
            ranks: those that read different samples, in order.
        """
        return cls(ranks.index(rank), len(ranks))

    def in_replica(self, replica: int, plan: Plan) -> Reader:
        """Return the place of the same rank where its world is one replica of several.

        Args:
            replica: which one it is.
            plan: of all replicas.
        """
        order, size = plan.axis_order, self.size * plan.dp_replicate
        if order.index("dp_replicate") < order.index("dp_shard"):
            return Reader(replica * self.size + self.rank, size)
        return Reader(self.rank * plan.dp_replicate + replica, size)


def joined(names: Iterable[str]) -> str:
    """Return the name of several axes joined, the same under every order of the plan."""
    return "*".join(sorted(names, key=_default_position))


def _default_position(name: str) -> int:
    """Where an axis stands in the usual order, so that its name is the same under every order."""
    return (ENDS, *AXES, *EXPERT_AXES).index(name.partition("/")[0])


def strides(plan: Plan, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return, for each axis, how far apart in rank its neighbours are, and its size."""
    stride = 1
    found: dict[str, tuple[int, int]] = {}
    for name, size in reversed(plan.axis_sizes().items()):
        found[name] = (stride, size)
        stride *= size
    found["ep"] = (1, plan.ep)
    found["beside_ep"] = (plan.ep, plan.dp_shard * plan.cp * plan.tp // plan.ep)
    for name in names:
        axis, slash, number = name.partition("/")
        if slash and axis in AXES and number.isdigit() and int(number) and found[axis][1] % int(number) == 0:
            found[name] = (found[axis][0], int(number))
    return found


def members_of(plan: Plan, rank: int, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from `rank` only along `names`, in row-major order of those axes.

    Args:
        plan: the sizes of the axes.
        rank: one of its ranks.
        names: axes of a mesh.
    """
    places = strides(plan, names)
    along = [places["pp" if name == ENDS else name] for name in names]
    base = rank - sum(rank // stride % size * stride for stride, size in along)
    members = [base]
    for name, (stride, size) in zip(names, along, strict=True):
        steps = sorted({0, size - 1}) if name == ENDS else range(size)
        members = [member + step * stride for member in members for step in steps]
    return tuple(members)


# The mesh: every rank's place on the plan's axes, and the group of ranks it shares each axis with.

#: How long (s) a collective waits for a rank where nobody says otherwise.
LIMIT_S = 1800.0
#: How long (s) the launcher's store waits for an answer.
_STORE_TIMEOUT = datetime.timedelta(seconds=60)

#: torch.distributed, for those of its functions that have no types.
_untyped: Any = dist


class Mesh:
    """Axes by name: `mesh["tp"]`; several joined: `mesh["dp_replicate", "dp_shard"]`.

    `mesh["ep"]` are the ranks among which a layer's experts are divided, `mesh["beside_ep"]` those with the same ones.
    `mesh["tp/2"]` are 2 adjacent ranks of tp, `mesh["ends"]` the first and the last stage.

    Args:
        plan: the sizes of the axes. `build_mesh` checks them by the number of ranks.
        rank: this process's global rank.
        device: where this rank computes.
        record: called after each collective with what a ledger counts.
        route: how bytes go between hosts, one of ROUTES.
        link_profile: what route=auto reads of links that were measured: a file, "auto" or nothing.
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
        self.plan = plan
        self.rank = rank
        self.world_size = plan.world_size
        self.device = device
        self._record = record
        self._route, self._link_profile = route, link_profile
        self._hosts: dict[int, bytes] = {}
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._links: dict[tuple[object, ...], object] = {}
        self._staged: list[Any] = []
        self.pulse = Heartbeat()
        #: That of all replicas: itself.
        self.whole: Mesh = self
        self._replica: Mesh | None = None
        for name in AXES:
            self._axes[(name,)] = self._build((name,))
        #: This rank among all that read different samples: its place on `data`, unless other worlds read some too.
        self.reader = Reader.among(rank, self.ranks_over(("dp_replicate", "dp_shard")))

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """The axis of that name, or the joined axis of several. Joining makes a group: call it on all its ranks."""
        key = self._key((names,) if isinstance(names, str) else names)
        if key not in self._axes:
            self._axes[key] = self._build(key)
        return self._axes[key]

    @property
    def data(self) -> Axis:
        """The ranks that read different samples: dp_replicate and dp_shard joined."""
        return self["dp_replicate", "dp_shard"]

    @property
    def batch(self) -> Axis:
        """The ranks whose gradients and token counts add up: `data`, and cp, which divides sequences."""
        return self["dp_replicate", "dp_shard", "cp"] if self.plan.cp > 1 else self.data

    @property
    def world(self) -> Axis:
        """All ranks."""
        return self[AXES]

    @property
    def replica(self) -> Mesh:
        """The ranks of this rank's replica as a mesh, where the plan's replicas meet rarely; else this mesh."""
        if self._replica is None:
            self._replica = self if self.plan.sync == "step" else ReplicaMesh(self)
        return self._replica

    def built_axes(self) -> list[Axis]:
        """Return the axes that were asked for so far."""
        return list(self._axes.values())

    def ranks_over(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the global ranks that differ from this one only along those axes, in order; makes no group."""
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
        # Outermost first, so that ranks ascend: torch sorts those of a group.
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


class ReplicaMesh(Mesh):
    """One replica as a world of its own: its `dp_replicate` has one rank, and its `world` is the replica's ranks.

    Ranks keep their global numbers, and axes, groups, links and the pulse are those of the whole mesh.
    """

    def __init__(self, whole: Mesh):
        self.plan = whole.plan.replace(dp_replicate=1, compress="none")
        self.rank, self.device, self.pulse = whole.rank, whole.device, whole.pulse
        self.world_size = self.plan.world_size
        self.whole, self._replica, self.reader = whole, self, whole.reader

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        """The axis of that name, or the joined axis of several, without other replicas."""
        return self.whole[_in_replica(names)]

    def built_axes(self) -> list[Axis]:
        """Return the axes that were asked for so far, also of the whole mesh."""
        return self.whole.built_axes()

    def ranks_over(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the global ranks of this replica that differ from this one only along those axes."""
        return self.whole.ranks_over(_in_replica(names))


def _in_replica(names: str | tuple[str, ...]) -> tuple[str, ...]:
    several = (names,) if isinstance(names, str) else names
    return tuple(name for name in several if name.partition("/")[0] != "dp_replicate")


def join_group(ranks: tuple[int, ...], purpose: str = "axis") -> dist.ProcessGroup:
    """Return the process group of these ranks: made when it is first asked for, then the same until the ranks part.

    A group holds sockets and threads, so a later mesh over the same ranks takes the one that is there. Only the
    members need to call.
    """
    if not dist.is_initialized():
        _start_single_rank()
    description = f"weft {purpose} {' '.join(map(str, ranks))}"
    for group in groups_made():
        if group.group_desc == description:
            return group
    with naming_group(description):
        # Local synchronisation: only the members meet, so a rank never pays for groups it is not in.
        made: dist.ProcessGroup = _untyped.new_group(
            list(ranks), timeout=default_timeout(), use_local_synchronization=True, group_desc=description
        )
    return made


def _start_single_rank() -> None:
    """Start the default process group of a process that trains alone; fully_shard needs one."""
    dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage] - documented by torch


def build_mesh(
    plan: Plan,
    device: torch.device | str = "cpu",
    record: RecordsCall = ignore,
    route: str = "auto",
    link_profile: str = "",
) -> Mesh:
    """Return the mesh of `plan` on this rank. Ranks have joined before (`join_ranks`) unless the plan has one rank.

    Args:
        plan: the sizes of the axes.
        device: where this rank computes.
        record: called after each collective with what a ledger counts, such as `Ledger().record`.
        route: how bytes go between hosts: "auto", "flat" or "two_level".
        link_profile: for route=auto, a file of `weft calibrate --hosts`; "auto": that in the cache folder, if any.

    Raises:
        PlanError: when the number of started ranks is not the plan's, the device has no TF32 for precision=tf32, or the
            route is not known.
    """
    if route not in ROUTES:
        raise PlanError(f"route={route}: not one of {', '.join(ROUTES)}. Use auto.")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if plan.world_size != world_size:
        sizes = " * ".join(f"{axis}={size}" for axis, size in plan.axis_sizes().items() if size > 1) or "one rank"
        raise PlanError(
            f"plan={plan}: it needs {plan.world_size} ranks ({sizes}), but {world_size} were started. "
            f"Start {plan.world_size} ranks, or let one axis take all that are there, such as dp_replicate=*."
        )
    multiply_as_planned(plan.precision, torch.device(device))
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Mesh(plan, rank, torch.device(device), record, route, link_profile)


#: How often this process joined the ranks at an address.
_joined = Counter[tuple[str, int]]()


def join_ranks(
    place: env.RankEnv,
    device: torch.device,
    timeout_s: float = LIMIT_S,
    store: Store | None = None,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Meet the other ranks: start the default process group (gloo on CPU, nccl and gloo on CUDA).

    Args:
        place: which rank this is of how many.
        device: of this rank.
        timeout_s: seconds that a collective waits for a rank; a process group that is there already keeps its own.
        store: what `open_store` gave, if the caller has met the others already.
        tell: takes a line about ranks that are missing after some seconds; None writes it to stderr.

    Raises:
        CommError: when the ranks cannot meet, or the group that is there does not fit.
        LaunchError: when ranks cannot meet that another program than `weft train` was to start.
    """
    if place.world_size == 1 and place.starter != "torchrun":
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        _check_joined(place, device, backend)
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    store = store or open_store(place, timeout_s)
    try:
        store.set_timeout(timeout)
        if _as_loopback(place.master_addr) is not None:
            _keep_gloo_at_home()
        # A rank that joins, leaves and joins again must not read what was written the first time. Counted here and not
        # in the store, where other processes could change the count.
        _joined[place.master_addr, place.master_port] += 1
        joined = _joined[place.master_addr, place.master_port]
        with noticed(place, store, tell):
            dist.init_process_group(
                backend,
                store=PrefixStore(f"weft/{joined}", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
    except (dist.DistError, OSError, RuntimeError, ValueError) as error:
        raise _rendezvous_error(place, store, error, timeout_s) from error


def open_store(place: env.RankEnv, timeout_s: float = LIMIT_S) -> Store:
    """Return where the ranks of this job leave word for each other; on one machine on the loopback interface only.

    The first rank may host it: keep it until all have parted.

    Raises:
        CommError: when the ranks of `weft train` cannot meet.
        LaunchError: when others cannot.
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
    # Of `weft train`'s own ranks one has failed, and its launcher shows that one's error.
    kind = CommError if place.starter == "weft" else LaunchError
    return kind(could_not_meet(place, store, error, limit_s))


def _check_joined(place: env.RankEnv, device: torch.device, backend: str) -> None:
    """Refuse a process group that somebody else made and that the plan cannot use."""
    found = dist.get_rank(), dist.get_world_size()
    if found != (place.rank, place.world_size):
        raise CommError(
            f"torch.distributed is initialised as rank {found[0]} of {found[1]}, but this process was started as rank "
            f"{place.rank} of {place.world_size}. Leave init_process_group out: weft.init calls it."
        )
    missing = sorted({"cpu", device.type} - default_device_types())
    if missing:
        raise CommError(
            f"torch.distributed is initialised without a backend for {' and '.join(missing)}. Leave init_process_group "
            f"out: weft.init calls it. Or write init_process_group({backend!r})."
        )


def loopback_store(address: str, port: int, timeout: datetime.timedelta = _STORE_TIMEOUT) -> TCPStore:
    """Return a store for other processes of this machine. It listens on `address` only; torch's own listen everywhere.

    Args:
        address: IPv4 or IPv6.
        port: 0 takes a free one (see `.port`). OSError where the port is taken.
        timeout: how long a read waits for its key.
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
    """The address on the loopback interface that `host` stands for; None where it is another machine's, or unclear."""
    try:
        address = ipaddress.ip_address(env.LOOPBACK if host == "localhost" else host)
    except ValueError:
        return None
    return str(address) if address.is_loopback else None


def _keep_gloo_at_home() -> None:
    """gloo listens where the host's name leads; ranks of one machine need the loopback interface only."""
    name = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if name is not None and name in (found for _, found in socket.if_nameindex()):
        env.default_for_libraries(GLOO_SOCKET_IFNAME=name)


def leave_ranks() -> None:
    """Leave the other ranks in order. Drop model, optimizer and step first: gloo aborts on live collectives."""
    if not dist.is_initialized():
        return
    gc.collect()
    _untyped.barrier()
    dist.destroy_process_group()
