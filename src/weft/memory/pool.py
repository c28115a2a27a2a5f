"""Host memory that a device copies to and from: pinned where the device needs it, bounded, and used again.

Pinned memory cannot be swapped and is slow to get, so a run takes it once, and a limit holds for each rank. Ordinary
memory is registered with CUDA page by page: torch's own pinned allocator rounds sizes up to the next power of two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from weft import env
from weft.errors import LaunchError
from weft.memory.host_link import Copy
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
        """A flat uint8 buffer of at least `num_bytes`, whose contents may be anything.

        field: the plan's word that it is for, for the error. Raises LaunchError where the limit would be passed.
        """
        size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        fitting = [index for index, (one, _) in enumerate(self._free) if size <= one.nbytes <= size / LEAST_USED]
        if fitting:
            buffer, last = self._free.pop(min(fitting, key=lambda index: self._free[index][0].nbytes))
            if last is not None:
                last.wait_host()
        else:
            buffer = self._make(size, field)
        self.used_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer

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
