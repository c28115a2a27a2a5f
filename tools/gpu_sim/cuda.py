"""torch.cuda on a simulated GPU: streams, events, graphs, and the functions of the module.

During a capture, kernels are added to the graph instead of a stream, and operations that a capture forbids raise.
Replays take part in the race checks like any kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, HashStore
from torch._subclasses.fake_tensor import FakeTensor

from tools.gpu_sim.compiled import count_compiled
from tools.gpu_sim.device import CUDA, Event, GraphCapture, PaperDevice, on_device
from tools.gpu_sim.mode import PaperMode
from weft import env


class PaperEvent:
    """Replacement of torch.cuda.Event. `classes_of` sets the class's device."""

    on: ClassVar[PaperDevice]

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.moment = Event(self.on)

    def record(self, stream: Any = None) -> None:
        self.moment.record_on(self.on.current if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        self.moment.wait_on(self.on.current if stream is None else stream.stream_id)

    def synchronize(self) -> None:
        self.moment.wait_host()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: PaperEvent) -> float:
        """Return simulated milliseconds."""
        return self.moment.seconds_until(other.moment) * 1000


class PaperStream:
    """Replacement of torch.cuda.Stream. `classes_of` sets the class's device. `number` selects an existing stream."""

    on: ClassVar[PaperDevice]
    event: ClassVar[type[PaperEvent]]

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **options: Any) -> None:
        self.stream_id = self.on.new_stream() if number is None else number
        self.device = torch.device("cuda", 0)
        self.priority = priority

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Any) -> None:
        event.moment.wait_on(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = event or self.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.on.sync("stream.synchronize", self.stream_id)

    def query(self) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PaperStream) and other.stream_id == self.stream_id


class PaperGraph:
    """Replacement of torch.cuda.CUDAGraph. `graph_class` sets the class's device."""

    on: ClassVar[PaperDevice]

    def __init__(self, keep_graph: bool = False) -> None:
        self._captured = GraphCapture()

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        self.on.capture = self._captured

    def capture_end(self) -> None:
        self.on.capture = None
        self.on.graphs.append(self._captured)

    def replay(self) -> None:
        self.on.replay(self._captured)


def graph_class(device: PaperDevice) -> Any:
    """Return the graph class of a device."""
    return type("CUDAGraph", (PaperGraph,), {"on": device})


@contextlib.contextmanager
def capturing(graph: PaperGraph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
    """Replace torch.cuda.graph: synchronize the host once, then capture the stream."""
    device = graph.on
    device.sync_all("cuda.graph")
    with contextlib.nullcontext() if stream is None else device.use(stream.stream_id):
        graph.capture_begin(pool, **options)
        try:
            yield
        finally:
            graph.capture_end()


def classes_of(device: PaperDevice) -> tuple[Any, Any]:
    """Return the stream class and the event class of a device."""
    event = type("Event", (PaperEvent,), {"on": device})
    return type("Stream", (PaperStream,), {"on": device, "event": event}), event


def current_device() -> PaperDevice:
    """Return the simulated GPU of this process, for a script that runs on it."""
    return torch.cuda.Stream.on  # pyright: ignore[reportAttributeAccessIssue] - ours


# Replacements in torch.cuda for the lifetime of the process, answered by a PaperDevice.

#: Properties that the device reports: an H100 with 80 GB.
NAME, TOTAL_BYTES, CAPABILITY = "NVIDIA H100 80GB HBM3", 85_017_493_504, (9, 0)


def install(device: PaperDevice, stub: ctypes.CDLL) -> None:
    """Make torch.cuda, tensors and optimizers of this process use the simulated GPU."""
    stream_class, event_class = classes_of(device)
    for name, value in (*_streams(device, stream_class, event_class).items(), *_facts(device, stub).items()):
        setattr(torch.cuda, name, value)
    _tensors(device)
    _libraries()
    FakeWork.wait = lambda self, timeout=None: (device.wait_work(self), True)[1]
    FakeWork.is_completed = lambda self: True
    FakeWork.synchronize = lambda self: device.wait_work(self)


def _streams(device: PaperDevice, stream_class: Any, event_class: Any) -> dict[str, Any]:
    class StreamContext(contextlib.ExitStack):
        """A class, like torch's, because torch.compile checks for it with isinstance."""

        def __init__(self, stream: Any) -> None:
            super().__init__()
            self.stream = stream

        def __enter__(self) -> Any:
            if self.stream is not None:
                self.enter_context(device.use(self.stream.stream_id))
            return self

    def set_stream(stream: Any) -> None:
        device.current = stream.stream_id

    return {
        "Stream": stream_class,
        "Event": event_class,
        "stream": lambda which: StreamContext(which),
        "StreamContext": StreamContext,
        "set_stream": set_stream,
        "current_stream": lambda which=None: stream_class(number=device.current),
        "default_stream": lambda which=None: stream_class(number=0),
        "synchronize": lambda which=None: device.sync_all("cuda.synchronize"),
    }


def _facts(device: PaperDevice, stub: ctypes.CDLL) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=NAME, total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32, uuid="paper",
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block_optin=232448, L2_cache_size=52428800, gcnArchName="",
        pci_domain_id=0, pci_bus_id=1, pci_device_id=0,
    )  # fmt: skip
    pin = _function(stub.weft_paper_pin, [ctypes.c_void_p, ctypes.c_size_t])
    unpin = _function(stub.weft_paper_unpin, [ctypes.c_void_p])
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: (pin(address, size), 0)[1],
        cudaHostUnregister=lambda address: (unpin(address), 0)[1],
    )
    state = torch.zeros(16, dtype=torch.uint8)
    nothing = (
        "_lazy_init", "init", "set_device", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state",
        "set_rng_state_all", "empty_cache", "reset_peak_memory_stats", "set_sync_debug_mode",
    )  # fmt: skip
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device")
    return {
        **{name: _answers(None) for name in nothing},
        **{name: _answers(0) for name in zero},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_compiled": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: device.capture is not None,
        "CUDAGraph": graph_class(device),
        "graph": capturing,
        "graph_pool_handle": lambda: (0, 0),
        "default_generators": (_generator(),),
        "device_count": lambda: 1,
        "get_device_name": lambda which=None: NAME,
        "get_device_capability": lambda which=None: CAPABILITY,
        "get_device_properties": lambda which=None: properties,
        "mem_get_info": lambda which=None: (TOTAL_BYTES, TOTAL_BYTES),
        "memory_stats": lambda which=None: {},
        "get_rng_state": lambda which=None: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
        "device": type("device", (contextlib.nullcontext,), {}),  # a class, like torch's
        "cudart": lambda: runtime,
        "nccl": SimpleNamespace(version=lambda: (2, 27, 0)),
    }


def _generator() -> torch.Generator:
    """Return a device generator that draws nothing. Compiled blocks that draw again in backward copy it."""
    # A subclass of torch's class, because inductor detects generators by it. The real `device` is the host.
    members = {"device": CUDA, "clone_state": lambda self: type(self)(), "get_offset": lambda self: 0}
    return type("PaperGenerator", (torch.Generator,), members)()


def _answers(value: object) -> Callable[..., Any]:
    """Return a new function for each name, because dynamo has a rule for each function of torch.cuda."""
    return lambda *args, **kwargs: value


def _function(function: Any, arguments: list[Any]) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def _tensors(device: PaperDevice) -> None:
    """Replace methods of tensors that never reach a dispatch mode."""
    plain_stream = torch.Tensor.record_stream

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if on_device(tensor):
            device.races.used_by(tensor, stream.stream_id)
        else:
            plain_stream(tensor, stream)

    def tolist(self: FakeTensor) -> Any:
        if not on_device(self):
            raise TypeError("a tensor without values has no list")
        return self.cpu().tolist()

    torch.Tensor.record_stream = record_stream  # pyright: ignore[reportAttributeAccessIssue] - in its place
    FakeTensor.tolist = tolist
    # Addresses are only compared, never read. Their distance exceeds the size of any tensor.
    torch.UntypedStorage.data_ptr = _storage_address  # pyright: ignore[reportAttributeAccessIssue] - in its place
    FakeTensor.data_ptr = lambda tensor: (  # pyright: ignore[reportAttributeAccessIssue] - in its place
        tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
    )


_plain_address = torch.UntypedStorage.data_ptr


def _storage_address(storage: torch.UntypedStorage) -> int:
    return storage._cdata << 40 if storage.device.type in ("cuda", "meta") else _plain_address(storage)


def _libraries() -> None:
    """Make modules move in place, and add the device's tensors to lists of classes in torch and Weft."""
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_gradients

    from weft.memory import activation_offload as activations

    # torch.tensor([1], device="cuda:0") creates its tensor on the host and copies it.
    torch._C._set_only_lift_cpu_tensors(True)
    # A moved module keeps its parameter objects, as on a real device. Fake tensors are tracked by weak references,
    # which a swap leaves at the other tensor. Nothing reads them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    utils: Any = torch.utils
    utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])
    for listed in (of_optimizers, of_gradients):
        listed.append(FakeTensor)
    activations._PLAIN = (*activations._PLAIN, FakeTensor)


# Opening the simulated GPU of this process after its library is loaded, and running a script on it.


@contextmanager
def opened(stub: ctypes.CDLL) -> Iterator[PaperDevice]:
    """Enable tensors of cuda:0 during a block. Can be used once per process.

    Args:
        stub: the result of `load_stub`.
    """
    device = PaperDevice()
    install(device, stub)
    with PaperMode(device) as mode:
        count_compiled(mode)
        yield device


def join_silent_ranks(num_ranks: int, rank: int) -> None:
    """Join as one of several ranks on torch's fake process group, in which the other ranks hold this rank's data."""
    place = env.RankEnv(
        rank, num_ranks, 0, 1, env.LOOPBACK, 29500, "torchrun"
    )  # the only rank on a machine with one GPU
    env.export_rank(place)
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=HashStore())


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a Python file on the open device, like `python path arguments`."""
    script = Path(path).resolve()
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
