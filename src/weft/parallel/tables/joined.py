"""Tables of one width in one tensor, so that a step reads, exchanges and updates all of them together.

A joined table has the rows of its members in order of the ranks that hold them, and of the members within a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import nn

from weft.parallel.tables.table import JoinedTables, Table

#: Most elements of a part that is joined with others, and of all parts of a joined table. Joining copies them.
_MOST_OF_ONE, _MOST = 2**26, 2**28


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
