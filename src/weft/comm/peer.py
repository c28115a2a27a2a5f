"""Point-to-point and all-to-all exchanges over an axis, and messages between two of its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from weft.comm.collectives import all_reduce
from weft.comm.connect import backend_for, link_of
from weft.comm.mesh import Axis, join_group
from weft.comm.pending import Pending
from weft.comm.transports.backend import as_moved
from weft.comm.transports.link import Operation, StreamWait, failed, waited
from weft.errors import CommError


def all_to_all(
    tensor: torch.Tensor,
    axis: Axis,
    out: torch.Tensor | None = None,
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    most: int | None = None,
) -> torch.Tensor:
    """Send rows of dim 0 to each rank of the axis, in order, and return the rows received from each.

    Over an axis of size 1, this returns the tensor itself. Raises CommError if the counts do not fit the tensors.

    Args:
        tensor: (rows, ...) of any dtype.
        out: contiguous (rows received, ...); None to allocate a new tensor.
        send: number of rows for each rank; None for equal shares.
        receive: number of rows from each rank; None if `send` is None.
        most: as in `start_all_to_all`.
    """
    return start_all_to_all(tensor, axis, out, send=send, receive=receive, most=most).wait()


def start_all_to_all(
    tensor: torch.Tensor,
    axis: Axis,
    out: torch.Tensor | None = None,
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    most: int | None = None,
) -> Pending:
    """Begin `all_to_all`. Do not touch `tensor` or `out` before `wait()` of the returned object.

    Raises CommError if `out` or the counts do not fit the tensors.

    Args:
        tensor, out, send, receive: as in `all_to_all`.
        most: maximum number of rows that any rank sends to another. If None, the ranks exchange it first.
    """
    name = f"all_to_all over {axis.label}"
    if axis.size == 1:
        if out is None:
            return Pending(tensor)
        return Pending(out.copy_(tensor) if out.data_ptr() != tensor.data_ptr() else out)
    send, receive, is_equal = _counts(name, tensor, axis, send, receive)
    if out is None:
        out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    if out.shape != (sum(receive), *tensor.shape[1:]) or not out.is_contiguous():
        raise CommError(
            f"{name}: out has shape {tuple(out.shape)}, but {sum(receive)} rows of shape {tuple(tensor.shape[1:])} "
            f"arrive. Pass a contiguous out of that shape."
        )
    if most is None:
        most = send[0] if is_equal else largest_count(send, axis, tensor.device)
    width = tensor[:1].numel() if tensor.shape[0] else out[:1].numel()
    operation = Operation(
        "all_to_all",
        axis.label,
        tensor.detach().reshape(-1),
        out.detach().view(-1),
        send=tuple(rows * width for rows in send),
        receive=tuple(rows * width for rows in receive),
        most=most * max(width, tensor.shape[1:].numel()),
    )
    return Pending(out, axis, operation)


def shift(tensor: torch.Tensor, axis: Axis, by: int = 1, out: torch.Tensor | None = None) -> torch.Tensor:
    """Send this rank's tensor `by` ranks further around the axis, and return the one received from `by` ranks before.

    If `by` is a multiple of the axis's size, this returns the tensor itself, or `out` with a copy of it.

    tensor: has the same shape on all ranks. out: has the tensor's shape; None to allocate a new tensor.
    """
    return start_shift(tensor, axis, by, out).wait()


def start_shift(tensor: torch.Tensor, axis: Axis, by: int = 1, out: torch.Tensor | None = None) -> Pending:
    """Begin `shift`. Do not touch `tensor` or `out` before `wait()` of the returned object.

    tensor, out: as in `shift`.
    """
    if axis.size == 1 or by % axis.size == 0:
        return Pending(tensor if out is None else out.copy_(tensor))
    if out is None:
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.rank + by) % axis.size] = receive[(axis.rank - by) % axis.size] = tensor.numel()
    flat = tensor.detach().reshape(-1)
    operation = Operation(
        "all_to_all",
        axis.label,
        flat,
        out.detach().view(-1),
        send=tuple(send),
        receive=tuple(receive),
        most=flat.numel(),
    )
    return Pending(out, axis, operation)


def _counts(
    name: str, tensor: torch.Tensor, axis: Axis, send: Sequence[int] | None, receive: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int], bool]:
    rows = tensor.shape[0]
    if send is None and receive is None:
        if rows % axis.size:
            raise CommError(
                f"{name}: {rows} rows are not a multiple of its {axis.size} ranks. Give send= and receive=, or pad."
            )
        equal = [rows // axis.size] * axis.size
        return equal, equal, True
    if send is None or receive is None or len(send) != axis.size or len(receive) != axis.size or sum(send) != rows:
        raise CommError(
            f"{name}: send={send} and receive={receive} for {rows} rows. Give both, one count for each of the "
            f"{axis.size} ranks, with send adding up to the rows."
        )
    return send, receive, False


def largest_count(send: Sequence[int], axis: Axis, device: torch.device) -> int:
    """Return `most` of `all_to_all` for several exchanges with the same counts, as `largest_counts` does."""
    return largest_counts((send,), axis, device)[0]


def largest_counts(sends: Sequence[Sequence[int]], axis: Axis, device: torch.device) -> list[int]:
    """Return `most` of several calls of `all_to_all` from their counts. All ranks of the axis call it.

    Backends that need no common bound exchange nothing; then the results are this rank's maxima.
    """
    own = [max(send) for send in sends]
    if axis.size == 1 or link_of(axis, device).self_driven:
        return own
    return [int(most) for most in all_reduce(torch.tensor(own), axis, op="max")]


# Lanes: groups of two ranks for messages of one kind in one direction, so that no message waits behind another kind.


class PeerLane(NamedTuple):
    """A kind of message with a fixed sender and receiver (indices on the axis)."""

    content: str
    sender: int
    receiver: int


def join_lanes(axis: Axis, device: torch.device, lanes: Iterable[PeerLane]) -> dict[PeerLane, Axis]:
    """Return an axis of two ranks, sender and receiver, for each lane; {} if the axis has one rank.

    A lane has a separate process group unless the backend is gloo. Only its two ranks create the group, independent of
    the size of the axis. Collective: both ranks of a lane must call it. lanes: the lanes that begin or end on this
    rank, identical on both ends.
    """
    if axis.group is None:
        return {}
    own_group = backend_for(axis.group, device).name() != "gloo"
    found: dict[PeerLane, Axis] = {}
    for lane in sorted(set(lanes), key=_order):
        ends = tuple(sorted((lane.sender, lane.receiver)))
        ranks = tuple(axis.ranks[end] for end in ends)
        group = axis.group
        if own_group:
            group = join_group(ranks, f"{axis.name} {lane.content} from {axis.ranks[lane.sender]}, of")
        found[lane] = replace(axis, size=2, rank=ends.index(axis.rank), ranks=ranks, group=group)
    return found


def _order(lane: PeerLane) -> tuple[int, PeerLane]:
    """Return a sort key that is equal on all ranks. Pairs that begin at an even index connect first, in parallel."""
    return min(lane.sender, lane.receiver) % 2, lane


# Messages between two ranks. They involve no other rank and arrive in the order in which they were sent.


class Message:
    """A message in flight between two ranks. `wait()` returns its tensor and may be called again.

    work: the backend's handle, or None if there is nothing to wait for. staged: host buffer of the backend, if it
    cannot access the tensor.
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
        self._tensor, self._axis, self._what, self._work = tensor, axis, what, work
        self._staged = staged
        self._peer = axis.ranks[peer]
        self._seconds = time.perf_counter() - start

    def wait(self) -> torch.Tensor:
        """Return the tensor, sent or received. Raises CommError if the other rank has exited."""
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
        """Return a description of the message, and the other rank."""
        return f"{self._what} over {self._axis.label}", (self._peer,)

    def late(self) -> tuple[int, ...]:
        """Return the other rank, the only one that a message waits for."""
        return (self._peer,)


def start_send(tensor: torch.Tensor, axis: Axis, to: int) -> Message:
    """Begin to send a contiguous tensor to the rank with index `to`. Do not change it before `wait()`.

    Raises CommError if the tensor is not contiguous, or `to` is not the index of another rank on the axis.
    """
    start = time.perf_counter()
    _check_peer("send", axis, to, tensor)
    tensor = tensor.detach()
    staged = tensor.cpu() if _needs_host(axis, tensor) else None
    work = dist.isend(as_moved(tensor) if staged is None else staged, dst=axis.ranks[to], group=axis.group)
    return Message(tensor, axis, "send", to, work, start, staged)


def start_receive(out: torch.Tensor, axis: Axis, source: int) -> Message:
    """Begin to receive into a contiguous tensor from the rank with index `source`.

    Raises CommError if the tensor is not contiguous, or `source` is not the index of another rank on the axis.
    """
    start = time.perf_counter()
    _check_peer("receive", axis, source, out)
    staged = torch.empty_like(out, device="cpu") if _needs_host(axis, out) else None
    work = dist.irecv(as_moved(out.detach()) if staged is None else staged, src=axis.ranks[source], group=axis.group)
    return Message(out, axis, "receive", source, work, start, staged)


def _needs_host(axis: Axis, tensor: torch.Tensor) -> bool:
    """Return True if the group's backend cannot access the tensor's device. gloo sends from host memory only."""
    if tensor.device.type == "cpu":
        return False
    return backend_for(cast(dist.ProcessGroup, axis.group), tensor.device).name() == "gloo"


def _check_peer(what: str, axis: Axis, peer: int, tensor: torch.Tensor) -> None:
    if not 0 <= peer < axis.size or peer == axis.rank:
        raise CommError(f"{what} over {axis.label}: rank {peer} is not another rank of it. Use 0 to {axis.size - 1}.")
    if not tensor.is_contiguous():
        raise CommError(f"{what} over {axis.label}: the tensor is not contiguous. Pass tensor.contiguous().")
