"""Operations in flight: collectives, and copies to the host."""

from __future__ import annotations

import time
from functools import cached_property

import torch

from weft.comm.connect import link_of, links_of
from weft.comm.mesh import Axis
from weft.comm.transports.link import Operation, StreamWait, finish, waited
from weft.devices import access


class Pending:
    """A collective in flight. `wait()` returns its tensor and may be called again.

    Args:
        tensor: the tensor that `wait()` returns.
        axis: the ranks, or None if nothing is in flight.
        operation: the operation to start, or None if nothing is in flight.
        into: if given, `wait()` copies the result to it, converted to its dtype.
        counts: True if the ledger records this operation. A part of another collective is recorded with that one.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        axis: Axis | None = None,
        operation: Operation | None = None,
        into: torch.Tensor | None = None,
        counts: bool = True,
    ):
        self._tensor, self._into, self._axis, self._operation = tensor, into, axis, operation
        self._counts = counts
        self.seconds = 0.0
        self.sent_bytes = self.off_host_bytes = 0
        if axis is not None and operation is not None:
            while axis.staged:
                axis.staged.pop().go_on()
            start = time.perf_counter()
            link_of(axis, operation.out.device).start(operation)
            self.seconds = time.perf_counter() - start

    def wait(self) -> torch.Tensor:
        """Wait for the collective and return the result.

        Raises CommError if a rank has exited or exceeds the timeout. The message names axis and operation.
        """
        axis, operation = self._axis, self._operation
        if axis is not None and operation is not None:
            pulse = axis.pulse
            pulse.waiting = self
            start = time.perf_counter()
            stream_wait = StreamWait.begin(operation.out.device) if self._counts else None
            finish(operation, link_of(axis, operation.out.device), links_of(axis))
            self.seconds += time.perf_counter() - start
            pulse.waiting = None
            pulse.moved += 1
            self._axis = self._operation = None
            self.sent_bytes, self.off_host_bytes = operation.sent_bytes, operation.off_host_bytes
            if self._counts:
                num_bytes = max(operation.source.nbytes, operation.out.nbytes)
                seconds = waited(stream_wait, operation.out.device, self.seconds)
                sent = operation.sent_bytes, operation.off_host_bytes
                axis.record(axis.name, operation.kind, num_bytes, seconds, *sent)
            if operation.then is not None:
                operation.then()
            if self._into is not None:
                self._into.detach().copy_(self._tensor.view_as(self._into))
                self._tensor, self._into = self._into, None
        return self._tensor

    def where(self) -> tuple[str, tuple[int, ...]]:
        """Return a description of the collective and the global ranks of its axis. Empty once it is complete."""
        axis, operation = self._axis, self._operation
        return (str(operation), axis.ranks) if axis is not None and operation is not None else ("", ())

    def late(self) -> tuple[int, ...]:
        """Return the global ranks that delay the collective, if the transport reports them."""
        axis, operation = self._axis, self._operation
        if axis is None or operation is None:
            return ()
        return link_of(axis, operation.out.device).late()


class LateCopy:
    """An asynchronous copy of numbers from a GPU to the host, which reads them later.

    tensor: 1-D, small, on any device. On the CPU it is not copied, so do not change it before `values` is read.
    """

    def __init__(self, tensor: torch.Tensor):
        self._event: torch.Event | None = None
        self._host = tensor
        if access.is_accelerator(tensor.device):
            pins = access.pins_memory(tensor.device)
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
            self._host.copy_(tensor, non_blocking=pins)
            self._event = access.record_event(tensor.device)

    @cached_property
    def values(self) -> list[float]:
        """The numbers. The first access waits until the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return [float(one) for one in self._host.unbind()]
