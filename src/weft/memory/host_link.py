"""The way between a device and the host: copies that run beside the device's work, and what waits for them.

Two streams, one for each direction, since a bus carries both at once. Nothing here knows what is copied.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Waitable(Protocol):
    """Something under way, such as a collective."""

    def wait(self) -> object:
        """Let what the device does from here on come after it."""
        ...


class Copy(Protocol):
    """One copy under way."""

    def wait(self) -> object:
        """What the device does from here on comes after the copy."""
        ...

    def wait_start(self) -> object:
        """What the device does from here on comes after all that the copy itself had to wait for."""
        ...

    def wait_host(self) -> None:
        """Return when the copy is done."""
        ...


class HostLink(Protocol):
    """Copies between one device and the host.

    overlaps: whether copies run beside other work, so that they are better begun early.
    """

    @property
    def overlaps(self) -> bool: ...

    def down(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        """Begin to copy a device's tensor to the host, after the device's work so far and after `after`.

        The host may read `target` after `wait_host`, the device write to `source` after `wait`.
        """
        ...

    def up(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        """Begin to copy the host's tensor to a device's, after the device's work so far and after `after`.

        The device may read `target` after `wait`, the host write to `source` after `wait_host`.
        """
        ...


class _Done:
    """A copy that was done when it was asked for."""

    def wait(self) -> None: ...

    def wait_start(self) -> None: ...

    def wait_host(self) -> None: ...


class PlainLink:
    """For a device that is the host itself: plain copies in its memory, at once."""

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
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def wait_start(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._start)

    def wait_host(self) -> None:
        self._end.synchronize()


class CudaLink:
    """A CUDA device's copy engines, on two side streams. Host tensors must be pinned, else copies block.

    Both sides' tensors must live until the copy is done. The device's are told to the caching allocator here; for
    the host's it is the caller who waits before their memory goes to others.
    """

    overlaps = True

    def __init__(self, device: torch.device):
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in ("down", "up")}

    def down(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        return self._copy("down", source, target, source, after)

    def up(self, source: torch.Tensor, target: torch.Tensor, after: Waitable | None = None) -> Copy:
        return self._copy("up", source, target, target, after)

    @torch.no_grad()
    def _copy(
        self, way: str, source: torch.Tensor, target: torch.Tensor, on_device: torch.Tensor, after: Waitable | None
    ) -> Copy:
        stream = self._streams[way]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()  # a collective's wait holds up the stream that is current, here the side stream alone
            start = stream.record_event()
            target.copy_(source, non_blocking=True)
            on_device.record_stream(stream)
            return _CudaCopy(self._device, start, stream.record_event())


def link_to(device: torch.device) -> HostLink:
    """The way between the host and `device`."""
    return CudaLink(device) if device.type == "cuda" else PlainLink()
