"""Recording of device work, by CUDA graphs or by a substitute.

A recording holds kernels with their addresses and arguments. Its replay runs no host code. So values that change
between replays must be read from persistent memory, and recorded code must not wait for the host.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from weft.devices import access
from weft.errors import ModelError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recording(Generic[T]):
    """Result of a recording.

    `result` is the return value of the recorded function; its tensors hold the values of the last replay. `replay`
    repeats the work in the same memory. `draws` is True if the work uses torch's random generator.
    """

    result: T
    replay: Callable[[], None]
    draws: bool


class Recorder(Protocol):
    """Interface of objects that record device work."""

    def record(self, act: Callable[[], T], what: str, *, apart: bool = False) -> Recording[T]:
        """Record the device work of a function, and run it once.

        Args:
            act: function that launches the work.
            what: name of the work, for error messages.
            apart: give the results separate memory, so that replays of other recordings do not overwrite them.

        Raises:
            ModelError: if the function does something that cannot be recorded, such as waiting for the device.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs of one device.

    Recordings that are not `apart` share memory for intermediate results.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, act: Callable[[], T], what: str, *, apart: bool = False) -> Recording[T]:
        """Record a CUDA graph, and replay it once. The host waits for the device before it records.

        Args:
            act: function that launches the work.
            what: name of the work, for error messages.
            apart: give the results separate memory.

        Raises:
            ModelError: if the function does something that cannot be recorded.
        """
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, which monitor collectives or save, may make CUDA calls that a capture forbids.
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
        generators: Any = torch.cuda.default_generators
        return generators[self._device.index or 0].get_offset()


def cannot_record(what: str, error: Exception) -> ModelError:
    """Return the error for work that cannot be recorded."""
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(f"graphs=on: {what} cannot be recorded as a CUDA graph ({why}). Use graphs=off.")


@contextlib.contextmanager
def without_garbage() -> Iterator[None]:
    """Turn off Python's garbage collection inside this context.

    Freeing device memory or events would abort a CUDA graph capture.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Copies of host values into memory that recordings read.


def send_numbers(numbers: Sequence[object] | Tensor, into: Tensor) -> None:
    """Copy host numbers into a tensor in stream order, without blocking the host.

    Args:
        numbers: nested sequences of the tensor's shape, or a host tensor.
    """
    given = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=into.dtype)
    if access.pins_memory(into.device):
        # torch does not reuse pinned memory before the copy is complete.
        into.copy_(given.pin_memory(), non_blocking=True)
    else:
        into.copy_(given)
