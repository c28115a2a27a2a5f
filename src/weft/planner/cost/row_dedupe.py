"""Deduplication of rows: values are computed once per distinct combination of inputs, and expanded to all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from weft.planner.space.columns import Columns

Record = TypeVar("Record")
#: With fewer rows, finding the distinct combinations takes longer than computing every row.
_FEW = 1024
#: Combinations are renumbered without gaps once their numbers could exceed this.
_MOST_KEYS = 2**18
#: Values below this are used as codes directly: gaps among them cost less than removing them.
_FEW_VALUES = 8


@dataclass(frozen=True, slots=True)
class RowDeduplicator:
    """Distinct kinds of rows. Rows of one kind have equal values in the given columns.

    Attributes:
        rows: one row of each kind, with only the columns that distinguish kinds.
        first: index of these rows among all rows.
        index: kind of every row. `first` and `index` are full slices if every row counts as its own kind.
    """

    rows: Columns
    first: NDArray[np.intp] | slice
    index: NDArray[np.intp] | slice

    @classmethod
    def of(
        cls, columns: Columns, names: Sequence[str], beside: Sequence[NDArray[np.int64]] = (), **changes: NDArray[Any]
    ) -> RowDeduplicator:
        """Return the kinds of rows that the columns `names` distinguish.

        If there are few rows, each counts as its own kind. A computation that reads any other column fails, because the
        column is missing from `rows`.

        Args:
            beside: additional arrays that distinguish kinds, with one value per row.
            **changes: replaced values of some of these columns, one for each row.
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
        """Return the same kinds for some of the rows; `self`, for all rows, if every row counts as its own kind."""
        return self if isinstance(self.index, slice) else RowDeduplicator(self.rows, self.first, self.index[part])


def taken(record: Record, index: NDArray[Any] | slice) -> Record:
    """Return a dataclass of arrays with the entries of an index, such as the kind of each plan."""
    made: Any = type(record)
    return made(**{each.name: getattr(record, each.name)[index] for each in fields(cast(Any, record))})


def _numbered(arrays: Sequence[NDArray[Any]], num_rows: int) -> tuple[NDArray[np.intp], int]:
    key, span = np.zeros(num_rows, dtype=np.intp), 1
    for array in arrays:
        least, most = array.min(), array.max()
        if least == most:
            continue
        if array.dtype.kind in "bui" and 0 <= least < most < 2**16:
            count = int(most) + 1
            codes, count = (array, count) if count <= _FEW_VALUES else _without_gaps(array.astype(np.intp), count)
        else:
            codes, count = _sorted_codes(array)
        if span * count > _MOST_KEYS:
            key, span = _without_gaps(key, span)
        key, span = key * count + codes, span * count
    return _without_gaps(key, span)


def _sorted_codes(array: NDArray[Any]) -> tuple[NDArray[np.intp], int]:
    values, codes = np.unique(array, return_inverse=True)
    return codes.reshape(-1), len(values)


def _without_gaps(key: NDArray[np.intp], span: int) -> tuple[NDArray[np.intp], int]:
    """Renumber values below `span` without gaps. Return them and their count."""
    if span > 32 * _MOST_KEYS:
        return _sorted_codes(key)
    used = np.zeros(span, dtype=np.bool_)
    used[key] = True
    numbers = np.cumsum(used, dtype=np.intp) - 1
    count = int(numbers[-1]) + 1
    return (key if count == span else numbers[key]), count
