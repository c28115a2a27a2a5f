"""Devices of torch: the kind of one, and its streams, events, memory and random numbers.

Functions use the device's module in torch, such as `torch.cuda` or a package's module, whose functions have the
same names for all accelerators. On a host, streams and events are None, and nothing has to be waited for.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from weft.devices.kinds import HOST_BACKEND, KINDS, DeviceKind, noun, other_kind
from weft.errors import PlanError

#: Names that a device's module in torch has if the device has streams.
_STREAM_NAMES = ("Stream", "Event", "stream", "current_stream")
#: Kinds by type of torch.device, of devices that this process has used.
_used: dict[str, DeviceKind] = {}

# Kinds.


def is_accelerator(device: torch.device) -> bool:
    """Return True if tensors on the device are in memory that the CPU does not compute on."""
    return device.type not in ("cpu", "meta")


def has_cuda_kernels(device: torch.device) -> bool:
    """Return True for GPUs of NVIDIA and AMD, which run the kernels that torch has in `torch.cuda`."""
    return device.type == "cuda"


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device. A meta tensor counts as on the CPU."""
    found = _used.get(device.type)
    if found is None:
        found = _used[device.type] = _find_kind(device.type if is_accelerator(device) else "cpu")
    return found


def _find_kind(torch_type: str) -> DeviceKind:
    kinds = [kind for kind in KINDS.values() if kind.torch_type == torch_type]
    if len(kinds) > 1:  # torch has one name for GPUs of NVIDIA and AMD
        return KINDS["rocm" if torch.version.hip else "cuda"]
    if kinds:
        return kinds[0]
    module = torch.get_device_module(torch_type)
    backend = dist.Backend.default_device_backend_map.get(torch_type, HOST_BACKEND)
    return other_kind(torch_type, backend, all(hasattr(module, name) for name in _STREAM_NAMES))


def group_backend(device: torch.device) -> str:
    """Return the backends of a process group for the host and this device, as init_process_group takes them."""
    if not is_accelerator(device) or kind_of(device).through_host:
        return HOST_BACKEND
    return f"cpu:{HOST_BACKEND},{device.type}:{kind_of(device).backend}"


def grouped_types(device: torch.device) -> set[str]:
    """Return the device types for which a process group needs a backend."""
    return {"cpu"} if kind_of(device).through_host else {"cpu", device.type}


def has_streams(device: torch.device) -> bool:
    """Return True if the device works asynchronously, in streams with events."""
    return kind_of(device).streams


def collectives_overlap(device: torch.device) -> bool:
    """Return True if collectives run in streams, in parallel with computation, so that starting them early helps.

    Ranks of different kinds can share an axis if their collectives go through the host. They then have the same order,
    because this is False for all of them.
    """
    return has_streams(device) and not kind_of(device).through_host


def mixes_with_cpus(device: torch.device) -> bool:
    """Return True if other ranks of an axis may be CPUs, so that this rank must make a CPU's choices."""
    return not is_accelerator(device) or kind_of(device).through_host


def pins_memory(device: torch.device) -> bool:
    """Return True if copies to the device from pinned host memory are asynchronous."""
    return kind_of(device).pins


# Finding devices.


def names() -> str:
    """Return the values of `launch.device` for an error message."""
    return f"auto, {', '.join(KINDS)}, or the name of a device that a package registers with torch"


def find_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank. It does not become torch's current device.

    auto: a CUDA GPU if there is any, else torch's accelerator if it is in the table and has a backend of collectives,
    else the CPU.

    Args:
        name: "auto", the name of a kind, or the name of a device that a package registers with torch.
        local_rank: index of this rank on its machine.

    Raises:
        PlanError: if the kind is unknown or not installed, or the machine has fewer such devices than ranks.
    """
    torch_type = _type_of(name)
    if torch_type == "cpu":
        return torch.device("cpu")
    count = _count(torch_type)
    if count == 0:
        raise PlanError(_absent(name))
    if local_rank >= count:
        raise PlanError(
            f"launch.device={name}: this is local rank {local_rank}, and there are {count} {noun(name)}s. "
            f"Start at most {count} ranks on this machine."
        )
    return torch.device(torch_type, local_rank)


def count_devices(name: str = "auto") -> int:
    """Return the number of accelerators that `launch.device` selects on this machine; 0 if it selects the CPU.

    Raises PlanError if the kind is unknown or not installed.
    """
    torch_type = _type_of(name)
    return 0 if torch_type == "cpu" else _count(torch_type)


def _count(torch_type: str) -> int:
    module: Any = torch.get_device_module(torch_type)
    return module.device_count() if module.is_available() else 0


def _type_of(name: str) -> str:
    """Return the type of torch.device that a name selects. Imports the package of the kind."""
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        found = torch.accelerator.current_accelerator(check_available=True)
        is_usual = found is not None and not (kind := kind_of(found)).through_host and kind.name in KINDS
        return found.type if found is not None and is_usual else "cpu"
    kind = KINDS.get(name)
    if kind is None:
        found = torch.accelerator.current_accelerator()
        if found is None or found.type != name:
            raise PlanError(f"launch.device={name}: torch has no such device. Use {names()}.")
        return name
    for module in kind.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise PlanError(
                f"launch.device={name}: the package {kind.package} cannot be imported ({error}). {_remedy(kind)}"
            ) from error
    if name == "rocm" and not torch.version.hip:
        raise PlanError(f"launch.device=rocm: torch {torch.__version__} is not built for ROCm. {_remedy(kind)}")
    return kind.torch_type


def _remedy(kind: DeviceKind) -> str:
    run = "Run" if kind.install.startswith("pip") else "See"
    return f"{run}: {kind.install}. Or use launch.device=cpu."


def _absent(name: str) -> str:
    kind = KINDS.get(name)
    needs_build = kind is not None and kind.package == "torch" and kind.torch_type != "cuda"
    remedy = _remedy(kind) if kind is not None and needs_build else "Use launch.device=cpu, or run `weft doctor`."
    return f"launch.device={name}: torch sees no {noun(name)} here. {remedy}"


# Streams and events.


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


def select(device: torch.device) -> None:
    """Make an accelerator torch's current device."""
    if hasattr(_module(device), "set_device"):  # a machine has one Apple GPU, so torch.mps selects none
        _module(device).set_device(device)


def new_stream(device: torch.device, priority: int = 0) -> torch.Stream | None:
    """Return a new stream of the device, or None if it has no streams. Lower numbers have a higher priority."""
    return _module(device).Stream(device, priority=priority) if has_streams(device) else None


def current_stream(device: torch.device) -> Any:
    """Return the device's current stream. Call it only for devices with streams."""
    return _module(device).current_stream(device)


def on_default_stream(device: torch.device) -> bool:
    """Return True if the device has streams, and the current one is the default stream."""
    default = getattr(_module(device), "default_stream", None) if has_streams(device) else None
    return default is not None and current_stream(device) == default(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Make a stream the current one of its device inside the context. None changes nothing."""
    return nullcontext() if stream is None else _module(stream.device).stream(stream)


def new_event(device: torch.device, *, timed: bool = False) -> Any:
    """Return a new event of the device, or None if it has no streams. timed: for `elapsed_time`, in ms."""
    return _module(device).Event(enable_timing=timed) if has_streams(device) else None


def record_event(device: torch.device, *, timed: bool = False) -> Any:
    """Record a new event in the current stream and return it, or None if the device has no streams."""
    event = new_event(device, timed=timed)
    if event is not None:
        event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if has_streams(device):
        _module(device).synchronize(device)
    elif is_accelerator(device):
        _module(device).synchronize()  # torch.mps takes no device


def is_capturing() -> bool:
    """Return True if the current stream of a GPU records a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Memory and properties.


def allocated_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the current and peak bytes of torch's allocator on an accelerator; None if they are not counted."""
    module: Any = _module(device) if is_accelerator(device) else None
    if not hasattr(module, "max_memory_allocated"):
        return None
    return int(module.memory_allocated(device)), int(module.max_memory_allocated(device))


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that torch's allocator has reserved on an accelerator; 0 if they are not counted."""
    module: Any = _module(device)
    return int(module.memory_reserved(device)) if hasattr(module, "memory_reserved") else 0


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of an accelerator; None if the device does not report them, or is the host."""
    module: Any = _module(device) if is_accelerator(device) else None
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None


def total_bytes(device: torch.device) -> int:
    """Return the memory of an accelerator; 0 if the device does not report it, or is the host."""
    module: Any = _module(device) if is_accelerator(device) else None
    if not hasattr(module, "get_device_properties"):
        return 0
    return int(getattr(module.get_device_properties(device), "total_memory", 0))


def device_name(device: torch.device) -> str:
    """Return the name that the device's driver reports, or the name of its kind."""
    module: Any = _module(device) if is_accelerator(device) else None
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else kind_of(device).name


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, and (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if has_cuda_kernels(device) else (0, 0)


def uuid_of(device: torch.device) -> str | None:
    """Return the UUID of a GPU, by which management libraries find it; None for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if has_cuda_kernels(device) else None


def pci_ids(count: int) -> list[str]:
    """Return the PCI ids of the first `count` visible GPUs of NVIDIA or AMD, in the format of /sys."""
    found = [torch.cuda.get_device_properties(index) for index in range(min(count, torch.cuda.device_count()))]
    return [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in found]


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activity of torch's profiler that records kernels of the device, if it has one."""
    found = getattr(ProfilerActivity, device.type.upper(), None) if is_accelerator(device) else None
    return [] if found is None else [found]


# Random numbers.


def _with_generators(devices: Iterable[torch.device | None]) -> list[torch.device]:
    found = {one for one in devices if one is not None and is_accelerator(one)}
    return sorted((one for one in found if hasattr(_module(one), "get_rng_state")), key=str)


def rng_states(*devices: torch.device | None) -> list[torch.Tensor]:
    """Return the states of torch's global generators: the CPU's, then the accelerators' among `devices`."""
    return [torch.get_rng_state(), *(_module(one).get_rng_state(one) for one in _with_generators(devices))]


@contextmanager
def forked_generators(*devices: torch.device | None) -> Generator[None]:
    """Restore torch's global generators at exit: the CPU's, and the accelerators' among `devices`."""
    own = _with_generators(devices)
    states = rng_states(*own)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        for device, state in zip(own, states[1:], strict=True):
            _module(device).set_rng_state(state, device)
