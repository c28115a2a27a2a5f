"""One embedding table of which each data rank holds some rows or columns.

N rows and D columns of the full table, C columns of a rank's part, R ranks, U unique ids of a lookup, n ids of several.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from weft.checkpoint.read import OwnershipMap, Part, assign_evenly
from weft.comm.collectives import broadcast
from weft.comm.mesh import Axis
from weft.errors import ModelError
from weft.optim.table_optimizer import TableOptimizer
from weft.parallel.state.flat_slices import FlatSlice
from weft.parallel.state.placement import AxisMap
from weft.parallel.tables.host import CachedRows, TableSettings

#: Elements per broadcast of the first rank's values.
_AT_ONCE = 2**22


@dataclass(slots=True)
class TableCall:
    """One lookup in a step whose gradient is pending.

    Attributes:
        leaf: rows of the unique ids, (U, D), a leaf of autograd. None once its gradient is taken.
        wanted: rows of this rank's part that ranks requested, in order of the ranks. For style replicate, the unique
            ids.
        send, receive: number of ids requested from each rank, and by each rank.
        grad: gradient of `leaf`, (U, D).
    """

    leaf: Tensor | None
    wanted: Tensor
    send: list[int]
    receive: list[int]
    grad: Tensor | None = None

    def take_gradient(self) -> None:
        """Move the gradient out of the leaf. A lookup that the loss does not depend on has a zero gradient."""
        if self.leaf is not None:
            self.grad = torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad
            self.leaf = None


@dataclass(slots=True, eq=False)
class Bags:
    """How the rows of a lookup are pooled.

    Attributes:
        starts: position of the first id of each bag, (B,).
        mode: "sum", "mean" or "max".
        weights: factor of each row, (n,), or None.
    """

    starts: Tensor
    mode: str
    weights: Tensor | None


@dataclass(slots=True, eq=False)
class Lookup:
    """One call of a table's module, whose rows are fetched when its result is used.

    Attributes:
        table: the table.
        ids: the ids, (n,).
        shape: shape of the result.
        bag: bags that are pooled, or None for one row per id.
        trains: True if the result has gradients.
        inputs: tensors that the module was called with and that determine the ids.
        ids_of: returns the ids, copied, of a call with other inputs. Raises ModelError for invalid ones.
        rows_UD: rows of the unique ids of all lookups that were fetched together, or None until then.
        index: position of each id in `rows_UD`, (n,), or None until then.
        result: the module's result, or None until the rows are fetched.
        placeholder: the tensor that the module returned, or None if it returned `result`.
    """

    table: Table
    ids: Tensor
    shape: tuple[int, ...]
    bag: Bags | None
    trains: bool
    inputs: tuple[Tensor | None, ...]
    ids_of: Callable[..., Tensor]
    rows_UD: Tensor | None = None
    index: Tensor | None = None
    result: Tensor | None = None
    placeholder: Tensor | None = None


class PrefetchedRows(Protocol):
    """Rows in flight for the next lookups."""

    @property
    def most(self) -> int:
        """Maximum number of elements of rows that any rank sends to another."""
        ...

    def calls(self, waiting: Sequence[Lookup]) -> list[tuple[TableRequest, TableCall]] | None:
        """Return the requests of the first waiting lookups with their rows, or None if they must be fetched again.

        All ranks call it.
        """
        ...


@dataclass(slots=True, eq=False)
class LookupQueue:
    """Lookups of all tables of a model.

    Attributes:
        is_open: True in a microbatch of a train step, in which lookups may have gradients.
        waiting: lookups whose rows are not fetched yet, in order of the calls.
        deferred: lookups of the microbatch that returned a placeholder.
        most: maximum number of elements of gradients that any rank sends to another after the microbatches so far.
        prefetches: True if the rows of the next microbatch are fetched under this one's backward.
        first: lookups of the microbatch whose rows were fetched first, if it prefetches.
        prefetch: rows in flight for the microbatch's first lookups, or None.
    """

    is_open: bool = False
    waiting: list[Lookup] = field(default_factory=list[Lookup])
    deferred: list[Lookup] = field(default_factory=list[Lookup])
    most: int = 0
    prefetches: bool = False
    first: list[Lookup] = field(default_factory=list[Lookup])
    prefetch: PrefetchedRows | None = None


@dataclass(slots=True, eq=False)
class Table:
    """One table, sharded over the data ranks.

    Attributes:
        name: name of the weight in the model.
        module: the nn.Embedding or nn.EmbeddingBag.
        style: "rows", "columns", "one", "host" or "replicate".
        axis: the data ranks.
        starts: first row or column of each rank's part, and the end of the last; () for style replicate.
        weight: this rank's part, (rows, C).
        full_shape: (N, D).
        compute: dtype of the lookup's result.
        queue: lookups of all tables of the model.
        host: settings of style host, or None for other styles.
        why: reason of the style.
        cache: for style host, the cache of rows. None for other styles, and until `open_cache`.
        joined: the tables that are read and updated together with this one, from `join_tables`.
        calls: lookups of the current step.
        rows, grads: after `exchange_gradients`, rows of this rank's part that the step read, and their gradients.
    """

    name: str
    module: nn.Module
    style: str
    axis: Axis
    starts: tuple[int, ...]
    weight: nn.Parameter
    full_shape: tuple[int, int]
    compute: torch.dtype
    queue: LookupQueue
    host: TableSettings | None = None
    why: str = ""
    cache: CachedRows | None = None
    joined: JoinedTables | None = None
    calls: list[TableCall] = field(default_factory=list[TableCall])
    rows: Tensor | None = None
    grads: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy()

    def __reduce__(self) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise ModelError(
            f"table {self.name!r}: each rank holds a part of it, so the model cannot be copied or pickled. Use "
            "run.full_state_dict(model) for full tensors."
        )

    @property
    def all_joined(self) -> JoinedTables:
        """The tables that are read and updated together with this one."""
        assert self.joined is not None, "join_tables sets it"
        return self.joined

    @property
    def tag(self) -> int:
        """A number from 1 to 2**22 - 1 from the name, by which ranks notice that they look up different tables."""
        return zlib.crc32(self.name.encode()) & (2**22 - 1) or 1

    @property
    def dim(self) -> int | None:
        """The sharded dim: 0 for styles rows, host and one, 1 for columns, None for replicate."""
        return {"columns": 1, "replicate": None}.get(self.style, 0)

    @property
    def is_part(self) -> bool:
        """True if the weight of a rank is not the full table."""
        return self.dim is not None and self.axis.size > 1

    @property
    def held(self) -> Tensor | None:
        """The module's weight."""
        return dict(self.module.named_parameters(recurse=False)).get("weight")

    @property
    def span(self) -> tuple[int, int]:
        """First row or column of this rank's part, and its end; all rows for style replicate."""
        if self.dim is None:
            return 0, self.full_shape[0]
        return self.starts[self.axis.rank], self.starts[self.axis.rank + 1]

    def columns_of(self, rank: int) -> int:
        """Return the number of columns that a rank holds."""
        return self.starts[rank + 1] - self.starts[rank] if self.dim == 1 else self.full_shape[1]

    @property
    def padding(self) -> int | None:
        """The row at padding_idx in this rank's part, which is never trained, or None."""
        index: int | None = getattr(self.module, "padding_idx", None)
        if index is None or self.dim != 0:
            return index
        low, high = self.span
        return index - low if low <= index < high else None

    # --- values ---

    def read(self, rows: Tensor, trains: bool) -> Tensor:
        """Return rows of this rank's part, (M, C).

        Args:
            rows: their indices, (M,).
            trains: True if the step will change them, so that a cache should hold them.
        """
        if self.cache is not None:
            return self.cache.read(rows, trains)
        return self.weight.detach().index_select(0, rows)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for this rank's part or a state, on the device, or on the host for style host."""
        if self.host is not None:
            return self.host.zeros(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def states(self, rule: TableOptimizer) -> dict[str, Tensor]:
        """Return the initial states of the weight's optimizer by name."""
        weight = self.weight.detach()
        if self.host is None:
            return rule.states(weight)
        # Zeros, as for all rules. A mapped file has them without being written.
        found = rule.states(weight.new_empty(0, *weight.shape[1:]))
        states = {key: self.host.zeros((len(weight), *one.shape[1:]), one.dtype) for key, one in found.items()}
        if self.cache is not None:
            self.cache.add(*states.values())
        return states

    def open_cache(self, device: torch.device) -> None:
        """Create the cache of style host, once the weight has its values."""
        if self.host is not None:
            self.cache = CachedRows(self.weight.detach(), self.host.cache, device)

    def flush(self) -> None:
        """Make the weight and its states current in host memory."""
        if self.cache is not None:
            self.cache.flush()

    def part_of(self, full: Tensor) -> Tensor:
        """Return a view of this rank's part of a full tensor."""
        if self.dim is None:
            return full
        low, high = self.span
        return full.narrow(self.dim, low, high - low)

    @torch.no_grad()
    def first_ranks_part(self, full: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return this rank's part of the first rank's values, because ranks may have built different ones.

        Args:
            full: the full table of this rank.
            dtype: dtype of the result.
            device: device of the result.
        """
        part = self.part_of(full)
        kept = self.empty(part.shape, dtype, device)
        step, (low, high) = max(1, _AT_ONCE // self.full_shape[1]), self.span
        for start in range(0, self.full_shape[0], step):
            stop = min(start + step, self.full_shape[0])
            block = full[start:stop].detach().to(device=device, dtype=dtype, copy=True).contiguous()
            broadcast(block, self.axis)
            if self.dim != 0:
                kept[start:stop] = self.part_of(block) if self.dim == 1 else block
            elif max(low, start) < min(high, stop):
                first, last = max(low, start), min(high, stop)
                kept[first - low : last - low] = block[first - start : last - start]
        return kept

    @torch.no_grad()
    def full(self, part: Tensor) -> Tensor:
        """Return the full tensor from the parts of all ranks. All ranks call it.

        Args:
            part: this rank's part, of the weight's shape.
        """
        if self.dim is None:
            return part.detach()
        self.flush()
        whole = part.new_empty(self.full_shape)
        for rank in range(self.axis.size):
            size = self.starts[rank + 1] - self.starts[rank]
            shape = (size, self.full_shape[1]) if self.dim == 0 else (self.full_shape[0], size)
            block = part.detach().contiguous() if rank == self.axis.rank else part.new_empty(shape)
            whole.narrow(self.dim, self.starts[rank], size).copy_(broadcast(block, self.axis, rank))
        return whole

    def dense_gradient(self) -> Tensor:
        """Return the gradient of this rank's part with zeros for rows that the step did not read."""
        dense, found = torch.zeros_like(self.weight), self.all_joined.gradient_of(self)
        if found is None:
            return dense
        rows, grads = found
        return dense.index_add_(0, rows.to(dense.device), grads.to(dense.device))

    # --- checkpoints ---

    def slice_of(self, name: str, value: Tensor, axes: AxisMap) -> Iterator[FlatSlice]:
        """Yield the flat slice of the weight's part or of one of its states, if it has elements.

        Args:
            name: name in checkpoints.
            value: tensor of the part's shape, or with one number per row of the part.
            axes: the axes of the model.
        """
        rank, ranks = axes.mesh.rank, self.axis.ranks
        shape = self.full_shape[: value.ndim]
        if self.dim is None or self.dim >= value.ndim:  # equal on all ranks
            deal = assign_evenly(ranks, value.numel(), len(ranks), turn=axes.turn(name))
            yield FlatSlice(name, Part(shape), deal, 0, value.detach().view(-1))
        elif value.numel():
            part = Part(shape, self.dim, (self.span,))
            yield FlatSlice(name, part, OwnershipMap.to_one(rank, value.numel()), 0, value.detach().view(-1))


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


def starts_of(style: str, shape: tuple[int, int], num_ranks: int, owner: int) -> tuple[int, ...]:
    """Return the first row or column of each rank's part, and the end of the last.

    Args:
        shape: shape of the full table.
        owner: the rank that holds a table of style "one".
    """
    match style:
        case "replicate":
            return ()
        case "one":
            return tuple(0 if rank <= owner else shape[0] for rank in range(num_ranks + 1))
        case _:
            size = shape[1] if style == "columns" else shape[0]
            return tuple(size * rank // num_ranks for rank in range(num_ranks + 1))
