"""Joint exchange of several lookups: one all_to_all of counts, one of ids and one of rows for all tables.

P lookups, R ranks, U unique ids of a lookup, M ids that arrived at a rank, C columns of a rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.peer import all_to_all, largest_counts
from weft.errors import CommError, ModelError
from weft.parallel.tables.table import Table, TableCall
from weft.private_torch import split

#: Count that a rank sends to all others if its input has an id out of range.
_REFUSED = -1
#: Bits of a message that hold a count plus 1. Those above have the table's tag, which is not 0.
_COUNT_BITS = 40
#: Lookups that one exchange can join: the size of a message of counts, of which the rest is 0.
_AT_ONCE = 64


def local_rows(table: Table, unique_U: Tensor) -> TableCall:
    """Look up unique ids in a replicated table. Raises ModelError for an id out of range."""
    if bool(_is_outside(table, unique_U)):
        _refuse_own(table, unique_U)
    return TableCall(table.read(unique_U, False), unique_U, [], [])


@torch.no_grad()
def request_rows(tables: Sequence[Table], ids: Sequence[Tensor], trains: Sequence[bool]) -> tuple[list[TableCall], int]:
    """Fetch the rows of several lookups from the ranks that hold them. All ranks of the axis call it.

    It fetches as many as every rank waits for. A rank whose forward uses the first rows earlier waits for fewer.

    Args:
        tables: the table of each lookup, all over one axis. None is replicated.
        ids: the unique ids of each lookup in ascending order, (U,) int64.
        trains: for each lookup, True if it has gradients.

    Returns:
        The first lookups, at least one, and the most elements of rows that any rank sends to another.

    Raises:
        ModelError: for an id out of range, or if ranks look up different tables.
        CommError: if another rank has an id out of range.
    """
    axis = tables[0].axis
    send, receive = _exchange_counts(tables[:_AT_ONCE], ids[:_AT_ONCE])
    tables, ids = tables[: len(send)], ids[: len(send)]
    widths = [[table.columns_of(rank) for rank in range(axis.size)] for table in tables]
    own = [one[axis.rank] for one in widths]
    to_send = [[count * width for count in one] for one, width in zip(receive, own, strict=True)]
    to_receive = [[c * width for c, width in zip(*one, strict=True)] for one in zip(send, widths, strict=True)]
    most_ids, most_rows = largest_counts((totals(send), totals(to_send)), axis, ids[0].device)

    parts = [
        split(one, counts) if table.dim == 0 else [one] * axis.size  # every rank has columns of all rows
        for table, one, counts in zip(tables, ids, send, strict=True)
    ]
    message = by_rank(parts)
    if all(table.full_shape[0] < 2**31 for table in tables):
        message = message.int()
    arrived = all_to_all(message, axis, send=totals(send), receive=totals(receive), most=most_ids)
    wanted = [torch.cat(list(one)).long() for one in by_lookup(arrived, receive)]
    for table, one in zip(tables, wanted, strict=True):
        if table.dim == 0:
            one.sub_(table.span[0])

    rows = [table.read(one, each).view(-1) for table, one, each in zip(tables, wanted, trains, strict=False)]
    flat = all_to_all(
        by_rank([split(one, sizes) for one, sizes in zip(rows, to_send, strict=True)]),
        axis, send=totals(to_send), receive=totals(to_receive), most=most_rows,
    )  # fmt: skip
    calls: list[TableCall] = []
    for place, blocks in enumerate(by_lookup(flat, to_receive)):
        columns = [one.view(-1, width) for one, width in zip(blocks, widths[place], strict=True)]
        leaf = torch.cat(columns, tables[place].dim or 0)
        calls.append(TableCall(leaf, wanted[place], send[place], receive[place]))
    return calls, most_rows


# Sizes and blocks are lists by lookup of lists by rank. A message is ordered by rank.


def totals(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the size of the message of each rank. sizes: by lookup and rank."""
    return [sum(one) for one in zip(*sizes, strict=True)]


def by_rank(blocks: Sequence[Sequence[Tensor]]) -> Tensor:
    """Concatenate blocks in order of ranks, and of lookups within a rank. blocks: by lookup and rank."""
    return torch.cat([one for parts in zip(*blocks, strict=True) for one in parts])


def by_lookup(message: Tensor, sizes: Sequence[Sequence[int]]) -> list[Sequence[Tensor]]:
    """Return views of the blocks of a message by lookup and rank. sizes: their sizes."""
    parts = split(message, [size for one in zip(*sizes, strict=True) for size in one])
    return [parts[place :: len(sizes)] for place in range(len(sizes))]


def _exchange_counts(tables: Sequence[Table], ids: Sequence[Tensor]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the numbers of ids requested from each rank and by each rank, by lookup and rank.

    The lookups are those that all ranks wait for.
    """
    axis, columns = tables[0].axis, list[Tensor]()
    for table, one in zip(tables, ids, strict=True):
        if table.dim == 0:
            # Ids are sorted and ranks hold ascending ranges, so the ids of each rank are consecutive.
            counts_R = torch.searchsorted(one, torch.tensor(table.starts, device=one.device)).diff()
        else:
            counts_R = one.new_full((axis.size,), one.numel())
        columns.append(torch.where(_is_outside(table, one), _REFUSED, counts_R).add_(1 + (table.tag << _COUNT_BITS)))
    sent_RP = F.pad(torch.stack(columns, 1), (0, _AT_ONCE - len(columns)))
    arrived_RP = all_to_all(sent_RP, axis)
    # The only wait for the device.
    sent, arrived = torch.stack([sent_RP, arrived_RP]).transpose(1, 2).tolist()
    common = next((place for place, one in enumerate(arrived) if not all(one)), _AT_ONCE)
    tables, ids = tables[:common], ids[:common]
    send, receive = ([_untagged(table, each[place]) for place, table in enumerate(tables)] for each in (sent, arrived))
    for place, (table, one) in enumerate(zip(tables, ids, strict=True)):
        if _REFUSED in send[place]:
            _refuse_own(table, one)
        if _REFUSED in receive[place]:
            rank = axis.ranks[receive[place].index(_REFUSED)]
            raise CommError(f"table {table.name!r}: rank {rank} has an id out of range. Its log names the id.")
    return send, receive


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


def _is_outside(table: Table, unique_U: Tensor) -> Tensor:
    """Return a 0-d bool: True if an id is not a row of the table."""
    return ((unique_U < 0) | (unique_U >= table.full_shape[0])).any()


def _refuse_own(table: Table, unique_U: Tensor) -> None:
    num_rows = table.full_shape[0]
    wrong = int(unique_U[(unique_U < 0) | (unique_U >= num_rows)][0])
    remedy = f"give the table {wrong + 1} rows" if wrong > 0 else "encode missing ids by a row of their own"
    raise ModelError(
        f"id {wrong}: table {table.name.rpartition('.')[0]!r} has {num_rows} rows. Use ids from 0 to "
        f"{num_rows - 1}, or {remedy}."
    )
