"""Preparation of a recommender's records: vocabularies, encoded rows, the split, sequences and the item catalog.

All tables are `RowTable`s in the cache of prepared data. A row of records has the arrays `ids` (one index per id
column), `numbers`, `label`, and `bag.NAME` for each column of lists.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.config.run_config import DataSection
from weft.data.order.stream import derive_key
from weft.data.store.prepare import cache_folder
from weft.data.store.prepared import key_of
from weft.data.store.row_table import RowTable, RowWriter, ready_table
from weft.data.table_data import Rows, SplitTables, TableReader, TableRecord
from weft.errors import DataError
from weft.recommend.columns import (
    OPTION,
    ColumnSchema,
    RecordColumn,
    id_reader,
    id_texts,
    label_of,
    number_of,
    time_of,
)
from weft.recommend.options import RecommendOptions
from weft.train.tasks.base import Report
from weft.units import counted

#: Part of the key of cached tables. A new number invalidates them.
_VERSION = 2


class RecommendReader:
    """Reads a config's sources into encoded rows.

    Args:
        data: the config's [data] section.
        schema: the columns.
        split: hold out records by a hash of their content, the latest records, or the last item of each
            user.
        positives: keep only records with label 1, for models that learn from pairs.
        report: called with (stage, done, total) while files are read.
    """

    def __init__(self, data: DataSection, schema: ColumnSchema, split: str, positives: bool, report: Report | None):
        self._data, self._schema, self._split, self._report = data, schema, split, report
        self._positive = schema.label if positives else None
        self._readers: dict[str, Callable[[TableRecord, str], int]] = {}

    def tables(self) -> SplitTables:
        """Return the rows for training and evaluation. Rows that are not cached are made.

        Raises:
            DataError: if the data is missing or invalid.
        """
        found = self._encoded()
        if not all(Path(folder).is_dir() for folder in found.found["vocabularies"].values()):
            shutil.rmtree(found.train_folder)  # its survey, which writes vocabularies, has to run again
            found = self._encoded()
        return found

    def _encoded(self) -> SplitTables:
        key = ["recommend", _VERSION, [repr(one) for one in self._schema.columns], self._split, bool(self._positive)]
        data = self._data if self._split != "last" else self._data.model_copy(update={"holdout": 0.0})
        draw = self._latest_first if self._split == "time" else None
        self._readers = {}
        found = TableReader(data, key, self._rows, self._survey, self._report, draw).tables()
        lines = found.summary if self._split != "last" else found.summary[:1]
        sizes = ", ".join(f"{name} {number}" for name, number in found.found["rows"].items())
        return replace(found, summary=(*lines, *([f"rows of tables: {sizes}"] if sizes else [])))

    def _latest_first(self, record: TableRecord) -> float:
        column = self._schema.time
        assert column is not None
        return -time_of(record, column, record.value(column.name, OPTION))

    # --- vocabularies and statistics of the training records ---

    def _survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        learned = [one for one in self._schema.columns if one.learns]
        counts = {one.name: Counter[str]() for one in learned}
        moments = {one.name: _Moments() for one in self._schema.numbers}
        num_records = 0
        for record in self._kept(records):
            num_records += 1
            for one in learned:
                counts[one.name].update(id_texts(record, one, record.value(one.name, OPTION)))
            for one in self._schema.numbers:
                moments[one.name].add(number_of(record, one, record.value(one.name, OPTION)))
        folders, rows = dict[str, str](), dict[str, int]()
        for one in self._schema.columns:
            if one.learns:
                table = self._vocabulary(counts[one.name], one.min_count)
                folders[one.name] = str(table.folder)
                rows[one.name] = one.num_rows(len(table))
            elif one.has_ids:
                rows[one.name] = one.num_rows(0)
        numbers = {name: [one.mean, one.std] for name, one in moments.items()}
        return {"rows": rows, "vocabularies": folders, "numbers": numbers, "num_records": num_records}

    def _vocabulary(self, counts: Counter[str], least: int) -> RowTable:
        """Return the table of an id column's texts and counts: row i is index i + 1.

        The ids are in the order of a hash, so that frequent ids are distributed evenly over ranks that hold ranges of
        rows.
        """
        texts = sorted(
            (text for text, count in counts.items() if text and count >= least),
            key=lambda text: (derive_key("vocabulary", text), text),
        )
        key = ["vocabulary", _VERSION, key_of([[text, counts[text]] for text in texts])]

        def write(writer: RowWriter) -> Mapping[str, Any]:
            for text in texts:
                writer.add({"text": np.frombuffer(text.encode(), np.uint8), "count": np.array([counts[text]])})
            return {}

        return ready_table(cache_folder(self._data), key, write, None)

    def _kept(self, records: Iterable[TableRecord]) -> Iterator[TableRecord]:
        label = self._positive
        for record in records:
            if label is None or label_of(record, label, record.value(label.name, OPTION)):
                yield record

    # --- rows ---

    def _rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        schema = self._schema
        if not self._readers:
            vocabularies = {name: read_vocabulary(Path(folder)) for name, folder in found["vocabularies"].items()}
            self._readers = {
                one.name: id_reader(one, vocabularies.get(one.name, {})) for one in schema.columns if one.has_ids
            }
        for record in self._kept(records):
            row = dict[str, np.ndarray]()
            if schema.ids:
                row["ids"] = np.array([index for one in schema.ids for index in self._indices(record, one)], np.int64)
            for one in schema.bags:
                row[f"bag.{one.module}"] = np.array(self._indices(record, one), np.int64)
            if schema.numbers:
                values = [number_of(record, one, record.value(one.name, OPTION)) for one in schema.numbers]
                row["numbers"] = np.array(values, np.float64)  # float32 is too coarse for milliseconds
            if (label := schema.label) is not None:
                row["label"] = np.array([label_of(record, label, record.value(label.name, OPTION))], np.float32)
            if (time := schema.time) is not None:
                row["time"] = np.array([time_of(record, time, record.value(time.name, OPTION))], np.float64)
            yield row

    def _indices(self, record: TableRecord, column: RecordColumn) -> list[int]:
        read = self._readers[column.name]
        return [read(record, text) for text in id_texts(record, column, record.value(column.name, OPTION))]


class _Moments:
    """Running mean and standard deviation (Welford 1962)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self._squares += before * (value - self.mean)

    @property
    def std(self) -> float:
        """The standard deviation, or 1 for constant values."""
        return math.sqrt(self._squares / self.count) if self._squares else 1.0


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the index of each id of a vocabulary's folder.

    Raises:
        DataError: if the folder has no readable table.
    """
    table = RowTable(folder)
    return {bytes(table[row]["text"]).decode(): row + 1 for row in range(len(table))}


def read_tables(data: DataSection, options: RecommendOptions, report: Report | None) -> SplitTables:
    """Return the encoded records of a config, or the sequences of sasrec. They are made if the cache lacks them.

    Raises:
        DataError: if the data is invalid.
    """
    if options.split == "last" and data.eval:
        raise DataError("data.eval: split=last evaluates on the last item of each user of data.train. Leave it out.")
    schema = options.schema
    found = RecommendReader(data, schema, options.split, not options.is_pointwise, report).tables()
    if options.model == "sasrec":
        return item_sequences(data, found, schema, options.length)
    if options.model == "two_tower":
        return replace(found, found={**found.found, "catalog": str(item_catalog(data, found, schema).folder)})
    return found


# Tables derived from encoded rows.


def item_catalog(data: DataSection, tables: SplitTables, schema: ColumnSchema) -> RowTable:
    """Return the training records of each item: row i is index i + 1 of the item column's vocabulary.

    A row has `row`, the number of the item's last training record, whose columns describe the item, and `count`, the
    number of its records.
    """
    train, column = tables.train, schema.ids.index(schema.named(schema.item[0]))

    def write(writer: RowWriter) -> Mapping[str, Any]:
        items = _id_column(train, schema, column)
        number = tables.found["rows"][schema.item[0]]
        counts, last = np.bincount(items, minlength=number), np.zeros(number, np.int64)
        last[items] = np.arange(len(items))  # of equal indices, numpy assigns the last value
        for row, count in zip(last[1:], counts[1:], strict=True):
            writer.add({"row": np.array([row]), "count": np.array([count])})
        return {"num_unknown": int(counts[0])}

    return ready_table(cache_folder(data), ["catalog", _VERSION, train.digest, column], write, None)


def item_sequences(data: DataSection, tables: SplitTables, schema: ColumnSchema, length: int) -> SplitTables:
    """Return sequences of items by user, without and with each user's last item.

    Training rows have `items`: consecutive items of a user without the last one, in windows of up to `length` + 1 that
    overlap by one. Evaluation rows have `items`, the up to `length` items before the last one, and `target`, the last
    one. Users with fewer than three items are not evaluated, and keep their last item for training.

    Raises:
        DataError: if no user has two items.
    """
    events = tables.train

    def made(split: str, windows: Callable[[np.ndarray], Iterator[Mapping[str, np.ndarray]]]) -> RowTable:
        def write(writer: RowWriter) -> Mapping[str, Any]:
            for sequence in _sequences(events, schema):
                for row in windows(sequence):
                    writer.add(row)
            return {}

        key = ["sequences", _VERSION, events.digest, list(schema.user), list(schema.item), length, split]
        return ready_table(cache_folder(data), key, write, None)

    train = made("train", lambda items: _windows(items[:-1] if len(items) > 2 else items, length))
    held_out = made("eval", lambda items: _last_item(items, length))
    if not len(train):
        raise DataError(
            "data: no user has two items, so there is no next item to learn. Use records of longer histories."
        )
    lines = (
        f"{counted(len(train), 'sequence')} of up to {length + 1} items; evaluation: the last item of "
        f"{counted(len(held_out), 'user')}",
    )
    folder = held_out.folder if len(held_out) else None
    digests = (train.digest, held_out.digest if folder is not None else None)
    return replace(
        tables, train_folder=train.folder, eval_folder=folder, digests=digests, summary=(*tables.summary, *lines)
    )


def _id_column(table: RowTable, schema: ColumnSchema, column: int) -> np.ndarray:
    return table.column("ids").reshape(-1, len(schema.ids))[:, column]


def _sequences(events: RowTable, schema: ColumnSchema) -> Iterator[np.ndarray]:
    """Yield the items of each user in order of time, and of the records for equal times. Unknown items are left out."""
    users, items = (
        _id_column(events, schema, schema.ids.index(schema.named(name))) for name in (schema.user[0], schema.item[0])
    )
    order = np.lexsort((events.column("time"), users))  # a stable sort
    order = order[items[order] > 0]
    borders = np.flatnonzero(np.diff(users[order])) + 1
    yield from np.split(np.asarray(items[order]), borders)


def _windows(items: np.ndarray, length: int) -> Iterator[Mapping[str, np.ndarray]]:
    for stop in range(len(items), 1, -length):
        yield {"items": items[max(0, stop - length - 1) : stop]}


def _last_item(items: np.ndarray, length: int) -> Iterator[Mapping[str, np.ndarray]]:
    if len(items) > 2:
        yield {"items": items[max(0, len(items) - length - 1) : -1], "target": items[-1:]}


# Batches: columns of many rows at a time.


@dataclass(frozen=True)
class ColumnReader:
    """Reads the columns of some rows as arrays for a batch.

    Attributes:
        schema: the columns.
        numbers: mean and standard deviation of each number column, by name.
    """

    schema: ColumnSchema
    numbers: Mapping[str, Sequence[float]]

    def read(self, table: RowTable, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return `ids` (B, id columns), `numbers` (B, number columns) with mean 0 and variance 1, and lists of ids.

        The lists of a column are `bag.NAME`, all ids in order, and `starts.NAME`, int64 (B,).

        rows: int64 (B,).
        """
        schema, found = self.schema, dict[str, np.ndarray]()
        if schema.ids:
            found["ids"] = table.column("ids").reshape(-1, len(schema.ids))[rows]
        if schema.numbers:
            mean, std = np.array([self.numbers[one.name] for one in schema.numbers]).T
            values = table.column("numbers").reshape(-1, len(schema.numbers))[rows]
            found["numbers"] = ((values - mean) / std).astype(np.float32)
        for one in schema.bags:
            name = one.module
            lengths, starts = table.lengths(f"bag.{name}")[rows], table.starts(f"bag.{name}")[rows]
            ends = lengths.cumsum()
            index = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
            found[f"bag.{name}"] = table.column(f"bag.{name}")[index]
            found[f"starts.{name}"] = ends - lengths
        return found
