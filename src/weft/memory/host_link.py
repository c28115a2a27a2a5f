"""Copies between a device and the host that overlap with the device's work, and waits for them.

Two streams, one per direction, because a bus carries both directions simultaneously. This module does not depend on the
copied data.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.devices import access


class Waitable(Protocol):
    """A pending operation, such as a collective."""

    def wait(self) -> object:
        """Make the device's later work wait for it."""
        ...


class Copy(Protocol):
    """One pending copy."""

    def wait(self) -> object:
        """Make the device's later work wait for the copy."""
        ...

    def wait_start(self) -> object:
        """Make the device's later work wait for the dependencies of the copy, but not for the copy itself."""
        ...

    def wait_host(self) -> None:
        """Wait on the host until the copy is complete."""
        ...


class HostLink(Protocol):
    """Copies between one device and the host.

    `overlaps` is True if copies run in parallel with other work, so that starting them early helps.
    """

    @property
    def overlaps(self) -> bool: ...

    def down(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        """Start to copy a device tensor to the host, after the device's current work and after `after`.

        The host may read `target` after `wait_host`. The device may write `source` after `wait`.
        """
        ...

    def up(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        """Start to copy a host tensor to the device, after the device's current work and after `after`.

        The device may read `target` after `wait`. The host may write `source` after `wait_host`.
        """
        ...


class _Done:
    def wait(self) -> None: ...

    def wait_start(self) -> None: ...

    def wait_host(self) -> None: ...


class PlainLink:
    """Link of a device that is the host itself: synchronous copies in its memory."""

    overlaps = False

    @torch.no_grad()
    def down(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        if after is not None:
            after.wait()
        target.copy_(source)
        return _Done()

    @torch.no_grad()
    def up(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        if after is not None:
            after.wait()
        target.copy_(source)
        return _Done()


class _CudaCopy:
    def __init__(self, device: torch.device, start: torch.Event, end: torch.Event):
        self._device, self._start, self._end = device, start, end

    def wait(self) -> None:
        access.current_stream(self._device).wait_event(self._end)

    def wait_start(self) -> None:
        access.current_stream(self._device).wait_event(self._start)

    def wait_host(self) -> None:
        self._end.synchronize()


class CudaLink:
    """Link over a CUDA device's copy engines, on two side streams. Host tensors must be pinned, else copies block.

    Tensors on both sides must live until the copy is complete. For the device this class registers them with the
    caching allocator. For the host the caller must wait before it reuses their memory.
    """

    overlaps = True

    def __init__(self, device: torch.device):
        self._device = device
        self._streams: dict[str, Any] = {way: access.new_stream(device) for way in ("down", "up")}

    def down(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        return self._copy("down", source, target, source, after)

    def up(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        return self._copy("up", source, target, target, after)

    @torch.no_grad()
    def _copy(
        self, way: str, source: torch.Tensor, target: torch.Tensor, on_device: torch.Tensor, after: Waitable | None
    ) -> Copy:
        stream = self._streams[way]
        stream.wait_stream(access.current_stream(self._device))
        with access.on_stream(stream):
            if after is not None:
                after.wait()  # a collective's wait blocks the current stream, here only the side stream
            start = stream.record_event()
            target.copy_(source, non_blocking=True)
            on_device.record_stream(stream)
            return _CudaCopy(self._device, start, stream.record_event())
