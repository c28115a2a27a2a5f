"""Collectives over an axis. Over an axis of size 1 each is the identity and costs nothing.

All ranks of an axis start the same operations in the same order. They may wait for them in any order. Results are
bitwise identical on every rank and in every run: on the CPU, sums use one fixed tree over the ranks on every transport,
and a reduce_scatter returns this rank's slice of the all_reduce. Do not touch the tensors between `start_...` and
`wait()`.

`wire` encodes the tensor's values for communication and keeps its state from step to step. With None, the values are
sent unencoded. Over an axis of size 1 nothing is encoded. `comm.wire.wire_format` defines how encoded values are
summed. If summands must be decoded first, an all_reduce rounds the sums once more; a reduce_scatter does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.comm.transports.link import Operation
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.wire.coded_collectives import gather_coded, sum_coded
from weft.comm.wire.coder import Coder
from weft.devices import access
from weft.errors import CommError

_OPS = ("sum", "max", "min")
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8)
#: Dtypes that can be reduced, by backend and op. all_gather and broadcast accept any dtype.
_COMBINED = {
    ("gloo", "sum"): (*_FLOATS, *_WHOLE, torch.int16, torch.complex64, torch.complex128),
    ("gloo", "max"): (*_FLOATS, *_WHOLE, torch.int16, torch.bool),
    ("nccl", "sum"): (*_FLOATS, *_WHOLE, torch.complex64, torch.complex128),
    ("nccl", "max"): (*_FLOATS, *_WHOLE, torch.bool),
}


def all_reduce(tensor: torch.Tensor, axis: Axis, op: str = "sum", wire: Coder | None = None) -> torch.Tensor:
    """Combine `tensor` over the axis, in place, and return it.

    Raises CommError if the tensor is not contiguous, if `op` does not support its dtype, or if a rank has exited.

    Args:
        tensor: contiguous, of any shape, with a dtype that can be reduced.
        op: "sum", "max" or "min".
        wire: encodes the values for communication, or None to send them unencoded.
    """
    return start_all_reduce(tensor, axis, op, wire=wire).wait()


def start_all_reduce(
    tensor: torch.Tensor, axis: Axis, op: str = "sum", parts: Parts | None = None, wire: Coder | None = None
) -> Pending:
    """Begin `all_reduce`. Do not touch the tensor before `wait()` of the returned object.

    tensor, op, wire: as in `all_reduce`. parts: the input, if it is stored in parts instead of in `tensor`; the result
    is written to `tensor`.
    """
    if axis.size == 1 or tensor.numel() == 0:
        return Pending(tensor if parts is None else parts.copy_to(tensor))
    name = f"all_reduce over {axis.label}"
    flat = _flat(name, "tensor", tensor)
    what = tensor if parts is None else parts
    if (coder := _decoding(what, wire)) is not None:
        return sum_coded(name, what, axis, tensor, op, coder, whole=True)
    if (rounded := _rounded(what, wire)) is not None:
        _check_op(name, rounded, op)
        return Pending(rounded, axis, Operation("all_reduce", axis.label, rounded, rounded, op), into=tensor)
    _check_op(name, tensor, op)
    return Pending(tensor, axis, Operation("all_reduce", axis.label, flat if parts is None else parts, flat, op))


def all_gather(
    shard: torch.Tensor, axis: Axis, out: torch.Tensor | None = None, wire: Coder | None = None
) -> torch.Tensor:
    """Gather all ranks' shards in order of the axis, flat (size * numel), or in `out` of any shape.

    Over an axis of size 1 without `out`, this returns the shard itself, flat. Raises CommError if `out` does not fit,
    or a rank has exited.

    Args:
        shard: tensor of any dtype and shape, with the same number of elements on every rank. It may be this rank's
            slice of `out`; then it is not copied.
        out: contiguous, of the shard's dtype, with size * numel elements; None to allocate a new tensor.
        wire: encodes the values for communication, or None to send them unencoded.
    """
    return start_all_gather(shard, axis, out, wire).wait()


def start_all_gather(
    shard: torch.Tensor, axis: Axis, out: torch.Tensor | None = None, wire: Coder | None = None
) -> Pending:
    """Begin `all_gather`. Do not touch `shard` or `out` before `wait()` of the returned object.

    shard, out, wire: as in `all_gather`.
    """
    name = f"all_gather over {axis.label}"
    _check_out(name, shard, out, shard.numel() * axis.size, f"{axis.size} shards of {shard.numel()} elements")
    if axis.size == 1 or shard.numel() == 0:
        return _identity(shard, out, axis.size * shard.numel())
    source = shard.detach().reshape(-1)  # copies where it is not contiguous
    if out is None:
        out = torch.empty(axis.size * shard.numel(), dtype=shard.dtype, device=shard.device)
    flat = _flat(name, "out", out)
    _check_overlap(name, whole=flat, part=source, offset=axis.rank * source.numel())
    if wire is not None and not wire.wire.spec.exact:
        return gather_coded(source, axis, out, wire)
    return Pending(out, axis, Operation("all_gather", axis.label, source, flat))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Gather each rank's JSON value, in order of the axis, by collectives on `device`."""
    text = json.dumps(value).encode()
    longest = int(all_reduce(torch.tensor([len(text)], device=device), axis, op="max"))
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    return [json.loads(row.numpy().tobytes()) for row in all_gather(padded, axis).view(axis.size, -1).cpu()]


def reduce_scatter(
    flat: torch.Tensor, axis: Axis, out: torch.Tensor | None = None, op: str = "sum", wire: Coder | None = None
) -> torch.Tensor:
    """Combine `flat` over the axis and return this rank's slice, flat (numel / size) or in `out` of any shape.

    Over an axis of size 1 without `out`, this returns the tensor itself, flat. Raises CommError if the sizes do not
    fit, or a rank has exited.

    Args:
        flat: tensor of any shape, read as (numel,), with a dtype that can be reduced. numel is a multiple of the axis's
            size.
        out: contiguous, of the same dtype, with numel / size elements; None to allocate a new tensor. It may be this
            rank's slice of `flat`; the rest of `flat` is then left unchanged.
        op: "sum", "max" or "min".
        wire: encodes the values for communication, or None to send them unencoded.
    """
    return start_reduce_scatter(flat, axis, out, op, wire).wait()


def start_reduce_scatter(
    flat: torch.Tensor | Parts, axis: Axis, out: torch.Tensor | None = None, op: str = "sum", wire: Coder | None = None
) -> Pending:
    """Begin `reduce_scatter`. Do not touch `flat` or `out` before `wait()` of the returned object.

    flat: as in `reduce_scatter`; the result has its dtype. `Parts` (a flat tensor in several parts) need op="sum" and
    an `out`. out, op, wire: as in `reduce_scatter`. Raises CommError if numel is not a multiple of the axis's size, or
    `out` does not fit.
    """
    if isinstance(flat, Parts):
        assert out is not None
        assert op == "sum"
        return _reduce_parts(flat, axis, out, wire)
    name = f"reduce_scatter over {axis.label}"
    numel, rest = divmod(flat.numel(), axis.size)
    if rest:
        padded = flat.numel() + axis.size - rest
        raise CommError(
            f"{name}: {flat.numel()} elements are not a multiple of its {axis.size} ranks. Pad the tensor to {padded}."
        )
    _check_out(name, flat, out, numel, f"a slice of {numel} elements")
    if axis.size == 1 or numel == 0:
        return _identity(flat, out, numel)
    if out is None:
        out = torch.empty(numel, dtype=flat.dtype, device=flat.device)
    part = _flat(name, "out", out)
    if (coder := _decoding(flat, wire)) is not None:
        return sum_coded(name, flat, axis, out, op, coder, whole=False)
    if (rounded := _rounded(flat, wire)) is not None:
        return _scatter_rounded(name, rounded, axis, out, op)
    _check_op(name, flat, op)
    source = flat.detach().reshape(-1)  # copies where it is not contiguous
    _check_overlap(name, whole=source, part=part, offset=axis.rank * numel)
    return Pending(out, axis, Operation("reduce_scatter", axis.label, source, part, op))


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Copy `tensor` from the rank with index `source` on the axis into `tensor` on all its ranks, and return it.

    tensor: contiguous, of any dtype, with the same shape on all ranks. Raises CommError if it is not contiguous, or if
    `source` is not an index on the axis.
    """
    if not 0 <= source < axis.size:
        raise CommError(
            f"broadcast over {axis.label}: source={source} is not one of its ranks. Use 0 to {axis.size - 1}."
        )
    if axis.size == 1 or tensor.numel() == 0:
        return tensor
    flat = _flat(f"broadcast over {axis.label}", "tensor", tensor)
    return Pending(tensor, axis, Operation("broadcast", axis.label, flat, flat, root=source)).wait()


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis have called this."""
    if axis.size > 1:
        nothing = torch.empty(0)
        Pending(nothing, axis, Operation("barrier", axis.label, nothing, nothing)).wait()


def _decoding(what: torch.Tensor | Parts, wire: Coder | None) -> Coder | None:
    """Return `wire` if its values must be decoded before they are added, else None."""
    return None if wire is None or wire.wire.added_in(what.dtype) is not None else wire


def _rounded(what: torch.Tensor | Parts, wire: Coder | None) -> torch.Tensor | None:
    """Return a flat copy in the dtype in which the wire's values are added, or None if no conversion is needed."""
    dtype = None if wire is None else wire.wire.added_in(what.dtype)
    if dtype is None or dtype == what.dtype:
        return None
    flat = torch.empty(what.numel(), dtype=dtype, device=what.device)
    return what.copy_to(flat) if isinstance(what, Parts) else flat.copy_(what.detach().reshape(-1))


def _reduce_parts(parts: Parts, axis: Axis, out: torch.Tensor, wire: Coder | None) -> Pending:
    name = f"reduce_scatter over {axis.label}"
    if axis.size == 1:
        return Pending(parts.copy_to(out))
    if parts.numel() != out.numel() * axis.size or parts.dtype != out.dtype:
        raise CommError(
            f"{name}: out has {out.numel()} {_kind(out)}, and {axis.size} ranks divide {parts.numel()} elements. "
            f"Pass an out of {parts.numel() // axis.size} elements of the parts' type."
        )
    if (coder := _decoding(parts, wire)) is not None:
        return sum_coded(name, parts, axis, out, "sum", coder, whole=False)
    if (rounded := _rounded(parts, wire)) is not None:
        return _scatter_rounded(name, rounded, axis, out, "sum")
    _check_op(name, out, "sum")
    return Pending(out, axis, Operation("reduce_scatter", axis.label, parts, _flat(name, "out", out)))


def _scatter_rounded(name: str, rounded: torch.Tensor, axis: Axis, out: torch.Tensor, op: str) -> Pending:
    """Begin a reduce_scatter of a rounded copy in place; the result is copied to `out`."""
    _check_op(name, rounded, op)
    own = rounded[axis.rank * out.numel() :][: out.numel()]
    return Pending(own, axis, Operation("reduce_scatter", axis.label, rounded, own, op), into=out)


def _flat(name: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view of the tensor's memory. Raises CommError unless it is contiguous."""
    if not tensor.is_contiguous():
        raise CommError(
            f"{name}: {argument} of shape {tuple(tensor.shape)} is not contiguous, and it is written in place. Pass "
            f"a contiguous tensor, such as {argument}.contiguous()."
        )
    return tensor.detach().view(-1)


def _identity(tensor: torch.Tensor, out: torch.Tensor | None, numel: int) -> Pending:
    if out is None:
        return Pending(tensor.reshape(-1) if tensor.numel() else tensor.new_empty(numel))
    if tensor.data_ptr() != out.data_ptr():
        out.detach().copy_(tensor.detach().reshape(out.shape))
    return Pending(out)


def _check_op(name: str, tensor: torch.Tensor, op: str) -> None:
    if op not in _OPS:
        raise CommError(f"{name}: op={op!r} is not known. Use one of {', '.join(_OPS)}.")
    known = _COMBINED.get((access.kind_of(tensor.device).backend, "sum" if op == "sum" else "max"))
    if known is not None and tensor.dtype not in known:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise CommError(
            f"{name}: {str(tensor.dtype).removeprefix('torch.')} has no {op} on {tensor.device.type}. Use {names}."
        )


def _check_out(name: str, tensor: torch.Tensor, out: torch.Tensor | None, numel: int, what: str) -> None:
    """Raise CommError unless `out` is None, or has `numel` elements and the same dtype and device as `tensor`."""
    if out is None:
        return
    if out.numel() != numel or out.dtype != tensor.dtype or out.device != tensor.device:
        raise CommError(
            f"{name}: out has {out.numel()} {_kind(out)}, but the result is {what} of {_kind(tensor)}. Pass an out "
            f"of {numel} {_kind(tensor)}."
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


def _check_overlap(name: str, whole: torch.Tensor, part: torch.Tensor, offset: int) -> None:
    """Raise CommError if `part` overlaps `whole` but is not this rank's slice: writes would corrupt the rest."""
    start = part.data_ptr() - whole.data_ptr()
    if -part.nbytes < start < whole.nbytes and start != offset * whole.itemsize:
        raise CommError(
            f"{name}: the shard overlaps the full tensor, but not at this rank's position, element {offset}. Pass "
            "that slice, or separate memory."
        )


# Collectives over parts of unequal sizes. Every part is padded to the largest, so every transport supports them, and
# values are exact. If the largest of `size` parts has `most` elements, the bytes on the links and in temporary memory
# are those of size * most elements.


class PaddedGather:
    """An all-gather in flight.

    Args:
        part: this rank's part, flat.
        axis: the ranks.
        sizes: elements of each rank's part, in order of the axis.
        out: flat result, with the sum of `sizes` elements; None to allocate it.
    """

    @torch.no_grad()
    def __init__(self, part: torch.Tensor, axis: Axis, sizes: Sequence[int], out: torch.Tensor | None = None):
        padded = part.new_zeros(max(sizes))
        padded[: part.numel()].copy_(part)
        self._sizes = list(sizes)
        self._out = part.new_empty(sum(sizes)) if out is None else out
        self._pending: Pending | None = start_all_gather(padded, axis)

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        """Wait for the parts of all ranks, and return them in order."""
        if self._pending is not None:
            rows = self._pending.wait().view(len(self._sizes), -1)
            for piece, row in zip(torch.split(self._out, self._sizes), rows, strict=True):
                piece.copy_(row[: piece.numel()])
            self._pending = None
        return self._out


class PaddedReduceScatter:
    """A sum over the ranks of an axis in flight, of which every rank gets its part.

    Args:
        flat: this rank's summands of all parts, flat.
        axis: the ranks.
        sizes: elements of each rank's part, in order of the axis.
        out: this rank's part of the sum. It may be a view of `flat`.
    """

    @torch.no_grad()
    def __init__(self, flat: torch.Tensor, axis: Axis, sizes: Sequence[int], out: torch.Tensor):
        rows = flat.new_zeros(len(sizes), max(sizes))
        for row, piece in zip(rows, torch.split(flat.detach(), list(sizes)), strict=True):
            row[: piece.numel()].copy_(piece)
        self._out = out
        self._pending: Pending | None = start_reduce_scatter(rows.view(-1), axis)

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        """Wait for the sum, and return this rank's part."""
        if self._pending is not None:
            self._out.copy_(self._pending.wait()[: self._out.numel()])
            self._pending = None
        return self._out
