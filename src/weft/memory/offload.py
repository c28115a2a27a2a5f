"""Host memory that a device copies to and from: pinned where the device needs it, bounded, and used again.

Pinned memory cannot be swapped and is slow to get, so a run takes it once, and a limit holds for each rank. Ordinary
memory is registered with CUDA page by page: torch's own pinned allocator rounds sizes up to the next power of two.
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
from weft.errors import CheckpointError, LaunchError
from weft.memory.host_link import Copy, HostLink, Waitable, link_to
from weft.units import format_bytes, parse_bytes

#: Of the machine's memory, what all ranks on it may pin together; the rest is for states, data and the system.
MOST_OF_HOST = "60%"
#: A free buffer serves requests from this share of its size on.
LEAST_USED = 0.75
_GRAIN = 4096
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

Pin = Callable[[torch.Tensor], None]


class HostPool:
    """Buffers of host memory, at most `limit_bytes` of them together.

    pin, unpin: what makes a new buffer fit for a device's copies, and undoes it before the buffer goes.
    """

    def __init__(self, limit_bytes: int, pin: Pin | None = None, unpin: Pin | None = None):
        self.limit_bytes = limit_bytes
        #: Bytes of all buffers, those in use, and the most that were ever in use at once.
        self.held_bytes = self.used_bytes = self.peak_bytes = 0
        self._pin, self._unpin = pin, unpin
        self._free: list[tuple[torch.Tensor, Copy | None]] = []  # the longest free first
        # All buffers, by address: registered memory must not go to others while CUDA still knows it.
        self._all: dict[int, torch.Tensor] = {}
        weakref.finalize(self, _unpin_all, self._all, unpin).atexit = False

    def take(self, num_bytes: int, field: str) -> torch.Tensor:
        """A flat uint8 buffer of at least `num_bytes`, whose contents may be anything; the host may write to it.

        field: the plan's word that it is for, for the error. Raises LaunchError where the limit would be passed.
        """
        buffer, last = self.take_unawaited(num_bytes, field)
        if last is not None:
            last.wait_host()
        return buffer

    def take_unawaited(self, num_bytes: int, field: str) -> tuple[torch.Tensor, Copy | None]:
        """The same for who lets a device copy to it, after the copy that is given: the host need not wait for that."""
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
        """Let others have a buffer that `take` gave. last: the copy from or to it that may still be under way."""
        self.used_bytes -= buffer.nbytes
        self._free.append((buffer, last))

    def release(self) -> None:
        """Give all buffers that nobody uses back to the system."""
        while self._free:
            self._drop(*self._free.pop())

    def _make(self, size: int, field: str) -> torch.Tensor:
        # What is free does not fit: the largest goes first, as few as needed.
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
    """Bytes of host memory that this rank may take: its part of what all ranks of the machine may.

    setting: a size ("64GiB"), or a share of what the machine or container has ("60%"). Raises LaunchError for a size
    that is not there.
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


def pool_for(device: torch.device, pinned_limit: str = MOST_OF_HOST) -> HostPool:
    """The pool of a rank: pinned for a CUDA device, ordinary memory for all others. pinned_limit: as `host_limit`."""
    limit = host_limit(pinned_limit)
    return HostPool(limit, _register, _unregister) if device.type == "cuda" else HostPool(limit)


def _register(buffer: torch.Tensor) -> None:
    result = int(_runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if result:
        raise LaunchError(
            f"offload: CUDA could not pin {format_bytes(buffer.nbytes)} of host memory (error {result}). "
            f"Raise the limit of locked memory (ulimit -l), or put a smaller share on the host."
        )


def _unregister(buffer: torch.Tensor) -> None:
    torch.cuda.synchronize()  # a copy may still be under way
    _runtime().cudaHostUnregister(buffer.data_ptr())


def _runtime() -> Any:
    """CUDA's own library, whose functions torch gives no types."""
    return torch.cuda.cudart()


# Copies of tensors in host memory that is taken once and used again: what a checkpoint is written from meanwhile.

#: Every copy begins at a multiple of so many bytes.
_ALIGNED = 64
#: Of the host's free memory, what copies may take.
_MOST_OF_FREE = 0.8
#: Bytes that the host copies at once: more than a MiB or so libc writes past the cache, which took 1.5 times as long
#: with two ranks on two cores.
_AT_ONCE = 512 * 2**10


class HostCopies:
    """One buffer of a rank, as large as the largest set of tensors that it took: pinned where the device needs it."""

    def __init__(self, device: torch.device):
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors' values as they are now, in memory that the next call writes over.

        Raises:
            CheckpointError: where the host has no room for them.
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
            # Beside what the device computes; the host waits for the copies alone.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                _copy(copies, tensors)
            self._stream.synchronize()
        return copies

    def _grow(self, num_bytes: int) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        place = env.rank_env()
        free = int(psutil.virtual_memory().available * _MOST_OF_FREE) // (place.local_world_size if place else 1)
        if num_bytes > free:
            raise CheckpointError(
                f"checkpoint.background=true: a copy of this rank's part takes {format_bytes(num_bytes)} of host"
                f" memory, and {format_bytes(free)} are free for it. Use checkpoint.background=false."
            )
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


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

#: torch's optimizers whose fused kernels run on a CPU too: one pass over memory where others take several.
FUSED_ON_CPU = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """The host as one rank's device sees it: its memory, and the way there."""

    link: HostLink
    pool: HostPool


def open_host(plan: Plan, device: torch.device, pinned_limit: str = MOST_OF_HOST) -> Host | None:
    """Return the host, where the plan puts something there; None where it does not.

    Args:
        plan: its `offload`.
        device: of this rank.
        pinned_limit: of all ranks of the machine: "64GiB" or "60%".
    """
    return Host(link_to(device), pool_for(device, pinned_limit)) if plan.offload else None


def offload_lines(plan: Plan, device: torch.device) -> list[str]:
    """Return what the plan puts on the host, one line each, for the start of a run; says where it saves nothing."""
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
    if lines and device.type != "cuda":
        lines.append(f"this rank's device is the host itself ({device.type}): copies are made, and no memory is saved")
    return lines


def choose(sizes: Sequence[tuple[str, int]], share: float) -> frozenset[str]:
    """Return the names that together have about this share of all sizes, the first ones by preference.

    What is chosen misses the share by no more than half of the largest size.
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
    """One flat part of weights whose masters are on the host.

    master: unrounded weights; grad: their gradient, after `arrive`. Both (length,) of `dtype`.

    Args:
        host: the pool, and the way to the device.
        length: elements.
        dtype: of the masters.
        field: the plan's field, for errors.
    """

    def __init__(self, host: Host, length: int, dtype: torch.dtype, field: str = "offload=optimizer"):
        self._host = host
        self._buffers = [host.pool.take(length * dtype.itemsize, field) for _ in range(2)]
        self.master, self.grad = (one[: length * dtype.itemsize].view(dtype) for one in self._buffers)
        self._sent: Copy | None = None
        self._brought: Copy | None = None

    @property
    def is_early(self) -> bool:
        """Whether it pays to send gradients while the device works."""
        return self._host.link.overlaps

    @property
    def is_sent(self) -> bool:
        """Whether gradients were sent since `forget`."""
        return self._sent is not None

    def send(self, grad: torch.Tensor, after: Waitable | None = None) -> Waitable:
        """Let a gradient travel to the host.

        after: what it must wait for; the caller waits for what this returns in its place.
        """
        sent = self._sent = self._host.link.down(grad, self.grad, after)
        return _Started(sent)

    def arrive(self) -> None:
        """Wait until the host may read `grad` and write to `master`."""
        if self._sent is not None:
            self._sent.wait_host()
        if self._brought is not None:
            self._brought.wait_host()
        self._brought = None

    def scale(self, factor: float) -> None:
        """Multiply the gradient here."""
        self.arrive()
        self.grad.mul_(factor)

    def forget(self) -> None:
        """Begin a new step: the device may overwrite what was sent."""
        if self._sent is not None:
            self._sent.wait()
        self._sent = None

    @torch.no_grad()
    def bring(self, weights: torch.Tensor) -> Copy:
        """Let the masters travel to the device, rounded to the format of `weights`.

        Uses `grad` up where it rounds. The device must wait for what this returns before it sends the next gradient.
        """
        self.arrive()
        source = self.master
        if weights.dtype != source.dtype:
            source = self._buffers[1][: weights.nbytes].view(weights.dtype)
            source.copy_(self.master)
        self._brought = self._host.link.up(source, weights)
        return self._brought

    def release(self) -> None:
        """Give the memory back to the pool; `master` and `grad` are not to be used any more."""
        self.arrive()
        for buffer in self._buffers:
            self._host.pool.give_back(buffer)


@dataclass(frozen=True, slots=True)
class _Started:
    """Waits for what a copy waited for, not for the copy."""

    copy: Copy

    def wait(self) -> object:
        return self.copy.wait_start()


def step_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer with parameters on the host use torch's fused kernels, where nobody said otherwise.

    Left alone, torch takes its slowest path as soon as one parameter is not on a GPU.
    """
    if type(optimizer) not in FUSED_ON_CPU:
        return
    for group in optimizer.param_groups:
        unsaid = group.get("fused") is None and group.get("foreach") is None
        plain = not group.get("differentiable") and not group.get("capturable")
        if unsaid and plain and all(param.is_floating_point() for param in group["params"]):
            group["fused"] = True


def shard_offload(plan: Plan, device: torch.device, is_chosen: bool = True) -> dict[str, object]:
    """Return the keyword arguments for fully_shard, for a unit whose parameters are among those on the host or not.

    The unit's shards, their gradients and so the optimizer's states and step are then on the host; each gather brings
    the shards to the device.

    Args:
        plan: its `offload`.
        device: of this rank.
        is_chosen: whether the unit is among those on the host.

    Raises:
        LaunchError: where torch lacks it.
    """
    if not plan.offload_share("params") or not is_chosen:
        return {}
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy
    except ImportError as error:
        raise LaunchError(
            f"offload=params: torch {torch.__version__} lacks CPUOffloadPolicy. Install torch 2.11 or later."
        ) from error
    return {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
