"""`weft plan CLUSTER --tables FILE`: bytes, exchange and styles of embedding tables on a cluster."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from weft.config.cluster import ClusterSpec
from weft.config.fields.layout import TABLE_STYLES, Layout
from weft.errors import ConfigError, did_you_mean
from weft.planner.cost.embedding_tables import OPTIMIZER_NAMES, TableChoice, TableShape, TableWork, choose
from weft.planner.cost.machine import Tables
from weft.units import format_bytes, format_count, format_seconds

#: Keys of an entry [[table]], with type, smallest and largest value.
_KEYS: Mapping[str, tuple[type, float, float]] = {
    "rows": (int, 1, 1e12),
    "width": (int, 1, 1e6),
    "ids": (float, 1e-6, 1e6),
    "zipf": (float, 0, 10),
}
_NAMES = ("name", *_KEYS, "sorted", "style")
_STYLES = tuple(style for style in (*TABLE_STYLES, "replicate") if style != "auto")


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Styles of tables on a cluster.

    Attributes:
        choices: the style of each table, with its cost.
        cluster: the cluster.
        work: a step of the tables.
        device_bytes, host_bytes: bytes of one rank's device and host memory that tables and states may take.
    """

    choices: tuple[TableChoice, ...]
    cluster: ClusterSpec
    work: TableWork
    device_bytes: float
    host_bytes: float

    @property
    def fits(self) -> bool:
        """True if tables and states fit in the memory of a device and its share of the host."""
        on_device = sum(one.cost.device_bytes for one in self.choices)
        on_host = sum(one.cost.host_bytes for one in self.choices)
        return on_device <= self.device_bytes and on_host <= self.host_bytes

    @property
    def layout(self) -> str:
        """The layout as text."""
        return " ".join(f"{one.table.name}={one.cost.style}" for one in self.choices)

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        work, costs = self.work, [one.cost for one in self.choices]
        ranks = "1 rank" if work.ranks == 1 else f"{work.ranks} ranks"
        found = [
            f"{len(costs)} tables on {self.cluster}: {ranks} of {work.samples} samples, {work.optimizer}; all figures "
            "are predictions for the busiest rank"
        ]
        head = ("table", "style", "shape", "weights", "states", "on the host", "sent", "uneven", "time")
        rows: list[tuple[str, ...]] = [head]
        for one in self.choices:
            cost, table = one.cost, one.table
            sizes = (cost.weight_bytes, cost.state_bytes, cost.host_bytes, cost.sent_bytes)
            shape = f"{format_count(table.rows)} x {table.width}"
            size_words = [format_bytes(round(size)) if size else "-" for size in sizes]
            rows.append(
                (table.name, cost.style, shape, *size_words, f"{cost.uneven:.2f}x", format_seconds(cost.time_s))
            )
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        found += [
            "  ".join(
                cell.ljust(w) if place < 2 else cell.rjust(w)
                for place, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        found += [f"{one.table.name}={one.cost.style}: {one.why}" for one in self.choices]
        on_device = sum(one.device_bytes for one in costs)
        on_host = sum(one.host_bytes for one in costs)
        found.append(
            f"device  {format_bytes(round(on_device))} of {format_bytes(round(self.device_bytes))} a rank; host "
            f"{format_bytes(round(on_host))} of {format_bytes(round(self.host_bytes))}"
        )
        found.append(
            f"step    {format_seconds(sum(one.time_s for one in costs))} for tables, "
            f"{format_bytes(round(sum(one.sent_bytes for one in costs)))} sent"
        )
        found.append(f'layout = "{self.layout}"' if self.fits else "No choice of styles fits. Use more devices.")
        return found

    def as_table(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        rows = [
            {
                "name": one.table.name, "style": one.cost.style, "why": one.why, "weight_bytes": one.cost.weight_bytes,
                "state_bytes": one.cost.state_bytes, "host_bytes": one.cost.host_bytes,
                "sent_bytes": one.cost.sent_bytes, "uneven": one.cost.uneven, "time_s": one.cost.time_s,
                "others": {style: cost.time_s for style, cost in one.others.items()},
            }
            for one in self.choices
        ]  # fmt: skip
        return {"cluster": str(self.cluster), "fits": self.fits, "layout": self.layout, "tables": rows}


def plan_tables(file: Path, cluster: str, global_batch: int | None) -> TablePlan:
    """Return the fastest styles of the tables in a file that fit on a cluster, one rank per device.

    Args:
        file: TOML with one entry [[table]] per table, and optimizer and cache as in [tables] of a config.
        cluster: the cluster's shorthand.
        global_batch: samples of a step on all ranks; None for 2048 on each.

    Raises:
        ConfigError: if file or cluster cannot be used.
    """
    spec = ClusterSpec.parse(cluster)
    ranks, rates = spec.num_devices, Tables.of(spec.device)
    if global_batch is not None and (global_batch < ranks or global_batch % ranks):
        nearest = max(1, global_batch // ranks) * ranks
        raise ConfigError(f"global_batch={global_batch}: {ranks} ranks need equal shares. Use {nearest}.")
    shapes, styles, optimizer, cache = _read(file)
    link = rates.nic_rate * rates.nic_eff if spec.nodes > 1 else rates.link_rate * rates.link_eff
    work = TableWork(
        ranks=ranks, samples=2048 if global_batch is None else global_batch // ranks, optimizer=optimizer, cache=cache,
        link_rate=link, memory_rate=rates.memory_rate * rates.memory_eff, host_rate=rates.host_rate,
    )  # fmt: skip
    most = rates.memory_bytes * rates.usable
    host = 2 * rates.memory_bytes if spec.device.host_memory_bytes is None else spec.device.host_memory_bytes
    return TablePlan(tuple(choose(shapes, work, most, styles)), spec, work, most, host)


def _read(file: Path) -> tuple[list[TableShape], dict[str, str], str, float]:
    """Return the tables of a file, the styles that it sets, the optimizer, and the cache of style host."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"tables={file}: it cannot be read as TOML, because {error}. Write entries [[table]]."
        ) from error
    optimizer, cache, entries = (
        found.pop("optimizer", "rowwise_adagrad"),
        found.pop("cache", 0.05),
        found.pop("table", []),
    )
    if found:
        name = next(iter(found))
        raise ConfigError(f"{file}: {name} is not a key. Use optimizer, cache and [[table]].")
    if optimizer not in OPTIMIZER_NAMES:
        raise ConfigError(f"{file}: optimizer={optimizer} is not one of {', '.join(OPTIMIZER_NAMES)}.")
    if not isinstance(cache, int | float) or isinstance(cache, bool) or not 0 < cache <= 1:
        raise ConfigError(f"{file}: cache={cache}: a share of the rows is above 0 and at most 1. Use 0.05.")
    listed = cast(list[object], entries) if isinstance(entries, list) else []
    if not listed:
        raise ConfigError(f"{file}: it has no table. Write entries [[table]] with name, rows and width.")
    shapes, styles = list[TableShape](), dict[str, str]()
    for number, entry in enumerate(listed):
        shape, style = _table(entry, f"{file}: table {number + 1}")
        if any(one.name == shape.name for one in shapes):
            raise ConfigError(f"{file}: two tables are named {shape.name}. Rename one.")
        shapes.append(shape)
        if style is not None:
            styles[shape.name] = style
    return shapes, styles, str(optimizer), float(cache)


def _table(entry: object, where: str) -> tuple[TableShape, str | None]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: it is not a table of keys. Write [[table]].")
    values = {str(key): value for key, value in cast(Mapping[str, Any], entry).items()}
    _expect_keys(values, where)
    for key, (kind, least, most) in _KEYS.items():
        value = values.get(key)
        if value is None:
            continue
        kinds = (int,) if kind is int else (int, float)
        if type(value) not in kinds or not least <= value <= most:
            what = "an integer" if kind is int else "a number"
            raise ConfigError(f"{where}: {key}={value}: it is {what} from {least:g} to {most:g}.")
    Layout.parse(f"{values['name']}=rows")
    style = values.pop("style", None)
    if style is not None and style not in _STYLES:
        raise ConfigError(
            f"{where}: style={style}: not one of {', '.join(_STYLES)}.{did_you_mean(str(style), _STYLES)}"
        )
    in_order = values.pop("sorted", True)
    if type(in_order) is not bool:
        raise ConfigError(f"{where}: sorted={in_order}: it is true or false.")
    return TableShape(**values, is_sorted=in_order), style


def _expect_keys(values: Mapping[str, Any], where: str) -> None:
    wrong: Sequence[str] = [key for key in values if key not in _NAMES]
    if wrong:
        raise ConfigError(f"{where}: {wrong[0]} is not a key. Use {', '.join(_NAMES)}.{did_you_mean(wrong[0], _NAMES)}")
    for key in ("name", "rows", "width"):
        if key not in values:
            raise ConfigError(f"{where}: {key} is missing. Write name, rows and width.")
    if not isinstance(values["name"], str):
        raise ConfigError(f"{where}: name={values['name']}: it is the path of a module. Write a string.")
