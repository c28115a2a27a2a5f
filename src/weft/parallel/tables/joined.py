"""Tables of one width in one tensor, so that a step reads, exchanges and updates all of them together.

A joined table has the rows of its members in order of the ranks that hold them, and of the members within a rank. R
ranks, T members, C columns of a rank's part. n ids of several lookups, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from weft.parallel.tables.table import Table

#: Most elements of a part that is joined with others, and of all parts of a joined table. Joining copies them.
_MOST_OF_ONE, _MOST = 2**26, 2**28


class JoinedTables:
    """Tables that are read and updated as one.

    Args:
        table: the table with the rows of all members. A single member is itself.
        members: its members.

    Attributes:
        spans: first row of each member in this rank's part of `table`, and its end.
    """

    def __init__(self, table: Table, members: Sequence[Table]):
        self.table, self.members = table, members
        sizes = [len(one.weight) for one in members]
        self.spans = list(pairwise(accumulate(sizes, initial=0)))
        self._places = {id(one): place for place, one in enumerate(members)}
        rows = [one.full_shape[0] for one in members]
        firsts = list(accumulate(rows, initial=0))
        device = table.weight.device if table.host is None else torch.device("cpu")
        self._limits, self._firsts = (torch.tensor(one, device=device) for one in (rows, firsts[:-1]))
        self._borders: Tensor | None = None
        self._shifts: Tensor | None = None
        if table.dim == 0 and len(members) > 1:
            starts, shifts = _pieces(members, firsts)
            self._borders, self._shifts = torch.tensor(starts, device=device), torch.tensor(shifts, device=device)

    @property
    def is_single(self) -> bool:
        """True if a table is read alone."""
        return len(self.members) == 1

    @property
    def padding(self) -> list[int]:
        """Rows at padding_idx in this rank's part, which are never trained."""
        own = [(one.padding, low) for one, (low, _) in zip(self.members, self.spans, strict=True)]
        return [row + low for row, low in own if row is not None]

    def rows_of(self, members: Sequence[Table], ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rows of `table` with some ids, (n,), and a 0-d bool: True if an id is not a row of its member.

        Args:
            members: the member of each lookup.
            ids: ids of each lookup, (number,).
        """
        flat = ids[0] if len(ids) == 1 else torch.cat(list(ids))
        if self.is_single:
            return flat, ((flat < 0) | (flat >= self.table.full_shape[0])).any()
        counts = torch.tensor([[self._places[id(one)], len(each)] for one, each in zip(members, ids, strict=True)])
        places = torch.repeat_interleave(*counts.to(flat.device).unbind(1), output_size=len(flat))
        outside = ((flat < 0) | (flat >= self._limits[places])).any()
        rows = flat + self._firsts[places]
        if self._borders is not None and self._shifts is not None:
            rows += self._shifts[torch.bucketize(rows, self._borders, right=True)]
        return rows, outside

    def gradient_of(self, member: Table) -> tuple[Tensor, Tensor] | None:
        """Return the rows of a member that the step read, and their gradients, or None without any."""
        rows, grads = self.table.rows, self.table.grads
        if rows is None or grads is None or self.is_single:
            return None if rows is None or grads is None else (rows, grads)
        low, high = self.spans[self._places[id(member)]]
        first, last = torch.searchsorted(rows, torch.tensor([low, high], device=rows.device)).tolist()
        return rows[first:last] - low, grads[first:last]


def _pieces(members: Sequence[Table], firsts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the borders between pieces, and what to add to the numbers of a piece's rows.

    A piece is the rows of one member on one rank. Rows are numbered by member first, and the result by rank first.
    """
    num_ranks = members[0].axis.size
    sizes = [[one.starts[rank + 1] - one.starts[rank] for rank in range(num_ranks)] for one in members]
    ends, shifts = list[int](), list[int]()
    for place, member in enumerate(members):
        for rank in range(num_ranks):
            before = sum(sum(one[:rank]) for one in sizes) + sum(one[rank] for one in sizes[:place])
            ends.append(firsts[place] + member.starts[rank + 1])
            shifts.append(before - firsts[place] - member.starts[rank])
    return ends[:-1], shifts


@torch.no_grad()
def join_tables(tables: Sequence[Table]) -> list[JoinedTables]:
    """Move tables of one width into common tensors, and set `joined` of each. Style host stays apart.

    The weights become views. Parts above 256 MiB of float32 stay apart, and a joined part has at most 1 GiB: the memory
    that this takes for a moment.
    """
    found = [_join(members) for members in _alike(tables)]
    for joined in found:
        for member in joined.members:
            member.joined = joined
    return found


def _alike(tables: Sequence[Table]) -> Iterator[list[Table]]:
    """Yield the tables in lists that can be joined, in order of their first ones. All ranks get the same lists."""
    groups: dict[object, list[Table]] = {}
    sizes: dict[object, int] = {}
    for table in tables:
        largest = max(table.full_shape[0] * table.columns_of(rank) for rank in range(max(1, len(table.starts) - 1)))
        key: object = (table.dim, table.full_shape[1], table.weight.dtype, table.compute, 0)
        if table.dim is None or table.host is not None or largest > _MOST_OF_ONE:
            key = table.name
        elif sizes.get(key, 0) + largest > _MOST:
            groups[table.name] = groups.pop(key)
            sizes.pop(key)
        groups.setdefault(key, []).append(table)
        sizes[key] = sizes.get(key, 0) + largest
    yield from groups.values()


def _join(members: list[Table]) -> JoinedTables:
    first = members[0]
    if len(members) == 1:
        return JoinedTables(first, members)
    num_ranks, width = first.axis.size, first.full_shape[1]
    part = first.weight.new_empty(sum(len(one.weight) for one in members), first.weight.shape[1])
    low = 0
    for one in members:
        view = part[low : low + len(one.weight)]
        low += len(one.weight)
        one.weight.data = view.copy_(one.weight)
    if first.dim == 0:
        sizes = [sum(one.starts[rank + 1] - one.starts[rank] for one in members) for rank in range(num_ranks)]
        starts = tuple(accumulate(sizes, initial=0))
    else:
        starts = first.starts
    style = "rows" if first.dim == 0 else first.style
    shape = (sum(one.full_shape[0] for one in members), width)
    names = f"{first.name} and {len(members) - 1} more"
    weight = nn.Parameter(part)
    table = Table(names, first.module, style, first.axis, starts, weight, shape, first.compute, first.queue)
    return JoinedTables(table, members)
