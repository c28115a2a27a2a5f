"""Exchange of gradients by row after the last microbatch of a step, and their sums on the ranks that hold the rows.

Contributions to a row are added in the order of microbatches and ranks, which is the order of samples in the global
batch. R ranks, M rows that arrived at a rank, with repetitions, C columns of a rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.collectives import all_reduce
from weft.comm.peer import all_to_all
from weft.parallel.tables.requests import by_lookup, by_rank, joined_blocks, totals
from weft.parallel.tables.row_sums import sum_rows
from weft.parallel.tables.table import JoinedTables, Table, TableCall
from weft.private_torch import split


@torch.no_grad()
def exchange_gradients(all_joined: Sequence[JoinedTables], device: torch.device) -> Tensor:
    """Send the gradients of all lookups of a step to their ranks, and set `rows` and `grads` of each joined table.

    All ranks call it. Returns this rank's part of the squared gradient norm of all tables, 0-d float64.
    """
    tables = [joined.table for joined in all_joined]
    _return_gradients([joined for joined in all_joined if joined.table.dim is not None])
    _reduce_replicated([joined for joined in all_joined if joined.table.dim is None])
    square = torch.zeros((), dtype=torch.float64, device=device)
    for table in tables:
        table.calls = []
        if table.grads is not None and (table.dim is not None or table.axis.rank == 0):
            square += torch.linalg.vector_norm(table.grads, dtype=torch.float64).square()
    return square


def _return_gradients(all_joined: Sequence[JoinedTables]) -> None:
    """Return the gradients of all lookups to the ranks that hold their rows, and add them by row."""
    tables = [joined.table for joined in all_joined]
    calls = [(table, call) for table in tables for call in table.calls]
    arrived: list[Tensor] = []
    if calls:
        axis, queue = tables[0].axis, tables[0].queue
        send, receive, pieces = list[list[int]](), list[list[int]](), list[list[Tensor]]()
        for table, call in calls:
            widths, own = [table.columns_of(rank) for rank in range(axis.size)], table.columns_of(axis.rank)
            send.append([count * width for count, width in zip(call.send, widths, strict=True)])
            receive.append([count * own for count in call.receive])
            grad = _gradient_of(call)
            parts = split(grad, call.send) if table.dim == 0 else split(grad, widths, 1)
            pieces.append([part.reshape(-1) for part in parts])
        flat = all_to_all(by_rank(pieces), axis, send=totals(send), receive=totals(receive), most=queue.most)
        arrived = [joined_blocks(one) for one in by_lookup(flat, receive)]
    for joined, table in zip(all_joined, tables, strict=True):
        width, number = table.columns_of(table.axis.rank), len(table.calls)
        _store(joined, [call.wanted for call in table.calls], [one.view(-1, width) for one in arrived[:number]])
        arrived = arrived[number:]


def _gradient_of(call: TableCall) -> Tensor:
    call.take_gradient()
    assert call.grad is not None
    return call.grad


def _store(joined: JoinedTables, ids: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add gradients by row. ids: rows of each lookup, (M,). grads: their gradients, (M, C)."""
    table = joined.table
    if not ids:
        table.rows = table.grads = None
        return
    rows, index = torch.cat(list(ids)).unique(return_inverse=True)
    sums = sum_rows(grads[0] if len(grads) == 1 else torch.cat(list(grads)), index, rows.numel())
    for padding in joined.padding:
        kept = rows != padding
        rows, sums = rows[kept], sums[kept]
    table.rows, table.grads = rows, sums


def _reduce_replicated(all_joined: Sequence[JoinedTables]) -> None:
    """Sum the gradients of tables that every rank holds, in one all-reduce of buffers with their shapes.

    A last column counts the ranks that read a row.
    """
    if not all_joined:
        return
    tables = [joined.table for joined in all_joined]
    for joined, table in zip(all_joined, tables, strict=True):
        _store(joined, [call.wanted for call in table.calls], [_gradient_of(call) for call in table.calls])
    if tables[0].axis.size == 1:
        return
    flat = torch.cat([_with_counts(table).view(-1) for table in tables])
    all_reduce(flat, tables[0].axis)
    start = 0
    for table in tables:
        num_rows, width = table.full_shape
        sums = flat[start : start + num_rows * (width + 1)].view(num_rows, width + 1)
        start += sums.numel()
        table.rows = sums[:, -1].nonzero().flatten()
        table.grads = sums[table.rows, :-1]


def _with_counts(table: Table) -> Tensor:
    num_rows, width = table.full_shape
    dense = table.weight.new_zeros(num_rows, width + 1)
    if table.rows is not None and table.grads is not None:
        dense[table.rows, :-1] = table.grads
        dense[table.rows, -1] = 1
    return dense


def mean_squares(table: Table, grads: Tensor) -> Tensor:
    """Return the mean squared gradient of each row over all columns. All ranks call it if the style is columns.

    Args:
        table: the table.
        grads: gradients of the rows that the step read, (M, C).
    """
    sums = grads.square().sum(1)
    if table.dim == 1:
        all_reduce(sums, table.axis)
    return sums / table.full_shape[1]
