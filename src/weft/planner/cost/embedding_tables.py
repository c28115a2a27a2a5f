"""Memory, exchange and time of embedding tables sharded over data ranks, and the choice of their styles.

Ids of a table follow a Zipf distribution over its rows. Rows of style rows and host are contiguous ranges, so frequent
ids that are neighbors make the load of the ranks uneven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weft.units import format_bytes, format_count, format_seconds

#: Styles that `choose` considers, in order of preference.
_CHOICES = ("rows", "columns", "replicate")
#: Numbers of an optimizer's states per row of D columns: (multiples of D, plus).
_STATES = {"sgd": (0, 0), "adagrad": (1, 0), "rowwise_adagrad": (0, 1), "lazy_adamw": (2, 0)}
OPTIMIZER_NAMES = tuple(_STATES)
#: Bytes of a number of tables and states, and of an id in an exchange.
_ELEMENT, _ID = 4, 4
#: A table of at most this size is replicated if this takes about the time of the fastest style, because its lookups
#: then wait for no other rank.
_SMALL_BYTES, _ABOUT = 2**20, 1.2
#: Boundaries of ranges of rows with about equal probability, for sums over all rows.
_BINS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """An embedding table and the ids that a step reads.

    Attributes:
        name: path of the module.
        rows, width: shape of the weight.
        ids: ids of a sample.
        zipf: exponent of the distribution of ids; 0 if all rows are equally frequent.
        is_sorted: True if frequent ids have low numbers, as in a vocabulary sorted by frequency.
    """

    name: str
    rows: int
    width: int
    ids: float = 1.0
    zipf: float = 1.05
    is_sorted: bool = True

    def unique(self, draws: float, share: float = 1.0) -> float:
        """Return the expected number of unique rows among ids. share: count only this first share of the rows."""
        ranks, numbers, probabilities = self._bins()
        within = np.clip((share * self.rows - ranks) / numbers, 0.0, 1.0)
        return float((numbers * within * -np.expm1(draws * np.log1p(-np.minimum(probabilities, 1 - 1e-12)))).sum())

    def hit_share(self, share: float) -> float:
        """Return the share of ids that are among the most frequent rows. share: share of the rows."""
        ranks, numbers, probabilities = self._bins()
        within = np.clip((share * self.rows - ranks) / numbers, 0.0, 1.0)
        return float((numbers * within * probabilities).sum())

    def _bins(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return first row, number of rows and probability of one row, for ranges of rows by frequency."""
        edges = np.unique(np.geomspace(1, self.rows + 1, min(self.rows + 1, _BINS)).astype(np.int64)).astype(np.float64)
        numbers = np.diff(edges)
        weights = ((edges[:-1] + edges[1:] - 1) / 2) ** -self.zipf
        return edges[:-1] - 1, numbers, weights / (weights * numbers).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """What one step does with tables, and on which ranks.

    Attributes:
        ranks: data ranks.
        samples: samples of a rank in a step.
        optimizer: name of the tables' optimizer.
        link_rate: bytes/s that a rank sends to others.
        memory_rate: bytes/s of the device's memory.
        host_rate: bytes/s between host and device.
        cache: share of the rows that the device caches, for style host.
    """

    ranks: int
    samples: int
    optimizer: str = "rowwise_adagrad"
    link_rate: float = 10e9
    memory_rate: float = 200e9
    host_rate: float = 20e9
    cache: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost:
    """Cost of a table under a style, of the busiest rank.

    Attributes:
        weight_bytes, state_bytes: on a device.
        host_bytes: in host memory.
        sent_bytes: rows and gradients that the rank sends in a step.
        uneven: load of the busiest rank over the mean.
        time_s: exchange, reads and updates of a step.
    """

    style: str
    weight_bytes: float
    state_bytes: float
    sent_bytes: float
    time_s: float
    host_bytes: float = 0.0
    uneven: float = 1.0

    @property
    def device_bytes(self) -> float:
        """Bytes of weights and states on a device."""
        return self.weight_bytes + self.state_bytes


def cost_of(table: TableShape, style: str, work: TableWork) -> TableCost:
    """Return the cost of a table under a style."""
    ranks, width = work.ranks, table.width
    many, one = _STATES[work.optimizer]
    row_bytes, state_bytes = width * _ELEMENT, (many * width + one) * _ELEMENT
    unique = table.unique(work.samples * table.ids)
    apart, uneven, host = (ranks - 1) / ranks, 1.0, 0.0
    if style == "replicate":
        share, sent = 1.0, 2 * apart * table.rows * (row_bytes + _ELEMENT)
        moved = 3.0 * table.rows * (row_bytes + _ELEMENT)
    else:
        share = 1.0 if style == "one" else 1 / ranks
        if style == "one":
            uneven = float(ranks)
        elif style in ("rows", "host") and table.is_sorted:
            uneven = max(1.0, ranks * table.unique(work.samples * table.ids, 1 / ranks) / max(unique, 1e-9))
        # Rows to the ranks that request them and gradients back; the busiest rank serves its rows to all others.
        sent = apart * unique * (row_bytes * (uneven + 1) + _ID)
        if style == "columns":
            sent = apart * unique * (2 * row_bytes + _ID * ranks)
        moved = unique * uneven * (3 * row_bytes + 2 * state_bytes)
    time_s = sent / work.link_rate + moved / work.memory_rate
    if style == "host":
        host = share * table.rows * (row_bytes + state_bytes)
        missed = unique * uneven * (1 - table.hit_share(work.cache))
        time_s += 2 * missed * (row_bytes + state_bytes) / work.host_rate
        share *= work.cache
    return TableCost(
        style=style, weight_bytes=share * table.rows * row_bytes, state_bytes=share * table.rows * state_bytes,
        sent_bytes=sent, time_s=time_s, host_bytes=host, uneven=uneven,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChoice:
    """The style of a table, with the reason and the costs of the alternatives by style."""

    table: TableShape
    cost: TableCost
    why: str
    others: Mapping[str, TableCost] = field(default_factory=dict[str, TableCost])


def choose(
    tables: Sequence[TableShape], work: TableWork, device_bytes: float = float("inf"), styles: Mapping[str, str] = {}
) -> list[TableChoice]:
    """Return the fastest styles whose tables and states fit on a device.

    Tables move to the host in order of the time that this costs per byte that it frees. Compare the sum of
    `device_bytes` with the limit to learn if all fit.

    Args:
        device_bytes: bytes of a device for tables and states.
        styles: styles that are fixed, by name of the table.
    """
    found = [_fastest(table, work, styles.get(table.name)) for table in tables]
    over = sum(one.cost.device_bytes for one in found) - device_bytes
    order = sorted(range(len(found)), key=lambda place: _seconds_per_byte(found[place]))
    for place in order:
        one = found[place]
        moved = one.others.get("host")
        if over <= 0:
            break
        if moved is None or moved.device_bytes >= one.cost.device_bytes:
            continue
        saved = one.cost.device_bytes - moved.device_bytes
        over -= saved
        why = (
            f"the tables exceed {format_bytes(device_bytes)} of a device; this saves {format_bytes(saved)} for "
            f"{format_seconds(max(0.0, moved.time_s - one.cost.time_s))} a step"
        )
        found[place] = TableChoice(table=one.table, cost=moved, why=why, others=one.others)
    return found


def _seconds_per_byte(choice: TableChoice) -> float:
    host = choice.others.get("host")
    if host is None or host.device_bytes >= choice.cost.device_bytes:
        return float("inf")
    return (host.time_s - choice.cost.time_s) / (choice.cost.device_bytes - host.device_bytes)


def _fastest(table: TableShape, work: TableWork, fixed: str | None) -> TableChoice:
    if fixed is not None:
        return TableChoice(table=table, cost=cost_of(table, fixed, work), why="set by the layout")
    possible = [style for style in _CHOICES if style != "columns" or table.width >= work.ranks]
    costs = {style: cost_of(table, style, work) for style in (*possible, "host")}
    best = min((costs[style] for style in possible), key=lambda one: one.time_s)
    copied = costs["replicate"]
    if copied.weight_bytes <= _SMALL_BYTES and copied.time_s <= _ABOUT * best.time_s:
        best = copied
    return TableChoice(table=table, cost=best, why=_why(table, best, costs, work), others=costs)


def _why(table: TableShape, best: TableCost, costs: Mapping[str, TableCost], work: TableWork) -> str:
    other = min((one for style, one in costs.items() if style not in (best.style, "host")), key=lambda one: one.time_s)
    slower = f"{other.style} takes {format_seconds(other.time_s)} instead of {format_seconds(best.time_s)}"
    if best.style == "replicate":
        return f"all {format_count(table.rows)} rows are few; {slower}"
    if best.style == "columns":
        busiest = costs["rows"].uneven
        return f"frequent ids are neighbors, so the busiest rank would serve {busiest:.2g} times the mean; {slower}"
    read = table.unique(work.samples * table.ids)
    return f"a rank reads {format_count(round(read))} of {format_count(table.rows)} rows; {slower}"
