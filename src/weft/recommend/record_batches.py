"""Batches of a recommender from prepared tables: records with labels, pairs of users and items, or sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.order.stream import derive_key
from weft.data.store.row_table import RowTable
from weft.data.table_data import SplitTables
from weft.recommend.options import RecommendOptions
from weft.recommend.prepared import ColumnReader
from weft.train.tasks.folder_task import IGNORED, FilledUp


@dataclass(slots=True)
class RowNumber:
    """A sample: the number of a row of a split, which `collate` reads together with the others of the batch.

    epoch: of training. index: -1 for padding of the last evaluation batch.
    """

    split: str
    epoch: int
    index: int


class RowNumbers(Sequence[RowNumber]):
    """The rows of a split by number."""

    def __init__(self, split: str, num_rows: int):
        self._split, self._num_rows = split, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        return RowNumber(self._split, 0, index)

    def in_epoch(self, epoch: int, index: int) -> RowNumber:
        """Return a row in an epoch, on which its negative items depend."""
        return RowNumber(self._split, epoch, index)


class RecordBatches:
    """Reads the samples of prepared tables, and makes batches for the model.

    Args:
        options: the task's options.
        tables: the prepared rows.
        seed: the run's seed, for negative items.
    """

    def __init__(self, options: RecommendOptions, tables: SplitTables, seed: int):
        self._options, self._schema, self.tables, self._seed = options, options.schema, tables, seed

    def num_rows(self, name: str) -> int:
        """Return the rows of a column's table."""
        return self.tables.found["rows"][name]

    def samples(self, split: str, global_batch: int) -> Sequence[Any] | None:
        """Return the rows of a split by number, or None for an empty split. An evaluation has full global batches."""
        if split == "train":
            return RowNumbers(split, len(self.tables.train))
        table = self.tables.eval
        if table is None:
            return None
        return FilledUp(RowNumbers(split, len(table)), global_batch, lambda row: replace(row, index=-1))

    def item_inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the model for items, by their ids, int64 (N,)."""
        if self._options.model != "two_tower":
            return {"ids": ids}
        rows = self._catalog.column("row")[ids.numpy() - 1]
        return {name: torch.from_numpy(one) for name, one in self._reader.read(self.tables.train, rows).items()}

    def collate(self, samples: list[RowNumber]) -> dict[str, Tensor]:
        """Return the batch of some rows of one split."""
        table = self.tables.train if samples[0].split == "train" else self.tables.eval
        assert table is not None
        if self._options.model == "sasrec":
            return self._sequences(samples, table)
        index = np.array([row.index for row in samples])
        found = self._reader.read(table, index.clip(0))
        if self._options.is_pointwise:
            found["labels"] = np.where(index < 0, np.nan, table.column("label")[index.clip(0)]).astype(np.float32)
        else:
            item = found["ids"][:, self._schema.ids.index(self._schema.named(self._schema.item[0]))]
            found["item"] = np.where(index < 0, -1, item)
            found["log_q"] = self._log_frequencies[item].astype(np.float32)
        return {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in found.items()}

    def _sequences(self, samples: list[RowNumber], table: RowTable) -> dict[str, Tensor]:
        rows = [table[max(0, one.index)] for one in samples]
        inputs = [row["items"] if "target" in row else row["items"][:-1] for row in rows]
        items = np.zeros((len(rows), max(map(len, inputs))), np.int64)
        labels = np.full_like(items, IGNORED)
        targets = np.full(len(rows), -1)
        for number, (sample, row, own) in enumerate(zip(samples, rows, inputs, strict=True)):
            items[number, : len(own)] = own
            if sample.index < 0:
                continue
            if "target" in row:
                labels[number, len(own) - 1] = targets[number] = row["target"][0]
            else:
                labels[number, : len(own)] = row["items"][1:]
        found = {
            "items": items,
            "last": np.array([len(one) - 1 for one in inputs]),
            "labels": labels,
            "target": targets,
        }
        if self._options.negatives:
            found["candidates"] = self._candidates(samples, labels)
        return {name: torch.from_numpy(one) for name, one in found.items()}

    def _candidates(self, samples: list[RowNumber], labels: np.ndarray) -> np.ndarray:
        """Return each position's right item, then random other ones, which depend on (seed, epoch, row, position)."""
        number = self.num_rows(self._schema.item[0])
        found = np.zeros((*labels.shape, 1 + self._options.negatives), np.int64)
        found[..., 0] = right = np.maximum(labels, 0)
        for row, sample in enumerate(samples):
            key = derive_key("negatives", self._seed, sample.split, sample.epoch, sample.index)
            drawn = np.random.Generator(np.random.Philox(key=key)).integers(
                1, max(2, number - 1), found[row, :, 1:].shape
            )
            others = (drawn + (drawn >= right[row, :, None])).clip(1, number - 1)
            found[row, :, 1:] = others * (right[row, :, None] > 0)  # positions without an item have padding only
        return found

    @cached_property
    def _reader(self) -> ColumnReader:
        return ColumnReader(self._schema, self.tables.found["numbers"])

    @cached_property
    def _log_frequencies(self) -> np.ndarray:
        """Logarithm of each item's share of the training records, float64 (items + 1,)."""
        counts = np.concatenate(([self._catalog.notes["num_unknown"]], self._catalog.column("count")))
        return np.log(np.maximum(counts, 1) / counts.sum()) if self._options.corrects else np.zeros(len(counts))

    @cached_property
    def _catalog(self) -> RowTable:
        """The last training record and the number of records of each item."""
        return RowTable(Path(self.tables.found["catalog"]))
