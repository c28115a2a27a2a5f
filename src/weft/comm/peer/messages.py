"""Messages between two ranks: they concern no other, and arrive in the order in which they were sent."""

from __future__ import annotations

import time
from typing import cast

import torch
import torch.distributed as dist

from weft.comm.links import Operation, StreamWait, as_moved, failed, waited
from weft.comm.private_torch import backend_of
from weft.errors import CommError
from weft.mesh import Axis


class Message:
    """A message under way between two ranks; `wait()` returns its tensor, and may be called again.

    Args:
        tensor: sent, or received into.
        axis: the ranks.
        what: "send" or "receive".
        peer: the other rank's place on the axis.
        work: of the backend; None: there is nothing to wait for.
        start: when it began, by time.perf_counter.
        staged: where the backend reads or writes, if it cannot reach the tensor.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        axis: Axis,
        what: str,
        peer: int,
        work: dist.Work | None,
        start: float,
        staged: torch.Tensor | None = None,
    ):
        # staged: where the backend reads or writes, if it cannot reach the tensor.
        self._tensor, self._axis, self._what, self._work = tensor, axis, what, work
        self._staged = staged
        self._peer = axis.ranks[peer]
        self._seconds = time.perf_counter() - start

    def wait(self) -> torch.Tensor:
        """Return the tensor, sent or received.

        Raises:
            CommError: when the other rank is gone.
        """
        if self._work is not None:
            pulse = self._axis.pulse
            pulse.waiting = self
            start = time.perf_counter()
            stream_wait = StreamWait.begin(self._tensor.device)
            work, self._work = self._work, None
            try:
                work.wait()
            except RuntimeError as error:
                nothing = torch.empty(0)
                raise failed(Operation(self._what, self._axis.label, nothing, nothing), error) from error
            if self._staged is not None and self._what == "receive":
                self._tensor.detach().copy_(self._staged)
            self._staged = None
            seconds = self._seconds + time.perf_counter() - start
            pulse.waiting = None
            pulse.moved += 1
            seconds = waited(stream_wait, self._tensor.device, seconds)
            sent = self._tensor.nbytes if self._what == "send" else 0
            hosts = self._axis.hosts
            here, there = hosts.get(self._axis.ranks[self._axis.rank]), hosts.get(self._peer)
            self._axis.record(
                self._axis.name, self._what, self._tensor.nbytes, seconds, sent, sent if here != there else 0
            )
        return self._tensor

    def where(self) -> tuple[str, tuple[int, ...]]:
        """Return the message in words and the other rank."""
        return f"{self._what} over {self._axis.label}", (self._peer,)

    def late(self) -> tuple[int, ...]:
        """Return the other rank: a message waits for no one else."""
        return (self._peer,)


def start_send(tensor: torch.Tensor, axis: Axis, to: int) -> Message:
    """Begin to send a contiguous tensor; it must not be changed before `wait()`.

    Args:
        tensor: of any dtype and shape.
        axis: the ranks.
        to: the receiver's place on the axis.
    """
    start = time.perf_counter()
    _check_peer("send", axis, to, tensor)
    tensor = tensor.detach()
    staged = tensor.cpu() if _needs_host(axis, tensor) else None
    work = dist.isend(as_moved(tensor) if staged is None else staged, dst=axis.ranks[to], group=axis.group)
    return Message(tensor, axis, "send", to, work, start, staged)


def start_receive(out: torch.Tensor, axis: Axis, source: int) -> Message:
    """Begin to receive into a contiguous tensor.

    Args:
        out: of the dtype and shape of what is sent.
        axis: the ranks.
        source: the sender's place on the axis.
    """
    start = time.perf_counter()
    _check_peer("receive", axis, source, out)
    staged = torch.empty_like(out, device="cpu") if _needs_host(axis, out) else None
    work = dist.irecv(as_moved(out.detach()) if staged is None else staged, src=axis.ranks[source], group=axis.group)
    return Message(out, axis, "receive", source, work, start, staged)


def _needs_host(axis: Axis, tensor: torch.Tensor) -> bool:
    """Whether the group's backend cannot reach the tensor's device: gloo sends from host memory alone."""
    if tensor.device.type == "cpu":
        return False
    return backend_of(cast(dist.ProcessGroup, axis.group), tensor.device).name() == "gloo"


def _check_peer(what: str, axis: Axis, peer: int, tensor: torch.Tensor) -> None:
    if not 0 <= peer < axis.size or peer == axis.rank:
        raise CommError(f"{what} over {axis.label}: rank {peer} is not another rank of it. Use 0 to {axis.size - 1}.")
    if not tensor.is_contiguous():
        raise CommError(f"{what} over {axis.label}: the tensor is not contiguous. Pass tensor.contiguous().")
