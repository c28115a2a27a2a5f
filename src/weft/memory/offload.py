"""Host memory for copies from and to a device: pinned if the device needs it, bounded, and reused.

Pinned memory cannot be swapped and is slow to allocate. So a run allocates it once, with a limit per rank. Ordinary
memory, rounded up to pages, is registered with CUDA, because torch's pinned allocator rounds sizes up to the next power
of two.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from weft import env
from weft.config.plan import Plan
from weft.devices import access
from weft.errors import CheckpointError, LaunchError
from weft.memory.host_link import Copy, CudaLink, HostLink, PlainLink, Waitable
from weft.units import format_bytes, parse_bytes

#: Share of the machine's memory that all its ranks may pin together. The rest is for other processes, data and the
#: system.
MOST_OF_HOST = "60%"
#: A free buffer is reused for requests of at least this fraction of its size.
LEAST_USED = 0.75
_GRAIN = 4096
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

Pin = Callable[[torch.Tensor], None]


class HostPool:
    """Buffers of host memory, at most `limit_bytes` in total.

    `pin` prepares a new buffer for device copies, and `unpin` undoes it before the buffer is freed.
    """

    def __init__(self, limit_bytes: int, pin: Pin | None = None, unpin: Pin | None = None):
        self.limit_bytes = limit_bytes
        #: Bytes of all buffers, bytes in use, and the peak of bytes in use.
        self.held_bytes = self.used_bytes = self.peak_bytes = 0
        self._pin, self._unpin = pin, unpin
        self._free: list[tuple[torch.Tensor, Copy | None]] = []  # longest free first
        # All buffers, by address: registered memory must not be freed before CUDA unregisters it.
        self._all: dict[int, torch.Tensor] = {}
        weakref.finalize(self, _unpin_all, self._all, unpin).atexit = False

    def take(self, num_bytes: int, field: str) -> torch.Tensor:
        """Return an uninitialized flat uint8 buffer, (numel,), of at least `num_bytes` that the host may write to.

        `field` is the plan field for the error message.

        Raises:
            LaunchError: if the pool's limit would be exceeded.
        """
        buffer, last = self.take_unawaited(num_bytes, field)
        if last is not None:
            last.wait_host()
        return buffer

    def take_unawaited(self, num_bytes: int, field: str) -> tuple[torch.Tensor, Copy | None]:
        """Take a buffer like `take`, without waiting for its last copy, which is also returned.

        Use it if only a device copy will write the buffer: the device then waits, not the host.
        """
        size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        fitting = [index for index, (one, _) in enumerate(self._free) if size <= one.nbytes <= size / LEAST_USED]
        last: Copy | None = None
        if fitting:
            buffer, last = self._free.pop(min(fitting, key=lambda index: self._free[index][0].nbytes))
        else:
            buffer = self._make(size, field)
        self.used_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer, last

    def give_back(self, buffer: torch.Tensor, last: Copy | None = None) -> None:
        """Give a uint8 buffer of shape (numel,) back to the pool. `last` is a pending copy from or to it."""
        self.used_bytes -= buffer.nbytes
        self._free.append((buffer, last))

    def release(self) -> None:
        """Give all unused buffers back to the system."""
        while self._free:
            self._drop(*self._free.pop())

    def _make(self, size: int, field: str) -> torch.Tensor:
        # No free buffer fits: drop as few as needed, the largest first.
        while self._free and self.held_bytes + size > self.limit_bytes:
            largest = max(range(len(self._free)), key=lambda index: self._free[index][0].nbytes)
            self._drop(*self._free.pop(largest))
        if self.held_bytes + size > self.limit_bytes:
            raise LaunchError(
                f"{field}: this rank needs {format_bytes(self.held_bytes + size)} of host memory for copies, and its "
                f"limit is {format_bytes(self.limit_bytes)}. Put a smaller share on the host, such as {field}:0.5, or "
                f"raise memory.pinned_limit."
            )
        buffer = torch.empty(size, dtype=torch.uint8)
        if self._pin is not None:
            self._pin(buffer)
        self.held_bytes += size
        self._all[buffer.data_ptr()] = buffer
        return buffer

    def _drop(self, buffer: torch.Tensor, last: Copy | None) -> None:
        if last is not None:
            last.wait_host()
        del self._all[buffer.data_ptr()]
        if self._unpin is not None:
            self._unpin(buffer)
        self.held_bytes -= buffer.nbytes


def _unpin_all(buffers: dict[int, torch.Tensor], unpin: Pin | None) -> None:
    for buffer in buffers.values():
        if unpin is not None:
            unpin(buffer)


def host_limit(setting: str = MOST_OF_HOST) -> int:
    """Return the bytes of host memory that this rank may use: its share of the machine's limit.

    `setting` is a size ("64GiB"), or a share of the memory of the machine or container ("60%").

    Raises:
        LaunchError: if the setting is the full memory or more.
    """
    total = psutil.virtual_memory().total
    if _CGROUP_LIMIT.exists() and (text := _CGROUP_LIMIT.read_text().strip()).isdigit():
        total = min(total, int(text))
    limit = total * int(setting[:-1]) // 100 if setting.endswith("%") else parse_bytes(setting)
    if limit >= total:
        raise LaunchError(
            f"memory.pinned_limit={setting}: the ranks of a machine together must pin less than its memory of "
            f"{format_bytes(total)}. Use a share, such as memory.pinned_limit={MOST_OF_HOST}."
        )
    place = env.rank_env()
    return limit // (place.local_world_size if place else 1)


def _register(buffer: torch.Tensor) -> None:
    result = int(_runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if result:
        raise LaunchError(
            f"offload: CUDA could not pin {format_bytes(buffer.nbytes)} of host memory (error {result}). "
            f"Raise the limit of locked memory (ulimit -l), or put a smaller share on the host."
        )


def _unregister(buffer: torch.Tensor) -> None:
    torch.cuda.synchronize()  # a copy may still be running
    _runtime().cudaHostUnregister(buffer.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()


# Copies of tensors in reused host memory, from which a checkpoint is written in the background.

#: Alignment of copies in bytes.
_ALIGNED = 64
#: Share of the host's free memory that copies may use.
_MOST_OF_FREE = 0.8
#: Bytes per host copy. Larger copies bypass the cache in libc, which took 1.5 times as long with 2 ranks on 2 cores.
_AT_ONCE = 512 * 2**10


class HostCopies:
    """One host buffer of a rank, as large as the largest set of copied tensors. Pinned if the device needs it."""

    def __init__(self, device: torch.device):
        self._stream: Any = access.new_stream(device)
        self._pins = access.pins_memory(device)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors' current values, in memory that the next call overwrites.

        Raises:
            CheckpointError: if the host has too little free memory.
        """
        places, end = [], 0
        for tensor in tensors:
            places.append(end)
            end += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
        if end > self._buffer.nbytes:
            self._grow(end)
        copies = [
            self._buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        ]
        if self._stream is None:
            _copy(copies, tensors)
        else:
            # In parallel with the device's compute. The host waits only for the copies.
            self._stream.wait_stream(access.current_stream(self._stream.device))
            with access.on_stream(self._stream):
                _copy(copies, tensors)
            self._stream.synchronize()
        return copies

    def _grow(self, num_bytes: int) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
        place = env.rank_env()
        free = int(psutil.virtual_memory().available * _MOST_OF_FREE) // (place.local_world_size if place else 1)
        if num_bytes > free:
            raise CheckpointError(
                f"checkpoint.background=true: a copy of this rank's part takes {format_bytes(num_bytes)} of host"
                f" memory, and {format_bytes(free)} are free for it. Use checkpoint.background=false."
            )
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)


@torch.no_grad()
def _copy(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes > _AT_ONCE:
            size = _AT_ONCE // tensor.element_size()
            for to, own in zip(copy.view(-1).split(size), tensor.view(-1).split(size), strict=True):
                to.copy_(own)
        else:
            copy.copy_(tensor, non_blocking=True)


# Optimizer states and parameters on the host.

#: torch optimizers whose fused kernels also run on a CPU: one pass over memory instead of several.
FUSED_ON_CPU = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """Host memory pool and link of one rank's device."""

    link: HostLink
    pool: HostPool


def open_host(plan: Plan, device: torch.device, pinned_limit: str = MOST_OF_HOST) -> Host | None:
    """Return the host pool and link if the plan offloads something, else None.

    Args:
        plan: provides `offload`.
        device: this rank's device.
        pinned_limit: limit for all ranks of the machine: "64GiB" or "60%".
    """
    if not plan.offload:
        return None
    limit = host_limit(pinned_limit)
    if not access.has_cuda_kernels(device):
        return Host(PlainLink(), HostPool(limit))
    return Host(CudaLink(device), HostPool(limit, _register, _unregister))


def offload_lines(plan: Plan, device: torch.device) -> list[str]:
    """Return one log line per offloaded kind, for the start of a run, and a note if offload saves no memory."""
    what = {
        "optimizer": "unrounded weights, optimizer states and the optimizer's step",
        "params": "parameters, with their gradients, states and the optimizer's step",
        "activations": "what blocks keep for backward",
    }
    lines = [
        f"{plan.offload_share(name):.0%} of {name} on the host: {text}"
        for name, text in what.items()
        if plan.offload_share(name)
    ]
    if lines and not access.is_accelerator(device):
        lines.append(f"this rank's device is the host itself ({device.type}): copies are made, and no memory is saved")
    elif lines and not access.has_cuda_kernels(device):
        lines.append(f"copies do not overlap on {device.type}: host memory is pinned on cuda and rocm only")
    return lines


def choose(sizes: Sequence[tuple[str, int]], share: float) -> frozenset[str]:
    """Return the names whose sizes add up to about this share of the total, first names preferred.

    The result misses the share by at most half of the largest size.
    """
    wanted = share * sum(size for _, size in sizes)
    chosen: set[str] = set()
    taken = 0
    for name, size in sizes:
        if taken + size / 2 <= wanted:
            chosen.add(name)
            taken += size
    return frozenset(chosen)


class HostPart:
    """One flat part of weights with masters on the host.

    `master` holds the unrounded weights, and `grad` their gradient once `wait` returns after `send`. Both are (length,)
    of `dtype`.

    Args:
        host: host memory pool and link.
        length: number of elements.
        dtype: dtype of the masters.
        field: plan field for errors.
    """

    def __init__(self, host: Host, length: int, dtype: torch.dtype, field: str = "offload=optimizer"):
        self._host = host
        self._buffers = [host.pool.take(length * dtype.itemsize, field) for _ in range(2)]
        self.master, self.grad = (one[: length * dtype.itemsize].view(dtype) for one in self._buffers)
        self._sent: Copy | None = None
        self._brought: Copy | None = None

    @property
    def is_early(self) -> bool:
        """True if sending gradients before the end of backward saves time."""
        return self._host.link.overlaps

    @property
    def is_sent(self) -> bool:
        """True if gradients were sent since `forget`."""
        return self._sent is not None

    def send(self, grad: torch.Tensor, after: Waitable | None = None) -> Waitable:
        """Start to copy a gradient to the host.

        The copy waits for `after`. The caller must wait for the returned object instead of `after`.
        """
        sent = self._sent = self._host.link.down(grad, self.grad, after)
        return _Started(sent)

    def wait(self) -> None:
        """Wait until the host may read `grad` and write to `master`."""
        if self._sent is not None:
            self._sent.wait_host()
        if self._brought is not None:
            self._brought.wait_host()
        self._brought = None

    def scale(self, factor: float) -> None:
        """Wait for the copies, and multiply the gradient on the host."""
        self.wait()
        self.grad.mul_(factor)

    def forget(self) -> None:
        """Begin a new step: the device may overwrite the sent tensors, once their copies are complete."""
        if self._sent is not None:
            self._sent.wait()
        self._sent = None

    @torch.no_grad()
    def bring(self, weights: torch.Tensor) -> Copy:
        """Start to copy the masters to the device, rounded to the dtype of `weights`.

        Rounding overwrites `grad`. The device must wait for the returned copy before it sends the next gradient.
        """
        self.wait()
        source = self.master
        if weights.dtype != source.dtype:
            source = self._buffers[1][: weights.nbytes].view(weights.dtype)
            source.copy_(self.master)
        self._brought = self._host.link.up(source, weights)
        return self._brought

    def release(self) -> None:
        """Give the memory back to the pool. `master` and `grad` must not be used afterwards."""
        self.wait()
        for buffer in self._buffers:
            self._host.pool.give_back(buffer)


@dataclass(frozen=True, slots=True)
class _Started:
    """Waitable that waits for the dependencies of a copy, not for the copy itself."""

    copy: Copy

    def wait(self) -> object:
        return self.copy.wait_start()


def step_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer with parameters on the host use torch's fused kernels, unless the user chose others.

    By default torch takes its slowest path if one parameter is not on a GPU. Optimizers of other classes than those in
    `FUSED_ON_CPU` are not changed.
    """
    if type(optimizer) not in FUSED_ON_CPU:
        return
    for group in optimizer.param_groups:
        unsaid = group.get("fused") is None and group.get("foreach") is None
        plain = not group.get("differentiable") and not group.get("capturable")
        if unsaid and plain and all(param.is_floating_point() for param in group["params"]):
            group["fused"] = True


def shard_offload(plan: Plan, device: torch.device, is_chosen: bool = True) -> dict[str, object]:
    """Return the keyword arguments for fully_shard of a unit: an offload policy if its parameters are on the host.

    The unit's shards, their gradients, and the optimizer's states and step are then on the host. Each gather copies the
    shards to the device.

    Args:
        plan: provides `offload`.
        device: this rank's device.
        is_chosen: True if the unit's parameters are on the host.

    Raises:
        LaunchError: if torch lacks CPUOffloadPolicy.
    """
    if not plan.offload_share("params") or not is_chosen:
        return {}
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy
    except ImportError as error:
        raise LaunchError(
            f"offload=params: torch {torch.__version__} lacks CPUOffloadPolicy. Install torch 2.11 or later."
        ) from error
    return {"offload_policy": CPUOffloadPolicy(pin_memory=access.pins_memory(device))}
