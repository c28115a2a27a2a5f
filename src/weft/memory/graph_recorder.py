"""Recording what a device is given to do: by CUDA graphs, or by whatever stands in for them.

A recording holds kernels with the addresses and numbers that they were given. Its replay runs no code of the host, so
what changes from one replay to the next must be read from memory that stays, and nothing in it may wait for the host.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from weft.errors import ModelError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recording(Generic[T]):
    """What was recorded.

    result: what the recorded function returned; its tensors hold what the last replay computed. replay: does it all
    again, in the same memory. draws: whether random numbers of torch's generator are drawn in it.
    """

    result: T
    replay: Callable[[], None]
    draws: bool


class Recorder(Protocol):
    """Something that records."""

    def record(self, act: Callable[[], T], what: str, *, apart: bool = False) -> Recording[T]:
        """Record what a function gives the device to do, and do it once.

        Args:
            act: gives it.
            what: it is, for errors.
            apart: its results must survive the replays of other recordings, and so get memory of their own.

        Raises:
            ModelError: where it does what cannot be recorded, such as to wait for the device.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs of one device.

    Recordings that are not `apart` share the memory in which their intermediate results lie.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, act: Callable[[], T], what: str, *, apart: bool = False) -> Recording[T]:
        """Record a CUDA graph, for which the host waits for the device once.

        Args:
            act: gives the device what is recorded.
            what: it is, for errors.
            apart: its results get memory of their own.

        Raises:
            ModelError: where it does what cannot be recorded.
        """
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads beside this one, which watch collectives or save, may ask CUDA for what a capture forbids.
        options: dict[str, Any] = {"stream": self._stream, "capture_error_mode": "thread_local"}
        if not apart:
            options["pool"] = self._pool
        try:
            with without_garbage(), torch.cuda.graph(graph, **options):
                result = act()
        except RuntimeError as error:
            raise cannot_record(what, error) from error
        before = self._generator_offset()
        graph.replay()
        return Recording(result, graph.replay, self._generator_offset() != before)

    def _generator_offset(self) -> int:
        """How far torch's generator is, which the host knows."""
        generators: Any = torch.cuda.default_generators
        return generators[self._device.index or 0].get_offset()


def cannot_record(what: str, error: Exception) -> ModelError:
    """Return the error for what cannot be recorded."""
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(f"graphs=on: {what} cannot be recorded as a CUDA graph ({why}). Use graphs=off.")


@contextlib.contextmanager
def without_garbage() -> Iterator[None]:
    """While inside, Python frees no circles of objects: freeing memory or events of a device would end a recording."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Numbers that the host knows, on their way into memory that recordings read.


def send_numbers(numbers: Sequence[object] | Tensor, into: Tensor) -> None:
    """Put numbers into a tensor, in the order of the device's work; the host does not wait.

    Args:
        numbers: as many as the tensor has, nested as it is, or a tensor of the host.
        into: of any device.
    """
    given = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=into.dtype)
    if into.device.type == "cuda":
        # torch keeps pinned memory from being given away again before the copy was made.
        into.copy_(given.pin_memory(), non_blocking=True)
    else:
        into.copy_(given)
