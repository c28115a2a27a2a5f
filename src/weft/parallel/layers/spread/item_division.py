"""How the items of one call lie over ranks: which are this rank's, and the ways there and home.

Ranks that share items: each data rank's `per_home` ranks of tp, which hold the same batch, and with `spread:data` those
of all data ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from weft.comm.autograd import exchange, gather_slice
from weft.errors import LayoutError
from weft.mesh import Axis
from weft.parallel.layers.spread.items import Items, take


@dataclass(frozen=True, slots=True)
class Ranks:
    """The axes that share items. data: of size 1 where items stay with their data rank."""

    data: Axis
    tp: Axis

    @property
    def per_home(self) -> int:
        """Ranks that hold the same batch."""
        return self.tp.size

    @property
    def place(self) -> int:
        """This rank's place among them."""
        return self.tp.rank


@dataclass(frozen=True)
class Division:
    """One call's items over ranks.

    ranks: that share. rows: of each item of all data ranks, in order of these. homes: each item's data rank. dealt: the
    items of each rank.
    """

    ranks: Ranks
    rows: tuple[int, ...]
    homes: tuple[int, ...]
    dealt: list[list[int]]

    @cached_property
    def own(self) -> list[int]:
        """Items that this rank computes."""
        return self.dealt[self.ranks.data.rank * self.ranks.per_home + self.ranks.place]

    @cached_property
    def _first(self) -> int:
        """Number of this data rank's first item."""
        return sum(home < self.ranks.data.rank for home in self.homes)

    def _at(self, data_rank: int, place: int, home: int) -> list[int]:
        """Items of a home that a rank computes."""
        return [item for item in self.dealt[data_rank * self.ranks.per_home + place] if self.homes[item] == home]

    @cached_property
    def _sent(self) -> list[list[int]]:
        """Of this data rank's items, those that each data rank computes on the rank in this one's place."""
        data, place = self.ranks.data, self.ranks.place
        return [self._at(rank, place, data.rank) for rank in range(data.size)]

    @cached_property
    def _received(self) -> list[list[int]]:
        """Of the items that this rank computes, those of each data rank."""
        data, place = self.ranks.data, self.ranks.place
        return [self._at(data.rank, place, home) for home in range(data.size)]

    def bring(self, items: Items, place: int) -> Tensor:
        """Return the rows of this rank's items in a leaf of the call. A collective over `data`."""
        leaf, sizes = items.leaves[place], items.sizes(place)
        if self.ranks.data.size == 1:
            return take(leaf, sizes, self.own)
        chosen = [item - self._first for part in self._sent for item in part]
        every = self.rows if place in items.by_row else (1,) * len(self.rows)
        return self._exchanged(take(leaf, sizes, chosen), every, self._sent, self._received)

    def _exchanged(
        self, rows: Tensor, sizes: Sequence[int], sent: list[list[int]], received: list[list[int]]
    ) -> Tensor:
        """Rows of items that other data ranks need, for those that this one needs. sizes: of each item."""
        data, place = self.ranks.data, self.ranks.place
        send, receive = ([sum(sizes[item] for item in part) for part in parts] for parts in (sent, received))
        every = (self._at(rank, place, home) for rank in range(data.size) for home in range(data.size))
        most = max(sum(sizes[item] for item in part) for part in every)
        return exchange(rows.contiguous(), data, send, receive, most)

    def home(self, outputs: Sequence[Tensor], given: int) -> list[Tensor]:
        """Return the rows of all items of this data rank in outputs of the module, in order of the items.

        A collective over `data`, then over tp.

        Args:
            outputs: each (rows, ...), as many as the module was given, or a multiple or share of so many.
            given: rows that the module was given: those of this rank's items, or of what stood in for them.
        """
        scaled = [self._rows_of(output.shape[0], given) for output in outputs]
        if not self.own:
            outputs = [output[:0] for output in outputs]
        if self.ranks.data.size > 1:
            outputs = self._over_data(outputs, scaled)
        return [self._joined(output, rows) for output, rows in zip(outputs, scaled, strict=True)]

    def _rows_of(self, made: int, given: int) -> list[int]:
        """Rows of every item in an output."""
        if not given or any(rows * made % given for rows in self.rows):
            raise LayoutError(
                f"spread: of {given} rows of items the module made {made}, and Weft cannot tell which are whose. "
                "Spread a module that gives as many rows for each row, or leave spread out."
            )
        return [rows * made // given for rows in self.rows]

    def _over_data(self, outputs: Sequence[Tensor], scaled: list[list[int]]) -> list[Tensor]:
        """Bring all outputs of one format home in one exchange, so that it has one place in backward."""
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            places = [place for place, output in enumerate(outputs) if output.dtype == dtype]
            parts = {
                place: outputs[place].split([sum(scaled[place][item] for item in own) for own in self._received])
                for place in places
            }
            widths = {place: prod(outputs[place].shape[1:]) for place in places}
            packed = [parts[place][rank].reshape(-1) for rank in range(self.ranks.data.size) for place in places]
            values = [sum(scaled[place][item] * widths[place] for place in places) for item in range(len(self.rows))]
            came = self._exchanged(torch.cat(packed), values, self._received, self._sent)
            lots = came.split(
                [sum(scaled[place][item] for item in own) * widths[place] for own in self._sent for place in places]
            )
            for index, place in enumerate(places):
                shape = (-1, *outputs[place].shape[1:])
                found[place] = torch.cat([lot.view(shape) for lot in lots[index :: len(places)]])
        return [found[place] for place in range(len(outputs))]

    def _joined(self, output: Tensor, rows: list[int]) -> Tensor:
        """The rows of all ranks that hold this batch, in the order of the items."""
        ranks, home = self.ranks, self.ranks.data.rank
        order = [
            [item for rank in range(ranks.data.size) for item in self._at(rank, place, home)]
            for place in range(ranks.per_home)
        ]
        counts = [sum(rows[item] for item in own) for own in order]
        most = max(counts)
        starts: dict[int, int] = {}
        for place, own in enumerate(order):
            start = place * most
            for item in own:
                starts[item], start = start, start + rows[item]
        if ranks.per_home > 1:
            missing = most - output.shape[0]
            filled = torch.cat([output, output.new_zeros((missing, *output.shape[1:]))]) if missing else output
            output = gather_slice(filled, ranks.tp, 0)
        places = [starts[item] + row for item in sorted(starts) for row in range(rows[item])]
        if places == list(range(output.shape[0])):
            return output
        return output.index_select(0, torch.tensor(places, dtype=torch.int64, device=output.device))
