"""Exchanges around an axis: all_to_all and shift. All ranks call them, like any collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.collectives import all_reduce
from weft.comm.links import Operation
from weft.comm.meet import link_of
from weft.comm.pending import Pending
from weft.errors import CommError
from weft.mesh import Axis


def all_to_all(
    tensor: torch.Tensor,
    axis: Axis,
    out: torch.Tensor | None = None,
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    most: int | None = None,
) -> torch.Tensor:
    """Send rows of dim 0 to each rank of the axis, in its order, and return the rows received from each.

    Over an axis of size 1 the tensor itself.

    Args:
        tensor: (rows, ...) of any dtype.
        axis: the ranks.
        out: contiguous (rows received, ...); None: a new tensor.
        send: rows to each rank; None: all ranks exchange equal shares.
        receive: rows from each rank; None with `send`.
        most: as `start_all_to_all`.

    Raises:
        CommError: where the counts do not fit the tensors.
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
    """Begin `all_to_all`; neither tensor nor out must be touched before `wait()` of what this returns.

    Args:
        tensor: as `all_to_all` takes it.
        axis: the ranks.
        out: as `all_to_all` takes it.
        send: as `all_to_all` takes it.
        receive: as `all_to_all` takes it.
        most: the most rows that any rank sends to any other, where the caller knows it: else ranks ask each other.

    Raises:
        CommError: where `out` or the counts do not fit the tensors.
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
        most = send[0] if is_equal else _largest(send, axis, tensor.device)
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
    """Send this rank's tensor to the rank `by` further around the axis, and return that of the rank `by` before.

    Over an axis of size 1 the tensor itself.

    Args:
        tensor: of one shape on all ranks.
        axis: the ranks.
        by: may be negative.
        out: of the tensor's shape; None: a new tensor.
    """
    return start_shift(tensor, axis, by, out).wait()


def start_shift(tensor: torch.Tensor, axis: Axis, by: int = 1, out: torch.Tensor | None = None) -> Pending:
    """Begin `shift`; neither tensor nor out must be touched before `wait()` of what this returns.

    Args:
        tensor: as `shift` takes it.
        axis: the ranks.
        by: may be negative.
        out: as `shift` takes it.
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


def _largest(send: Sequence[int], axis: Axis, device: torch.device) -> int:
    if link_of(axis, device).self_driven:
        return max(send)  # the backend needs no common bound
    return int(all_reduce(torch.tensor([max(send)]), axis, op="max"))
