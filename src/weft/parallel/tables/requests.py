"""Joint exchange of several lookups: one all_to_all of counts, one of ids and one of rows for all tables.

P lookups, G joined tables, R ranks, n ids of lookups of a joined table, U unique ids of them, M ids that arrived at a
rank, C columns of a rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.mesh import Axis
from weft.comm.peer import all_to_all, largest_counts
from weft.errors import CommError, ModelError
from weft.parallel.tables.table import JoinedTables, Lookup, Table, TableCall
from weft.private_torch import split

#: Count that a rank sends to all others if its input has an id out of range.
_REFUSED = -1
#: Lookups that one exchange can join. A message has as many tags of lookups, and as many counts, padded with 0.
_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class TableRequest:
    """The lookups of one joined table.

    Attributes:
        joined: the tables.
        lookups: lookups of its members, in order of the calls.
        unique_U: the unique rows of the joined table that they read, ascending.
        index: position of each id in `unique_U`, (n,), one lookup after another.
        is_outside: 0-d bool: True if an id is not a row of its table.
    """

    joined: JoinedTables
    lookups: list[Lookup]
    unique_U: Tensor
    index: Tensor
    is_outside: Tensor

    @property
    def table(self) -> Table:
        """The joined table."""
        return self.joined.table

    @property
    def trains(self) -> bool:
        """True if a lookup has gradients."""
        return any(one.trains for one in self.lookups)


def _requests(lookups: Sequence[Lookup]) -> list[TableRequest]:
    """Return the lookups by joined table, in order of the first lookup of each."""
    members: dict[int, list[Lookup]] = {}
    for one in lookups:
        members.setdefault(id(one.table.all_joined), []).append(one)
    found: list[TableRequest] = []
    for some in members.values():
        joined = some[0].table.all_joined
        rows, is_outside = joined.rows_of([one.table for one in some], [one.ids for one in some])
        unique_U, index = rows.unique(return_inverse=True)
        found.append(TableRequest(joined, some, unique_U, index, is_outside))
    return found


@torch.no_grad()
def request_local(lookup: Lookup) -> tuple[TableRequest, TableCall]:
    """Look up ids in a replicated table. Raises ModelError for an id out of range."""
    request = _requests([lookup])[0]
    if bool(request.is_outside):
        _refuse_own(lookup)
    return request, TableCall(request.table.read(request.unique_U, False), request.unique_U, [], [])


@torch.no_grad()
def request_rows(lookups: Sequence[Lookup]) -> tuple[list[tuple[TableRequest, TableCall]], int]:
    """Fetch the rows of waiting lookups from the ranks that hold them. All ranks of the axis call it.

    It fetches as many as every rank waits for. A rank whose forward uses the first rows earlier waits for fewer.

    Args:
        lookups: all over one axis. No table is replicated.

    Returns:
        The requests of the first lookups, at least one, and the most elements of rows that any rank sends to another.

    Raises:
        ModelError: for an id out of range, or if ranks look up different tables.
        CommError: if another rank has an id out of range.
    """
    axis = lookups[0].table.axis
    requests, send, receive = _agree(lookups[:_AT_ONCE], axis)
    widths = [[one.table.columns_of(rank) for rank in range(axis.size)] for one in requests]
    own = [one[axis.rank] for one in widths]
    to_send = [[count * width for count in one] for one, width in zip(receive, own, strict=True)]
    to_receive = [[c * width for c, width in zip(*one, strict=True)] for one in zip(send, widths, strict=True)]
    most_ids, most_rows = largest_counts((totals(send), totals(to_send)), axis, requests[0].unique_U.device)

    message = by_rank([_for_ranks(one, counts) for one, counts in zip(requests, send, strict=True)])
    if all(one.table.full_shape[0] < 2**31 for one in requests):
        message = message.int()
    arrived = all_to_all(message, axis, send=totals(send), receive=totals(receive), most=most_ids)
    wanted = [joined_blocks(one).long() for one in by_lookup(arrived, receive)]
    for request, one in zip(requests, wanted, strict=True):
        if request.table.dim == 0:
            one.sub_(request.table.span[0])

    rows = [one.table.read(ids, one.trains).view(-1) for one, ids in zip(requests, wanted, strict=True)]
    flat = all_to_all(
        by_rank([split(one, sizes) for one, sizes in zip(rows, to_send, strict=True)]),
        axis, send=totals(to_send), receive=totals(to_receive), most=most_rows,
    )  # fmt: skip
    found: list[tuple[TableRequest, TableCall]] = []
    for place, (request, blocks) in enumerate(zip(requests, by_lookup(flat, to_receive), strict=True)):
        if request.table.dim == 0:
            leaf = joined_blocks(blocks).view(-1, own[place])
        else:
            leaf = torch.cat([one.view(-1, width) for one, width in zip(blocks, widths[place], strict=True)], 1)
        found.append((request, TableCall(leaf, wanted[place], send[place], receive[place])))
    return found, most_rows


def _for_ranks(request: TableRequest, counts: list[int]) -> Sequence[Tensor]:
    """Return the rows to request from each rank, which are consecutive. Every rank has columns of all rows."""
    return split(request.unique_U, counts) if request.table.dim == 0 else [request.unique_U] * len(counts)


# Sizes and blocks are lists by request of lists by rank. A message is ordered by rank.


def totals(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the size of the message of each rank. sizes: by request and rank."""
    return [sum(one) for one in zip(*sizes, strict=True)]


def by_rank(blocks: Sequence[Sequence[Tensor]]) -> Tensor:
    """Concatenate blocks in order of ranks, and of requests within a rank. blocks: by request and rank."""
    return joined_blocks([one for parts in zip(*blocks, strict=True) for one in parts])


def by_lookup(message: Tensor, sizes: Sequence[Sequence[int]]) -> list[Sequence[Tensor]]:
    """Return views of the blocks of a message by request and rank. sizes: their sizes."""
    parts = split(message, [size for one in zip(*sizes, strict=True) for size in one])
    return [parts[place :: len(sizes)] for place in range(len(sizes))]


def joined_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """Return vectors one after another: a view if they are consecutive parts of one tensor, else a copy."""
    filled = [one for one in blocks if one.numel()]
    if len(filled) < 2:
        return filled[0] if filled else blocks[0]
    storage, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for one in filled:
        if one.data_ptr() != end or one.untyped_storage().data_ptr() != storage or not one.is_contiguous():
            return torch.cat(filled)
        end += one.numel() * one.element_size()
    return filled[0].as_strided((sum(one.numel() for one in filled),), (1,))


def _agree(lookups: Sequence[Lookup], axis: Axis) -> tuple[list[TableRequest], list[list[int]], list[list[int]]]:
    """Return the requests of the lookups that all ranks wait for, and what each rank sends and receives.

    The counts of ids, requested from each rank and by each rank, are lists by request of lists by rank.
    """
    tags = [one.table.tag for one in lookups]
    while True:
        requests = _requests(lookups)
        counts = [_counts(one, axis) for one in requests]
        head = torch.tensor(tags + [0] * (_AT_ONCE - len(tags)), device=lookups[0].ids.device).expand(axis.size, -1)
        tail = torch.stack(counts, 1)
        sent_RP = torch.cat([head, tail, tail.new_zeros(axis.size, _AT_ONCE - len(counts))], 1)
        arrived_RP = all_to_all(sent_RP, axis)
        # The only wait for the device.
        sent, arrived = torch.stack([sent_RP, arrived_RP]).tolist()
        waits = [sum(map(bool, one[:_AT_ONCE])) for one in arrived]
        common = min(waits)
        _expect_same(lookups[:common], tags[:common], [one[:common] for one in arrived])
        if max(waits) == common:
            break
        # Another rank waits for fewer lookups. All ranks count those again.
        lookups, tags = lookups[:common], tags[:common]
    send, receive = (
        [[one[_AT_ONCE + place] for one in each] for place in range(len(requests))] for each in (sent, arrived)
    )
    if any(_REFUSED in one for one in (*send, *receive)):
        _refuse(lookups, axis)
    return requests, send, receive


def _counts(request: TableRequest, axis: Axis) -> Tensor:
    """Return the number of ids for each rank, (R,), or a refusal."""
    unique_U, table = request.unique_U, request.table
    if table.dim == 0:
        counts_R = torch.searchsorted(unique_U, torch.tensor(table.starts, device=unique_U.device)).diff()
    else:
        counts_R = unique_U.new_full((axis.size,), unique_U.numel())
    return torch.where(request.is_outside, _REFUSED, counts_R)


def _expect_same(lookups: Sequence[Lookup], tags: Sequence[int], others: Sequence[Sequence[int]]) -> None:
    """Raise ModelError, on all ranks, if the ranks look up different tables."""
    for place, one in enumerate(lookups):
        if any(other[place] != tags[place] for other in others):
            raise ModelError(
                f"table {one.table.name!r}: another rank looks up another table at this point of its forward. Call the "
                "same tables in the same order on all ranks, or leave the tables out of layout."
            )


def _refuse(lookups: Sequence[Lookup], axis: Axis) -> None:
    """Raise the error for the first lookup with an id out of range. All ranks call it if one of them has such an id."""
    flags = [int(_wrong_ids(one).numel() > 0) for one in lookups]
    device = lookups[0].ids.device
    found = all_to_all(torch.tensor(flags, device=device).expand(axis.size, -1).contiguous(), axis).tolist()
    for place, lookup in enumerate(lookups):
        if flags[place]:
            _refuse_own(lookup)
        for rank, one in zip(axis.ranks, found, strict=True):
            if one[place]:
                name = lookup.table.name
                raise CommError(f"table {name!r}: rank {rank} has an id out of range. Its log names the id.")


def _wrong_ids(lookup: Lookup) -> Tensor:
    return lookup.ids[(lookup.ids < 0) | (lookup.ids >= lookup.table.full_shape[0])]


def _refuse_own(lookup: Lookup) -> None:
    num_rows, wrong = lookup.table.full_shape[0], int(_wrong_ids(lookup).min())
    remedy = f"give the table {wrong + 1} rows" if wrong > 0 else "encode missing ids by a row of their own"
    raise ModelError(
        f"id {wrong}: table {lookup.table.name.rpartition('.')[0]!r} has {num_rows} rows. Use ids from 0 to "
        f"{num_rows - 1}, or {remedy}."
    )
