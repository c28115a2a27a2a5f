"""Prefetch of rows: those that the next microbatch looks up are sent under this one's backward.

The next ids are the parts of the next microbatch where this one has the ids of its lookups. Rows that the step changes
are sent after its update, so no row is sent twice. Prefetched rows are used only if the lookups of all ranks are the
expected ones and no sent row has changed; otherwise they are fetched again. Letters as in `requests.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Axis
from weft.comm.peer import all_to_all
from weft.data.batches import tensors_in
from weft.errors import ModelError
from weft.parallel.tables.lookup import fetch_rest
from weft.parallel.tables.requests import (
    Counts,
    RowExchange,
    agree_on_lookups,
    by_lookup,
    by_rank,
    joined_blocks,
    totals,
)
from weft.parallel.tables.table import Lookup, LookupQueue, TableCall, TableRequest
from weft.private_torch import split

# The lookups of the next microbatch.


def next_lookups(first: Sequence[Lookup], batch: Any, following: Any) -> list[Lookup]:
    """Return lookups in the next microbatch that are like the first ones of this one, or [] if they are unknown.

    Args:
        first: lookups of this microbatch.
        batch: this microbatch.
        following: the next one, or None.
    """
    tensors, others = list(tensors_in(batch)), list(tensors_in(following))
    if len(tensors) != len(others) or any(type(one) is not Tensor for one in (*tensors, *others)):
        return []
    found: list[Lookup] = []
    for one in first:
        inputs = [None if each is None else same_place(each, tensors, others) for each in one.inputs]
        if [each is None for each in inputs] != [each is None for each in one.inputs]:
            return []
        try:
            ids = one.ids_of(*inputs)
        except ModelError:  # the lookup itself will raise it
            return []
        found.append(Lookup(one.table, ids, (), None, one.trains, one.inputs, one.ids_of))
    return found


def same_place(tensor: Tensor, batch: Sequence[Tensor], following: Sequence[Tensor]) -> Tensor | None:
    """Return the part of `following` that is where `tensor` is in `batch`, or None if it is no such part.

    A part is a full tensor, perhaps in one dim, or a view of all its rows such as `ids[:, 2]`.
    """
    for source, target in zip(batch, following, strict=True):
        if tensor.dtype != source.dtype or target.dtype != source.dtype or not source.ndim:
            continue
        if any(one.layout is not torch.strided for one in (tensor, source, target)):  # sparse ones have no storage
            continue
        offset = tensor.storage_offset() - source.storage_offset()
        if tensor.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
            continue
        if not offset and tensor.numel() == source.numel() and tensor.is_contiguous() and source.is_contiguous():
            return target if tensor.shape == source.shape else target.reshape(-1)
        has_same_rows = source.shape[1:] == target.shape[1:] and source.stride() == target.stride()
        has_all_rows = tensor.ndim and tensor.shape[0] == source.shape[0] and tensor.stride(0) == source.stride(0)
        if not (has_same_rows and has_all_rows and len(target)):
            continue
        shape, start = (len(target), *tensor.shape[1:]), target.storage_offset() + offset
        last = start + sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
        if start >= 0 and last * target.element_size() < target.untyped_storage().nbytes():
            return target.as_strided(shape, tensor.stride(), start)
    return None


# The exchange.


class RowPrefetch:
    """Rows in flight for the next lookups. All ranks construct it.

    Args:
        exchange: the ids of the lookups.
        axis: the data ranks.
        changes: True if the step ends before the lookups. Rows that its lookups so far read are then sent later.
    """

    def __init__(self, exchange: RowExchange, axis: Axis, changes: bool):
        self._exchange, self._axis = exchange, axis
        self._late = _LateRows(exchange, axis) if changes else None
        self._early = exchange.wanted if self._late is None else self._late.others
        self._give, self._take = _counts_of(exchange, self._late)
        self._sent = exchange.message(self._early, self._give)
        self._rows = exchange.start(self._sent, self._give, self._take)

    @property
    def most(self) -> int:
        """Maximum number of elements of rows that any rank sends to another."""
        return self._exchange.most

    def _is_stale(self) -> Tensor:
        """Return True, 0-d, if a row has changed since it was sent.

        Version counters miss changes by `weight.data`.
        """
        now = self._exchange.message(self._early, self._give)
        return (now.view(torch.int32) != self._sent.view(torch.int32)).any()  # bits, as NaN is not equal to itself

    def calls(self, waiting: Sequence[Lookup]) -> list[tuple[TableRequest, TableCall]] | None:
        """Return the requests with their rows, or None if the rows must be fetched again. All ranks call it.

        waiting: the lookups of this rank that wait for rows.
        """
        planned, is_other = self._exchange.agreed.lookups, self._is_stale()
        lookups = waiting[: len(planned)]
        if [_kind(one) for one in planned] == [_kind(one) for one in lookups]:
            ids, others = ([one.ids for one in each] for each in (planned, lookups))
            is_other = is_other | (torch.cat(ids) != torch.cat(others)).any()
        else:
            is_other = torch.ones_like(is_other)
        arrived = self._rows.wait()
        if bool(all_reduce(is_other.int().view(1), self._axis, op="max")):
            return None
        actual = {id(one): other for one, other in zip(planned, lookups, strict=True)}
        for request in self._exchange.agreed.requests:
            request.lookups = [actual[id(one)] for one in request.lookups]
        late, exchange = self._late, self._exchange
        found = exchange.received(arrived, self._take)
        return exchange.calls(found if late is None else late.added_to(found))


def _kind(lookup: Lookup) -> tuple[int, int, bool]:
    return id(lookup.table), len(lookup.ids), lookup.trains


def _counts_of(exchange: RowExchange, late: _LateRows | None) -> tuple[Counts, Counts]:
    """Return the numbers of rows that this rank sends and receives before the update."""
    agreed = exchange.agreed
    if late is None:
        return agreed.receive, agreed.send
    return _less(agreed.receive, late.give), _less(agreed.send, late.take)


def _less(counts: Counts, others: Counts) -> Counts:
    return [[one - other for one, other in zip(*each, strict=True)] for each in zip(counts, others, strict=True)]


class _LateRows:
    """Rows that a step changes, which are sent after its update. All ranks construct it.

    Attributes:
        give, take: numbers of such rows that this rank sends and receives.
        others: by request, the rows of this rank's part that are sent before.
    """

    def __init__(self, exchange: RowExchange, axis: Axis):
        self._exchange, requests = exchange, exchange.agreed.requests
        send, receive, every = exchange.agreed.send, exchange.agreed.receive, exchange.wanted
        changed = [[call.wanted for call in one.table.calls] for one in requests]
        late_here = [
            torch.isin(wanted, torch.cat([wanted[:0], *some])).byte()
            for wanted, some in zip(every, changed, strict=True)
        ]
        message = by_rank([split(one, sizes) for one, sizes in zip(late_here, receive, strict=True)])
        arrived = all_to_all(message, axis, send=totals(receive), receive=totals(send), most=exchange.most_ids)
        blocks = list(zip(requests, by_lookup(arrived, send), strict=True))
        # Every rank has columns of all rows, so the answers of ranks are equal.
        late = [joined_blocks(some) if one.table.dim == 0 else some[0] for one, some in blocks]
        counts = [_count_by_rank(*each) for each in zip(late_here, receive, strict=True)]
        counts += [
            _count_by_rank(mask, sizes) if one.table.dim == 0 else mask.sum().expand(axis.size)
            for one, mask, sizes in zip(requests, late, send, strict=True)
        ]
        numbers: Counts = torch.stack(counts).tolist()
        self.give, self.take = numbers[: len(requests)], numbers[len(requests) :]
        self._order = [one.argsort(stable=True) for one in late]  # the late ones are last
        sizes = [[len(wanted) - sum(some), sum(some)] for wanted, some in zip(every, self.give, strict=True)]
        ordered = [wanted[one.argsort(stable=True)] for wanted, one in zip(every, late_here, strict=True)]
        parts = [split(one, some) for one, some in zip(ordered, sizes, strict=True)]
        self.others, self._rows = [one for one, _ in parts], [one for _, one in parts]

    def added_to(self, others: Sequence[Tensor]) -> list[Tensor]:
        """Exchange these rows, and return all rows by request, (U, D). All ranks call it.

        others: by request, the rows that were sent before.
        """
        message = self._exchange.message(self._rows, self.give)
        arrived = self._exchange.start(message, self.give, self.take).wait()
        found: list[Tensor] = []
        for order, *parts in zip(self._order, others, self._exchange.received(arrived, self.take), strict=True):
            both = torch.cat(parts)
            found.append(torch.empty_like(both).index_copy_(0, order, both))
        return found


def _count_by_rank(mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the number of ones in each part of a mask, (R,). sizes: sizes of the parts."""
    ends = torch.tensor(list(accumulate(sizes, initial=0)), device=mask.device)
    return F.pad(mask.cumsum(0), (1, 0))[ends].diff()


class Prefetcher:
    """Prefetches rows of one model's tables. All ranks make the same calls.

    Args:
        queue: lookups of the tables.
        axis: the data ranks.
        device: device of the ids.
    """

    def __init__(self, queue: LookupQueue, axis: Axis, device: torch.device):
        self._queue, self._axis, self._device = queue, axis, device
        self._next: RowPrefetch | None = None
        self._is_last = False

    def begin_microbatch(self, last: bool) -> None:
        """Let the lookups of a microbatch use the rows in flight. last: True for the last microbatch of a step."""
        self._is_last, self._queue.prefetch, self._next = last, self._next, None

    def start(self, microbatch: Any, following: Any) -> None:
        """Begin to fetch the rows of the next microbatch. Call it after forward.

        It does nothing if ranks expect different lookups, or invalid ones, for which the lookup raises the error.

        Args:
            microbatch: this microbatch.
            following: the next one, or None.
        """
        fetch_rest(self._queue)
        lookups = next_lookups(self._queue.first, microbatch, following)
        agreed = agree_on_lookups(lookups, self._axis, self._device)
        if agreed.requests and agreed.other is None and not agreed.is_refused:
            self._next = RowPrefetch(RowExchange(agreed, self._axis), self._axis, self._is_last)
