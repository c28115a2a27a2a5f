"""Collectives on encoded tensors: sums and gathers for `comm.collectives`.

An all_reduce over more than two ranks has two stages, and all ranks must begin the second stage in one order. Therefore
no other operation begins on a mesh before the second stage of the current one has begun. Ranks that overlap such sums
must start them in one order on all axes.
"""

from __future__ import annotations

import torch

from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.comm.transports.link import Operation, StreamWait, unobserved, waited
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.wire.coder import Coder
from weft.comm.wire.power_sgd import LowRankSum
from weft.errors import CommError


class CodedGather(Pending):
    """An all_gather of the ranks' encoded rows in flight. `wait()` decodes them into the flat `out`.

    `out` may have fewer elements than all rows; the rest is dropped.
    """

    def __init__(self, row_1N: torch.Tensor, axis: Axis, out: torch.Tensor, coder: Coder, role: str, counts: bool):
        codes = _encoded(coder, role, row_1N, axis.rank)
        self._codes = codes.new_empty((axis.size, codes.shape[1]))
        self._numel, self._wire, self._into = row_1N.shape[1], coder.wire, out
        operation = Operation("all_gather", axis.label, codes.view(-1), self._codes.view(-1))
        super().__init__(out, axis, operation, out, counts)

    def wait(self) -> torch.Tensor:
        if self._into is not None:
            out, self._into = self._into, None
            super().wait()
            with torch.no_grad(), unobserved():
                values = self._wire.decode(self._codes, self._numel, out.dtype).view(-1)
                out.detach().view(-1).copy_(values[: out.numel()])
        return self._tensor


class CodedExchange(Pending):
    """A sum of the ranks' flat tensors in flight, in one stage: a rank encodes its own, then decodes and adds all."""

    def __init__(self, flat_1N: torch.Tensor, axis: Axis, out: torch.Tensor, coder: Coder):
        codes = _encoded(coder, "summands", flat_1N, axis.rank)
        self._codes = codes.new_empty((axis.size, codes.shape[1]))
        self._numel, self._wire, self._out, self._over = flat_1N.shape[1], coder.wire, out, axis
        self._num_bytes, self._done = codes.nbytes, False
        operation = Operation("all_gather", f"{axis.label} (all_reduce)", codes.view(-1), self._codes.view(-1))
        super().__init__(out, axis, operation, counts=False)

    def wait(self) -> torch.Tensor:
        if not self._done:
            stream_wait = StreamWait.begin(self._out.device)
            super().wait()
            with torch.no_grad(), unobserved():
                sums = self._wire.decode(self._codes[:1], self._numel, self._out.dtype)
                for row in self._codes[1:]:
                    sums += self._wire.decode(row[None], self._numel, self._out.dtype)
                self._out.detach().view(-1).copy_(sums.view(-1))
            seconds = waited(stream_wait, self._out.device, self.seconds)
            sent = self.sent_bytes, self.off_host_bytes
            self._over.record(self._over.name, "all_reduce", self._num_bytes, seconds, *sent)
            self._done = True
        return self._out


class CodedSum(Pending):
    """A sum of the ranks' rows in flight: encoded, exchanged, decoded, and added in rank order.

    `rows_RN` holds a row for each rank. `out` gets this rank's row of the sums, or with `whole` all sums, as in
    `CodedGather`.
    """

    def __init__(self, rows_RN: torch.Tensor, axis: Axis, out: torch.Tensor, coder: Coder, whole: bool):
        codes = _encoded(coder, "summands", rows_RN, axis.rank)
        self._codes, self._num_bytes = torch.empty_like(codes), codes.nbytes
        self._numel, self._coder, self._out, self._over = rows_RN.shape[1], coder, out, axis
        self._gather: CodedGather | None = None
        self._whole, self._done = whole, False
        counts = (codes.shape[1],) * axis.size
        name = "all_reduce" if whole else "reduce_scatter"
        operation = Operation(
            "all_to_all",
            f"{axis.label} ({name})",
            codes.view(-1),
            self._codes.view(-1),
            send=counts,
            receive=counts,
            most=counts[0],
        )
        self._name = name
        super().__init__(out, axis, operation, counts=False)
        if whole:
            axis.staged.append(self)

    def go_on(self) -> None:
        """Finish the first stage and begin the second. Called once."""
        super().wait()
        with torch.no_grad(), unobserved():
            sums = self._coder.wire.decode(self._codes[:1], self._numel, self._out.dtype)
            for row in self._codes[1:]:
                sums += self._coder.wire.decode(row[None], self._numel, self._out.dtype)
            if not self._whole:
                self._out.detach().view(-1).copy_(sums.view(-1))
                return
        self._gather = CodedGather(sums, self._over, self._out, self._coder, "sums", counts=False)

    def wait(self) -> torch.Tensor:
        if not self._done:
            stream_wait = StreamWait.begin(self._out.device)
            if self in self._over.staged:
                self._over.staged.remove(self)
            if self._gather is None:
                self.go_on()
            seconds, sent, off_host = self.seconds, self.sent_bytes, self.off_host_bytes
            if self._gather is not None:
                self._gather.wait()
                seconds += self._gather.seconds
                sent, off_host = sent + self._gather.sent_bytes, off_host + self._gather.off_host_bytes
            seconds = waited(stream_wait, self._out.device, seconds)
            self._over.record(self._over.name, self._name, self._num_bytes, seconds, sent, off_host)
            self._done = True
        return self._out

    def where(self) -> tuple[str, tuple[int, ...]]:
        return self._gather.where() if self._gather is not None else super().where()

    def late(self) -> tuple[int, ...]:
        return self._gather.late() if self._gather is not None else super().late()


def sum_coded(
    name: str, what: torch.Tensor | Parts, axis: Axis, out: torch.Tensor, op: str, coder: Coder, *, whole: bool
) -> Pending:
    """Begin an all_reduce or a reduce_scatter of encoded values, into `out`.

    Raises CommError for an op that the wire cannot combine.

    Args:
        what: a tensor of any shape, or parts of a flat one.
        coder: encodes, and stores the wire's state.
        whole: True for all_reduce, False for reduce_scatter.
    """
    if op not in coder.wire.ops:
        raise CommError(
            f"{name}: op={op!r} does not work on wire {coder.wire.spec.name}. Use {' or '.join(coder.wire.ops)}, "
            f"or leave wire= out."
        )
    numel = what.numel()
    if coder.wire.spec.rank:
        joined = what.joined() if isinstance(what, Parts) else what.detach().reshape(-1)
        return LowRankSum(name, joined, axis, out, coder)
    exchanges = whole and (axis.size == 2 or coder.wire.sends_to_all)
    padded = numel if exchanges else -(-numel // axis.size) * axis.size
    if isinstance(what, Parts):
        flat = torch.zeros(padded, dtype=what.dtype, device=what.device)
        what.copy_to(flat[:numel])
    else:
        flat = what.detach().reshape(-1)
        if padded > numel:
            flat = torch.cat([flat, flat.new_zeros(padded - numel)])
    if exchanges:
        return CodedExchange(flat[None], axis, out, coder)
    return CodedSum(flat.view(axis.size, -1), axis, out, coder, whole)


def gather_coded(shard: torch.Tensor, axis: Axis, out: torch.Tensor, coder: Coder) -> Pending:
    """Begin an all_gather of encoded shards into `out`. Each rank decodes its own shard too, so that bits are equal.

    shard: tensor of any shape, with the same number of elements on every rank. out: contiguous, of the shard's dtype,
    with size * numel elements. coder: encodes, and stores the wire's state.
    """
    return CodedGather(shard.detach().reshape(1, -1), axis, out, coder, "shard", counts=True)


def _encoded(coder: Coder, role: str, rows_RN: torch.Tensor, place: int) -> torch.Tensor:
    with torch.no_grad(), unobserved():
        return coder.encode(role, rows_RN, place).contiguous()
