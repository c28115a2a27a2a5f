"""Rows that are alike in what decides a figure: the figure is computed once for each kind, and handed to every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.space.columns import Columns

#: Of fewer rows, finding the kinds takes longer than computing every row.
_FEW = 1024
#: Kinds are numbered without gaps once there could be more than this.
_MOST_KEYS = 2**18
#: Values below this are their own numbers: gaps among them cost less than closing them.
_FEW_VALUES = 8


@dataclass(frozen=True, slots=True)
class RowDeduplicator:
    """The kinds of some rows, which are alike in what decides a figure.

    rows: one of each kind, with nothing but the columns that tell kinds apart. first: where those stand among all.
    index: the kind of every row.
    """

    rows: Columns
    first: NDArray[np.intp] | slice
    index: NDArray[np.intp] | slice

    @classmethod
    def of(
        cls, columns: Columns, names: Sequence[str], beside: Sequence[NDArray[np.int64]] = (), **changes: NDArray[Any]
    ) -> RowDeduplicator:
        """Return the kinds of rows that some columns tell apart.

        A figure that reads another column than those fails: the column is not there.

        Args:
            columns: all rows.
            names: of the columns.
            beside: other numbers that tell kinds apart, one for each row.
            **changes: columns among those with other values than the rows have, one for each row.
        """
        arrays: dict[str, NDArray[Any]] = {
            name: changes[name] if name in changes else getattr(columns, name) for name in names
        }
        if len(columns) < _FEW:
            return cls(Columns(arrays), slice(None), slice(None))
        index, count = _numbered([*arrays.values(), *beside], len(columns))
        first = np.empty(count, dtype=np.intp)
        first[index[::-1]] = np.arange(len(columns) - 1, -1, -1)
        return cls(Columns({name: array[first] for name, array in arrays.items()}), first, index)

    def __getitem__(self, part: slice) -> RowDeduplicator:
        """The same kinds, and which of them the rows of a part are. Where every row is a kind, the part is all rows."""
        return self if isinstance(self.index, slice) else RowDeduplicator(self.rows, self.first, self.index[part])


def _numbered(arrays: Sequence[NDArray[Any]], num_rows: int) -> tuple[NDArray[np.intp], int]:
    """A number from 0 for every combination of values, row by row; and how many there are."""
    key, span = np.zeros(num_rows, dtype=np.intp), 1
    for array in arrays:
        if array.strides == (0,):
            continue
        codes, count = _codes(array)
        if count == 1:
            continue
        if span * count > _MOST_KEYS:
            key, span = _without_gaps(key, span)
        key, span = key * count + codes, span * count
    return _without_gaps(key, span)


def _codes(array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """A number for every value of an array, and how many such numbers there are."""
    if array.dtype.kind in "bui":
        least, most = int(array.min()), int(array.max())
        if 0 <= least < most < _FEW_VALUES:
            return array, most + 1
        if 0 <= least < most < 2**16:
            return _without_gaps(array.astype(np.intp), most + 1)
    if (array == array[0]).all():
        return np.zeros(len(array), dtype=np.intp), 1
    values, codes = np.unique(array, return_inverse=True)
    return codes.reshape(-1), len(values)


def _without_gaps(key: NDArray[np.intp], span: int) -> tuple[NDArray[np.intp], int]:
    """Numbers below `span` as numbers without gaps, and how many there are."""
    if span > 32 * _MOST_KEYS:
        values, codes = np.unique(key, return_inverse=True)
        return codes.reshape(-1), len(values)
    used = np.zeros(span, dtype=np.bool_)
    used[key] = True
    numbers = np.cumsum(used, dtype=np.intp) - 1
    count = int(numbers[-1]) + 1
    return (key if count == span else numbers[key]), count
