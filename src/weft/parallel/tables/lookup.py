"""Lookups of sharded tables: unique ids are sent to the ranks that hold their rows, which return the rows.

The rows are a leaf of autograd, so backward communicates nothing. Letters as in `table.py`.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.comm.collectives import all_gather
from weft.comm.peer import all_to_all, largest_count
from weft.errors import CommError, ModelError
from weft.parallel.tables.table import Table, TableCall
from weft.private_torch import split, uncompiled

#: Count that a rank sends to all others if its input has an id out of range.
_REFUSED = -1
#: Bits of a message that hold a count plus 1. Those above have the table's tag.
_COUNT_BITS = 40


class FetchedRows(NamedTuple):
    """The rows of a lookup.

    Attributes:
        rows_UD: rows of the unique ids.
        unique_U: the unique ids, ascending.
        index: position of each id of the input in `unique_U`, with the input's shape.
    """

    rows_UD: Tensor
    unique_U: Tensor
    index: Tensor


def fetch(table: Table, ids: Tensor) -> FetchedRows:
    """Return the rows of a tensor of ids. All ranks call it, unless the style is replicate.

    Raises:
        ModelError: for an id out of range, or a lookup with gradients outside a train step.
        CommError: if another rank has an id out of range.
    """
    if torch.is_grad_enabled() and not table.is_open:
        raise ModelError(
            f"table {table.name!r}: its gradients are exchanged by run.train_step, and this forward is not in a step. "
            "Use run.train_step to train, run.evaluate to evaluate, or torch.no_grad()."
        )
    with torch.no_grad():
        unique_U, index = ids.detach().long().unique(return_inverse=True)
        call = {0: _request_rows, 1: _request_columns, None: _local_rows}[table.dim](table, unique_U)
    rows_UD = call.leaf
    assert rows_UD is not None
    if torch.is_grad_enabled():
        rows_UD.requires_grad_()
        table.calls.append(call)
    return FetchedRows(rows_UD, unique_U, index)


def _request_rows(table: Table, unique_U: Tensor) -> TableCall:
    axis, weight = table.axis, table.weight
    starts = torch.tensor(table.starts, device=unique_U.device)
    # Ids are sorted and ranks hold ascending ranges, so the ids of each rank are consecutive.
    counts_R = torch.searchsorted(unique_U, starts).diff()
    sent_R = _tagged(table, torch.where(_is_outside(table, unique_U), _REFUSED, counts_R))
    arrived_R = all_to_all(sent_R, axis)
    # The only wait for the device.
    send, receive = (_untagged(table, one) for one in torch.stack([sent_R, arrived_R]).tolist())
    _refuse(table, unique_U, send[axis.rank], receive)
    most = largest_count(send, axis, unique_U.device)
    local_U = unique_U - starts[:-1].repeat_interleave(counts_R, output_size=unique_U.numel())
    wanted = all_to_all(_narrowed(table, local_U), axis, send=send, receive=receive, most=most).long()
    rows_UD = all_to_all(weight.index_select(0, wanted), axis, send=receive, receive=send, most=most)
    return TableCall(rows_UD.detach(), wanted, send, receive, most)


def _request_columns(table: Table, unique_U: Tensor) -> TableCall:
    axis, weight, num_ids = table.axis, table.weight, unique_U.numel()
    own = torch.where(_is_outside(table, unique_U), _REFUSED, num_ids).view(1)
    counts = _untagged(table, all_gather(_tagged(table, own), axis).tolist())
    _refuse(table, unique_U, counts[axis.rank], counts)
    most = max(counts)
    padded = F.pad(_narrowed(table, unique_U), (0, most - num_ids))
    every = all_gather(padded, axis).view(axis.size, most)
    wanted = torch.cat([every[rank, :count] for rank, count in enumerate(counts)]).long()
    widths = [table.columns_of(rank) for rank in range(axis.size)]
    flat = all_to_all(
        weight.index_select(0, wanted).view(-1),
        axis,
        send=[count * widths[axis.rank] for count in counts],
        receive=[num_ids * width for width in widths],
        most=most * max(widths),
    )
    parts = split(flat, [num_ids * width for width in widths])
    blocks = [part.view(num_ids, width) for part, width in zip(parts, widths, strict=True)]
    return TableCall(torch.cat(blocks, 1), wanted, [num_ids] * axis.size, counts, most)


def _local_rows(table: Table, unique_U: Tensor) -> TableCall:
    _refuse(table, unique_U, _REFUSED if bool(_is_outside(table, unique_U)) else 0, [])
    return TableCall(table.weight.index_select(0, unique_U), unique_U, [], [], 0)


def _tagged(table: Table, counts: Tensor) -> Tensor:
    return counts.add(1).add(table.tag << _COUNT_BITS)


def _untagged(table: Table, messages: list[int]) -> list[int]:
    """Return the counts of messages.

    Raises ModelError if one is about another table, on all ranks of the exchange.
    """
    found = [divmod(one, 1 << _COUNT_BITS) for one in messages]
    if any(tag != table.tag for tag, _ in found):
        raise ModelError(
            f"table {table.name!r}: another rank looks up another table at this point of its forward. Call the same "
            "tables in the same order on all ranks, or leave the tables out of layout."
        )
    return [count - 1 for _, count in found]


def _narrowed(table: Table, ids: Tensor) -> Tensor:
    """Return ids in four bytes if all rows of the table fit."""
    return ids.int() if table.full_shape[0] < 2**31 else ids


def _is_outside(table: Table, unique_U: Tensor) -> Tensor:
    """Return a 0-d bool: True if an id is not a row of the table."""
    return ((unique_U < 0) | (unique_U >= table.full_shape[0])).any()


def _refuse(table: Table, unique_U: Tensor, own: int, counts: list[int]) -> None:
    """Raise an error if this rank or another one has an id out of range. All ranks of the exchange raise."""
    num_rows = table.full_shape[0]
    if own == _REFUSED:
        wrong = int(unique_U[(unique_U < 0) | (unique_U >= num_rows)][0])
        remedy = f"give the table {wrong + 1} rows" if wrong > 0 else "encode missing ids by a row of their own"
        raise ModelError(
            f"id {wrong}: table {table.name.rpartition('.')[0]!r} has {num_rows} rows. Use ids from 0 to "
            f"{num_rows - 1}, or {remedy}."
        )
    if _REFUSED in counts:
        rank = table.axis.ranks[counts.index(_REFUSED)]
        raise CommError(f"table {table.name!r}: rank {rank} has an id out of range. Its log names the id.")


class TableEmbedding(nn.Embedding):
    """An nn.Embedding whose table is sharded."""

    _weft_table: Table

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        found = fetch(self._weft_table, input)
        return F.embedding(found.index, found.rows_UD).to(self._weft_table.compute)


class TableBag(nn.EmbeddingBag):
    """An nn.EmbeddingBag whose table is sharded."""

    _weft_table: Table

    @uncompiled
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        table = self._weft_table
        found = fetch(table, input)
        pooled = F.embedding_bag(
            found.index,
            found.rows_UD,
            None if offsets is None else offsets.long(),
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(found.rows_UD.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=self._padding_in(found.unique_U),
        )
        return pooled.to(table.compute)

    def _padding_in(self, unique_U: Tensor) -> int | None:
        """Return the position of padding_idx among the unique ids, or None if it is not among them."""
        if self.padding_idx is None or not unique_U.numel():
            return None
        position = (unique_U == self.padding_idx).nonzero().flatten().tolist()
        return position[0] if position else None


def refuse_weight(name: str) -> NoReturn:
    """Raise the error for a forward that uses a table's weight outside its module's lookup."""
    raise ModelError(
        f"table {name!r}: code outside its module computes with the weight, of which each rank holds a part. Look rows "
        "up by calling the module, or leave it out of layout."
    )
