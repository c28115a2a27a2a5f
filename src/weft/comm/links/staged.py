"""A link for devices whose ranks cannot reach each other: tensors go through host memory, over a link of the CPU.

NCCL refuses two ranks on one device. Over this link they train all the same, with the same bits as on CPUs, since the
CPU's link makes the sums: several ranks on one GPU are slow, and prove a plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch

from weft.comm.links.link import Link, Operation, unobserved
from weft.comm.links.parts import Parts


@dataclass(slots=True)
class _Staged:
    """One operation on the device, and the same one on the host."""

    on_device: Operation
    on_host: Operation


class StagedLink:
    """Copies to the host, lets `inner` carry the operation out there, and copies the result back."""

    transport = "staged through the host"
    self_driven = False

    def __init__(self, inner: Link, reason: str):
        self.reason = f"{reason}; {inner.transport} on the host: {inner.reason}"
        self._inner = inner
        self._under_way: deque[_Staged] = deque()

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return bool(self._under_way)

    def start(self, operation: Operation) -> None:
        """Copy the operation's input to the host, and start it there."""
        with torch.no_grad(), unobserved():
            on_host = _on_host(operation)
        self._under_way.append(_Staged(operation, on_host))
        self._inner.start(on_host)

    def advance(self) -> bool:
        """Carry on the link of the host, and bring finished results to the device."""
        moved = self._inner.advance()
        return self._bring_back() or moved

    def block(self, operation: Operation) -> bool:
        """Wait on the host's link, and bring the result to the device; False where that link cannot."""
        staged = next((one for one in self._under_way if one.on_device is operation), None)
        if staged is None:
            return operation.finished
        if not self._inner.block(staged.on_host):
            return False
        self._bring_back()
        return True

    def late(self) -> tuple[int, ...]:
        """Return the global ranks that the host's link waits for."""
        return self._inner.late()

    def look(self, operation: Operation, waited_s: float) -> None:
        """Raise what the host's link raises."""
        staged = next((one for one in self._under_way if one.on_device is operation), None)
        self._inner.look(staged.on_host if staged is not None else operation, waited_s)

    def _bring_back(self) -> bool:
        """Copy what the host has finished, in the order in which it was started."""
        moved = False
        while self._under_way and self._under_way[0].on_host.finished:
            staged = self._under_way.popleft()
            with torch.no_grad(), unobserved():
                staged.on_device.out.copy_(staged.on_host.out)
            staged.on_device.sent_bytes = staged.on_host.sent_bytes
            staged.on_device.off_host_bytes = staged.on_host.off_host_bytes
            staged.on_device.finished = moved = True
        return moved


def _on_host(operation: Operation) -> Operation:
    """The operation with its tensors copied to the host. Waits until the device has made them."""
    source, out = operation.source, operation.out
    source = source.joined() if isinstance(source, Parts) else source
    if operation.kind in ("all_reduce", "broadcast", "barrier"):
        # In place: what is combined or sent lies where the result goes.
        given = out if operation.kind != "all_reduce" else source
        whole = given.detach().to("cpu", copy=True)
        return replace(operation, source=whole, out=whole)
    whole = source.detach().to("cpu", copy=True)
    return replace(operation, source=whole, out=torch.empty_like(out, device="cpu"))
