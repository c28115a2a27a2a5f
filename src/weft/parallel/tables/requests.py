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
from weft.comm.peer import all_to_all, largest_counts, start_all_to_all
from weft.comm.pending import Pending
from weft.errors import CommError, ModelError
from weft.parallel.tables.table import Lookup, TableCall, TableRequest
from weft.private_torch import split

#: Count that a rank sends to all others if its input has an id out of range.
_REFUSED = -1
#: Lookups that one exchange can join. A message has as many tags of lookups, and as many counts, padded with 0.
_AT_ONCE = 64

#: Numbers by request and rank.
Counts = list[list[int]]


@dataclass(slots=True, eq=False)
class Agreement:
    """The lookups that all ranks can make now.

    Attributes:
        lookups: the first lookups of this rank, as many as every rank has.
        requests: the same lookups by joined table.
        send, receive: numbers of ids that this rank requests from each rank, and that each requests from it.
        other: the first lookup for which another rank has another table, or None.
    """

    lookups: Sequence[Lookup]
    requests: list[TableRequest]
    send: Counts
    receive: Counts
    other: Lookup | None

    @property
    def is_refused(self) -> bool:
        """True if a rank has an id out of range; equal on all ranks."""
        return any(_REFUSED in one for one in (*self.send, *self.receive))


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
    agreed = agree_on_lookups(lookups, axis, lookups[0].ids.device)
    if agreed.other is not None:
        raise ModelError(
            f"table {agreed.other.table.name!r}: another rank looks up another table at this point of its forward. "
            "Call the same tables in the same order on all ranks, or leave the tables out of layout."
        )
    if agreed.is_refused:
        _refuse(agreed.lookups, axis)
    exchange = RowExchange(agreed, axis)
    message = exchange.message(exchange.wanted, agreed.receive)
    rows = exchange.start(message, agreed.receive, agreed.send).wait()
    return exchange.calls(exchange.received(rows, agreed.send)), exchange.most


class RowExchange:
    """The exchange of rows for lookups on which all ranks agree. The constructor exchanges ids.

    Args:
        agreed: lookups that are valid on all ranks. All ranks of the axis construct the object.

    Attributes:
        wanted: by request, the rows of this rank's part that ranks read, (M,), in order of the ranks.
        most_ids, most: maximum numbers of ids, and of elements of rows, that any rank sends to another.
    """

    def __init__(self, agreed: Agreement, axis: Axis):
        self.agreed, self._axis = agreed, axis
        requests, send, receive = agreed.requests, agreed.send, agreed.receive
        self._widths = [[one.table.columns_of(rank) for rank in range(axis.size)] for one in requests]
        self._own = [one[axis.rank] for one in self._widths]
        self.most_ids, self.most = largest_counts(
            (totals(send), totals(self._to_send(receive))), axis, requests[0].unique_U.device
        )
        message = by_rank([_for_ranks(one, counts) for one, counts in zip(requests, send, strict=True)])
        if all(one.table.full_shape[0] < 2**31 for one in requests):
            message = message.int()
        arrived = all_to_all(message, axis, send=totals(send), receive=totals(receive), most=self.most_ids)
        self.wanted = [joined_blocks(one).long() for one in by_lookup(arrived, receive)]
        for request, one in zip(requests, self.wanted, strict=True):
            if request.table.dim == 0:
                one.sub_(request.table.span[0])

    def _to_send(self, give: Counts) -> Counts:
        return [[count * width for count in one] for one, width in zip(give, self._own, strict=True)]

    def _to_receive(self, take: Counts) -> Counts:
        return [[c * width for c, width in zip(*one, strict=True)] for one in zip(take, self._widths, strict=True)]

    def message(self, rows: Sequence[Tensor], give: Counts) -> Tensor:
        """Return rows of this rank's part in one vector.

        Args:
            rows: by request, the rows to send, in order of the ranks.
            give: their number by request and rank.
        """
        to_send = self._to_send(give)
        values = [
            one.table.read(some, one.trains).view(-1) for one, some in zip(self.agreed.requests, rows, strict=True)
        ]
        return by_rank([split(one, sizes) for one, sizes in zip(values, to_send, strict=True)])

    def start(self, message: Tensor, give: Counts, take: Counts) -> Pending:
        """Begin to send rows. All ranks call it.

        Args:
            message: from `message`.
            give: number of its rows by request and rank.
            take: number of rows that arrive, by request and rank.
        """
        to_send, to_receive = self._to_send(give), self._to_receive(take)
        return start_all_to_all(message, self._axis, send=totals(to_send), receive=totals(to_receive), most=self.most)

    def received(self, message: Tensor, take: Counts) -> list[Tensor]:
        """Return the rows of a message by request, (number, D)."""
        found: list[Tensor] = []
        for place, blocks in enumerate(by_lookup(message, self._to_receive(take))):
            if self.agreed.requests[place].table.dim == 0:
                found.append(joined_blocks(blocks).view(-1, self._own[place]))
            else:
                parts = zip(blocks, self._widths[place], strict=True)
                found.append(torch.cat([one.view(-1, width) for one, width in parts], 1))
        return found

    def calls(self, rows: Sequence[Tensor]) -> list[tuple[TableRequest, TableCall]]:
        """Return the requests with their rows, (U, D) each."""
        agreed = self.agreed
        calls = map(TableCall, rows, self.wanted, agreed.send, agreed.receive)
        return list(zip(agreed.requests, calls, strict=True))


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


def agree_on_lookups(lookups: Sequence[Lookup], axis: Axis, device: torch.device) -> Agreement:
    """Find the first lookups that all ranks have, and exchange their numbers of ids. All ranks call it.

    Args:
        lookups: the lookups of this rank, of which at most 64 are considered. All over `axis`.
        axis: the data ranks.
        device: device of the ids.
    """
    lookups = lookups[:_AT_ONCE]
    while True:
        tags = [one.table.tag for one in lookups]
        requests = _requests(lookups)
        head = torch.tensor(tags + [0] * (_AT_ONCE - len(tags)), device=device).expand(axis.size, -1)
        tail = head.new_zeros(axis.size, _AT_ONCE)
        for place, one in enumerate(requests):
            tail[:, place] = _counts(one, axis)
        sent_RP = torch.cat([head, tail], 1)
        # The only wait for the device.
        sent, arrived = torch.stack([sent_RP, all_to_all(sent_RP, axis)]).tolist()
        waits = [sum(map(bool, one[:_AT_ONCE])) for one in arrived]
        common = min(waits)
        other = next((place for place in range(common) if any(one[place] != tags[place] for one in arrived)), None)
        if max(waits) == common or other is not None:
            break
        # Another rank waits for fewer lookups. All ranks count those again.
        lookups = lookups[:common]
    send, receive = (
        [[one[_AT_ONCE + place] for one in each] for place in range(len(requests))] for each in (sent, arrived)
    )
    return Agreement(lookups, requests, send, receive, None if other is None else lookups[other])


def _counts(request: TableRequest, axis: Axis) -> Tensor:
    """Return the number of ids for each rank, (R,), or a refusal."""
    unique_U, table = request.unique_U, request.table
    if table.dim == 0:
        counts_R = torch.searchsorted(unique_U, torch.tensor(table.starts, device=unique_U.device)).diff()
    else:
        counts_R = unique_U.new_full((axis.size,), unique_U.numel())
    return torch.where(request.is_outside, _REFUSED, counts_R)


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
