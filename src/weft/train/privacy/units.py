"""Units of privacy: the records of one person, document or other value, which are drawn and clipped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import DataError
from weft.train.batches.data_share import MapDataset


@dataclass(frozen=True, slots=True)
class Units(Sequence[Any]):
    """Records by unit: `order[starts[u] : starts[u + 1]]` are those of unit u, ascending. Both arrays are int64."""

    order: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, unit_of: np.ndarray) -> Units:
        """Return the units of records. unit_of: unit of each record, int64, numbered from 0 without gaps."""
        return cls(np.argsort(unit_of, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(unit_of))]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, unit: Any) -> np.ndarray:
        return self.order[self.starts[unit] : self.starts[unit + 1]]


def numbered_values(samples: MapDataset, column: str, setting: str = "column") -> np.ndarray:
    """Return the number of each record's value in a column, int64, with values in the order of their texts.

    Values with one text are equal: 7, "7" and 7.0, because columns with gaps are often read as floats.

    Args:
        samples: the records.
        column: key of a dict, or index of a tuple. "label" is the second of a tuple, or "labels" of a dict, too.
        setting: name of the setting that names the column, for errors.

    Raises:
        DataError: if a record has no single value in it.
    """
    values = [str(_value(samples[index], column, index, setting)) for index in range(len(samples))]
    return np.unique(np.array(values), return_inverse=True)[1]


def _value(sample: Any, column: str, index: int, setting: str) -> Any:
    value: Any = None
    known = "none"
    if isinstance(sample, Mapping):
        names = (column, "labels") if column == "label" else (column,)
        value = next((sample[name] for name in names if name in sample), None)
        known = ", ".join(map(str, sample))
    elif isinstance(sample, Sequence):
        place = 1 if column == "label" else int(column) if column.isdecimal() else len(sample)
        value = sample[place] if place < len(sample) else None
        known = ", ".join(map(str, range(len(sample))))
    if callable(item := getattr(value, "item", None)):
        count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
        value = item() if count == 1 else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or value == "" or value != value or isinstance(value, list | tuple | dict):
        raise DataError(
            f"{setting}={column}: record {index} has no single value in it. Its columns: {known}. Fill the gap, or use "
            "another column."
        )
    return value
