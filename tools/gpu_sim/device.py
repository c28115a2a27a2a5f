"""The simulated GPU: fake tensors of cuda:0, values of small tensors, streams, events, graphs, and counts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from tools.gpu_sim.clock import (
    COLLECTIVE_LAUNCH_S,
    FLOPS,
    GRAPH_LAUNCH_S,
    LINK_BYTES_PER_S,
    Moment,
    RooflineClock,
    collective_s,
    kernel_s,
)
from tools.gpu_sim.counts import OpCounts, line_of
from tools.gpu_sim.plans import PaperReport
from tools.gpu_sim.races import DEFAULT, Races, Touched, range_of

#: The only device.
CUDA = torch.device("cuda", 0)


def on_device(tensor: object) -> bool:
    """Return True for a tensor of the simulated GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)


def is_fake(value: Any) -> bool:
    """Return True if a tensor has no values."""
    return isinstance(value, FakeTensor)


# Values of small device tensors that follow from the host's data: ids, counts, positions, borders.

#: Maximum number of elements of tensors with tracked values: integers, and other dtypes.
_MOST_WHOLE, _MOST_OTHER = 1 << 16, 16
_FIELD = "_paper_value"


class _Known:
    """A tracked value on the host. `memory` is shared by views; it is empty after unknown values overwrote it."""

    def __init__(self, value: torch.Tensor, memory: list[bool]) -> None:
        self.value = value
        self.memory = memory


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor's value on the host, or None if unknown."""
    known: _Known | None = tensor.__dict__.get(_FIELD)
    return known.value if known is not None and known.memory else None


def give(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Set the value of a device tensor, if it is small."""
    known: _Known | None = tensor.__dict__.get(_FIELD)
    owns_all = tensor.nbytes == tensor.untyped_storage().nbytes()
    if known is not None and (known.memory or owns_all):
        known.value.copy_(value)
        known.memory[:] = [True]
    elif owns_all and _is_small(tensor):
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(value)
        setattr(tensor, _FIELD, _Known(copy, [True]))
    else:
        forget([tensor])


def reserve(tensor: torch.Tensor) -> None:
    """Track a tensor with an unknown value, so that a write through one view sets the value of the others."""
    if on_device(tensor) and _is_small(tensor) and not tensor.dtype.is_floating_point:
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        setattr(tensor, _FIELD, _Known(memory, []))


def forget(tensors: list[torch.Tensor]) -> None:
    """Mark the values of tensors as unknown after a write."""
    for tensor in tensors:
        known: _Known | None = tensor.__dict__.get(_FIELD)
        if known is None:
            continue
        if known.value.dtype.is_floating_point:
            known.value.fill_(torch.nan)
        else:
            known.memory.clear()


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, writes: list[torch.Tensor]) -> None:
    """Apply an operation on device tensors to their tracked values."""
    inputs = [x for x in leaves((args, kwargs)) if on_device(x)]
    outs = [x for x in leaves(out) if on_device(x)]
    is_view = getattr(func, "is_view", False) and all(_FIELD in x.__dict__ for x in inputs)
    if not is_view and not _follows(func, inputs, outs):
        forget(writes)
        return
    to_host = _memory_on_host if is_view else on_host
    real = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    sources = [x.__dict__[_FIELD] for x in inputs if _FIELD in x.__dict__]
    for tensor, value in zip(leaves(out), leaves(real), strict=True):
        if on_device(tensor) and _FIELD not in tensor.__dict__:
            memory = next((one.memory for one in sources if _share(one.value, value)), [True])
            setattr(tensor, _FIELD, _Known(value, memory))


def _follows(func: Any, inputs: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
    """Return True if the results have values that follow from the inputs."""
    values = [value_of(x) for x in inputs]
    if {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags) or not all(map(_is_small, outs)):
        return False
    if inputs and all(value is None for value in values):
        return False
    if not all(_is_small_float(x) for x, value in zip(inputs, values, strict=True) if value is None):
        return False
    unknown = any(value is None or (value.dtype.is_floating_point and value.isnan().any()) for value in values)
    return not unknown or all(x.dtype.is_floating_point for x in outs)


def _is_small_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.numel() <= _MOST_OTHER


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _is_small(tensor: torch.Tensor) -> bool:
    most = _MOST_OTHER if tensor.dtype.is_floating_point or tensor.is_complex() else _MOST_WHOLE
    return tensor.numel() <= most


def _memory_on_host(part: Any) -> Any:
    """Like `on_host`, for views, which work with unknown values too."""
    return part.__dict__[_FIELD].value if isinstance(part, torch.Tensor) and on_device(part) else on_host(part)


def on_host(part: Any) -> Any:
    """Return the host value of an argument, for the same operation on values."""
    if isinstance(part, torch.Tensor):
        if not on_device(part):
            return part
        held = value_of(part)
        return torch.full(part.shape, torch.nan, dtype=part.dtype) if held is None else held
    return torch.device("cpu") if isinstance(part, torch.device) and part.type == "cuda" else part


# The device: fake tensors of cuda:0, streams and events, and counts.

#: Value that the host reads for unknown values.
UNKNOWN = 1


class Met(NamedTuple):
    """Participants of a collective or a message: name and size of the group, and for a message (sender, receiver)."""

    group: str
    num_ranks: int
    ends: tuple[int, int] | None = None
    is_bound: bool = True

    @property
    def communicator(self) -> object:
        """The communicator. Messages of a group that is not bound to a device use one per pair of ranks."""
        pair = None if self.ends is None or self.is_bound else tuple(sorted(self.ends))
        return self.group, pair


class PaperDevice:
    """One simulated GPU.

    Streams are numbers, and 0 is the default stream. `num_streams` counts them, including the default. `said` holds the
    last integers that were sent to another rank. The next simulated rank that receives some gets these.
    """

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.counts = OpCounts()
        self.races = Races()
        self.clock = RooflineClock()
        self.current = DEFAULT
        self.num_streams = 1
        self.mismatch = ""
        self.said: torch.Tensor | None = None
        self._network: dict[object, int] = {}
        #: Communicators that have been used.
        self.communicators: set[object] = set()
        #: The graph in capture, and all captured graphs.
        self.capture: GraphCapture | None = None
        self.graphs: list[GraphCapture] = []
        # Keyed by the id of the caller's Work. Both live until it is waited for.
        self._works: dict[int, tuple[object, Event, tuple[torch.Tensor, ...], str]] = {}

    def begin(self) -> None:
        """Reset counts and times. The order of earlier work and the races found so far are kept."""
        self.counts = OpCounts()
        self.clock.begin()

    def forget(self) -> None:
        """Reset all state, as in a new process."""
        self.counts, self.clock, self.races = OpCounts(), RooflineClock(), Races()
        for number in range(1, self.num_streams):
            self.races.order.create_stream(number)
        self._works.clear()
        self.communicators.clear()
        self.capture, self.graphs = None, []
        self.mismatch = ""

    def report(self) -> PaperReport:
        """Return the counts since the last `begin`."""
        counts, clock = self.counts, self.clock
        return PaperReport(
            kernels=counts.kernels.total(),
            recorded=counts.recorded,
            num_bytes=counts.num_bytes,
            products_s=counts.flops / FLOPS,
            line_s=dict(counts.line_seconds),
            syncs=dict(counts.syncs),
            behind=dict(counts.behind),
            copies=dict(counts.copies),
            collectives=dict(counts.collectives),
            formats=dict(counts.formats),
            communicators=len(self.communicators),
            races=dict(self.races.found),
            step_s=clock.end - clock.start,
            busy_s=clock.busy[DEFAULT],
            idle_s=dict(clock.idle),
            mismatch=self.mismatch,
        )

    def empty(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a device tensor with the shape and strides of a host tensor."""
        with self.fake:
            made = torch.empty_strided(like.shape, like.stride(), dtype=dtype or like.dtype, device=CUDA)
        self.races.made(made, self.current)
        return made

    def fill_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Fill host memory with the result of a copy from the device."""
        known = value_of(source)
        if known is None:
            target.fill_(UNKNOWN)
        elif known.dtype.is_floating_point:
            target.copy_(known.where(~known.isnan(), UNKNOWN))
        else:
            target.copy_(known)

    def launch(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        flops: float = 0.0,
        num_bytes: int | None = None,
    ) -> None:
        """Launch a kernel on the current stream. `num_bytes` defaults to the size of all tensors."""
        reads, writes = list(reads), list(writes)
        if num_bytes is None:
            num_bytes = sum(x.numel() * x.element_size() for x in (*reads, *writes) if on_device(x))
        seconds = kernel_s(num_bytes, flops)
        if self.capture is not None:
            self.capture.add(num_bytes, flops, seconds, reads, writes)
            return
        self.counts.kernel(name, num_bytes, flops, seconds)
        self.races.launch(self.current, name, reads, writes)
        self.clock.launch(self.current, seconds)

    def copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        """Copy between host and device on the current stream. Without pinned memory, the host waits."""
        host = target if on_device(source) else source
        down = host is target
        blocking = not non_blocking or not host.is_pinned()
        self.forbid("a copy from or to the host")
        self.counts.copy("to host" if down else "to device", blocking)
        self.races.launch(self.current, "copy", [source] if down else [], [] if down else [target])
        self.clock.launch(self.current, max(kernel_s(0, 0), source.nbytes / LINK_BYTES_PER_S))
        if blocking:
            self.sync(f"blocking copy {'to host' if down else 'to device'}", self.current)
        if down:
            self.fill_host(target, source)
        else:
            give(target, source)

    def sync(self, what: str, stream: int) -> None:
        """Make the host wait for all work of a stream."""
        self.forbid(what)
        self.counts.sync(what)
        self.races.order.all_streams_wait_for_stream(stream)
        self.clock.wait(self.clock.moment(stream))

    def sync_all(self, what: str) -> None:
        """Make the host wait for the device."""
        self.forbid(what)
        self.counts.sync(what)
        self.races.order.sync_all_streams()
        self.clock.wait(max(self.clock.free.values(), default=0.0))

    def new_stream(self) -> int:
        number, self.num_streams = self.num_streams, self.num_streams + 1
        self.races.order.create_stream(number)
        return number

    def collective(
        self,
        kind: str,
        work: object,
        met: Met,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> None:
        """Run a collective or message on its communicator's stream, like NCCL. Callers wait for `work`."""
        self.forbid(kind)
        self.communicators.add(met.communicator)
        stream = self._network.get(met.communicator)
        if stream is None:
            stream = self._network[met.communicator] = self.new_stream()
        ready = Event(self)
        ready.record_on(self.current)
        ready.wait_on(stream)
        num_bytes = max([x.nbytes for x in (*reads, *writes)], default=0)
        self.counts.collectives[kind] += 1
        self.races.launch(stream, kind, reads, writes)
        seconds = collective_s(kind, num_bytes, met.num_ranks)
        self.clock.launch(stream, seconds, COLLECTIVE_LAUNCH_S, (met.group, met.ends))
        done = Event(self)
        done.record_on(stream)
        # torch keeps the tensors of a collective until it is waited for.
        self._works[id(work)] = (work, done, (*reads, *writes), kind)

    def wait_work(self, work: object) -> None:
        """Make the current stream wait for a collective."""
        known = self._works.pop(id(work), None)
        if known is not None:
            known[1].wait_on(self.current)

    def wait_unawaited(self) -> None:
        """Record collectives without a wait as races, because their results may not be ready."""
        for _, _, tensors, kind in self._works.values():
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            self.races.found[f"{kind} of {shapes}: nobody waits for it"] += 1
        self._works.clear()

    def forbid(self, what: str) -> None:
        """Raise during a capture, for operations that it does not allow or that Weft does not record."""
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} @ {line_of()}")

    def replay(self, graph: GraphCapture) -> None:
        """Run the kernels of a graph on the current stream, in one launch."""
        self.forbid("the replay of a graph")
        num_bytes, flops, seconds = graph.totals()
        self.counts.kernel("cuda graph", num_bytes, flops, seconds)
        self.counts.recorded += len(graph.kernels)
        self.races.launch_on(self.current, "cuda graph", graph.touched)
        self.clock.launch(self.current, seconds, GRAPH_LAUNCH_S)

    def outlived(self) -> dict[str, int]:
        """Count storages that were allocated during captures and are still alive, by line."""
        made = [one for graph in self.graphs for one in graph.made.values()]
        return dict(Counter(line for storage, line in made if not storage.expired()))

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Use a stream as the current one during a block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class GraphCapture:
    """Contents of a graph.

    `kernels` has the bytes, FLOPs and seconds of each kernel. `touched` has the accessed ranges by storage. `made` has
    the storages that were allocated during the capture, each with its line.
    """

    def __init__(self) -> None:
        self.kernels: list[tuple[int, float, float]] = []
        self.touched: dict[int, Touched] = {}
        self.made: dict[int, tuple[StorageWeakRef, str]] = {}

    def totals(self) -> tuple[int, float, float]:
        """Return bytes, FLOPs and seconds of all kernels."""
        num_bytes, flops, seconds = 0, 0.0, 0.0
        for one in self.kernels:
            num_bytes, flops, seconds = num_bytes + one[0], flops + one[1], seconds + one[2]
        return num_bytes, flops, seconds

    def add(
        self, num_bytes: int, flops: float, seconds: float, reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
    ) -> None:  # fmt: skip
        """Add a kernel."""
        self.kernels.append((num_bytes, flops, seconds))
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if on_device(tensor) and tensor.numel():
                    key = tensor.untyped_storage()._cdata
                    if key not in self.touched:
                        self.touched[key] = Touched(StorageWeakRef(tensor.untyped_storage()), set())
                    self.touched[key].ranges.add((*range_of(tensor), is_write))

    def make(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record allocated tensors by weak references."""
        for tensor in filter(on_device, tensors):
            storage = tensor.untyped_storage()
            self.made.setdefault(storage._cdata, (StorageWeakRef(storage), line_of()))


class Event:
    """A recorded point in a stream's work."""

    def __init__(self, device: PaperDevice) -> None:
        self._device = device
        self._moment: Moment | None = None
        self._counts = device.counts  # counts of the step in which it was recorded
        device.races.order.create_event(id(self))

    def __del__(self) -> None:
        self._device.races.order.recorded_sync_states.pop(id(self), None)

    def record_on(self, stream: int) -> None:
        self._device.races.order.record_state(id(self), stream)
        self._moment, self._counts = self._device.clock.moment(stream), self._device.counts

    def wait_on(self, stream: int) -> None:
        """Make a stream wait. An event that was never recorded has no effect."""
        if self._moment is not None:
            self._device.races.order.stream_wait_for_event(stream, id(self))
            self._device.clock.order(stream, self._moment)

    def wait_host(self) -> None:
        """Make the host wait, and count the wait if the event is not complete yet."""
        self._device.forbid("event.synchronize")
        if self._moment is not None:
            if self._moment > self._device.clock.host:
                self._device.counts.sync("event.synchronize", is_behind=self._counts is not self._device.counts)
            self._device.races.order.all_streams_wait_for_event(id(self))
            self._device.clock.wait(self._moment)

    def seconds_until(self, later: Event) -> float:
        return (later._moment or 0.0) - (self._moment or 0.0)
