"""The items of one call of an encoder: pictures or clips, each a row, or unlike many rows one after another.

N items, R rows of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import LayoutError
from weft.private_torch import tree_flatten, tree_unflatten

#: Numbers of the rows of an item: frames, height and width, or height and width.
_GRIDS = (2, 3)


@dataclass(frozen=True)
class Items:
    """What an encoder was called with.

    rows: of each item in tensors whose rows are no items. spans: how many of them attend to each other. leaves, tree:
    the arguments. by_row, by_item: which of the leaves have a row for each of `rows`, or for each item.
    """

    rows: tuple[int, ...]
    spans: tuple[int, ...]
    leaves: tuple[Any, ...]
    tree: Any
    by_row: tuple[int, ...]
    by_item: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def are_rows(self) -> bool:
        """Whether each item is one row."""
        return all(count == 1 for count in self.rows)

    def sizes(self, place: int) -> tuple[int, ...]:
        """Return how many rows each item has in a leaf."""
        return self.rows if place in self.by_row else (1,) * len(self.rows)

    @property
    def without_any(self) -> Items:
        """The same call without an item."""
        places = {*self.by_row, *self.by_item}
        leaves = tuple(leaf[:0] if place in places else leaf for place, leaf in enumerate(self.leaves))
        return Items((), (), leaves, self.tree, self.by_row, self.by_item)

    def taken(self, place: int, chosen: Sequence[int]) -> Tensor:
        """Return the rows of some items in a leaf, one item after another."""
        return take(self.leaves[place], self.sizes(place), chosen)

    def arguments(self, replaced: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments with some of the leaves replaced."""
        return tree_unflatten([replaced.get(place, leaf) for place, leaf in enumerate(self.leaves)], self.tree)


def take(tensor: Tensor, sizes: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """Return the rows of some items, one after another.

    Args:
        tensor: (rows of all items, ...).
        sizes: rows of each item.
        chosen: numbers of items, in the order wanted.
    """
    if list(chosen) == list(range(len(sizes))):
        return tensor
    if all(size == 1 for size in sizes):
        return tensor.index_select(0, torch.tensor(list(chosen), dtype=torch.int64, device=tensor.device))
    parts = tensor.split(list(sizes))
    return torch.cat([parts[one] for one in chosen]) if chosen else tensor[:0]


def find_items(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Items:
    """Return the items of a call. Of the first tensor of floats each row is one, or whole numbers tell their borders.

    Whole numbers tell borders where there are as many as rows: (N, 3) grids of frames, height and width, (N, 2) of
    height and width, or (N,) counts.

    Args:
        path: of the module, for errors.
        args: positional arguments.
        kwargs: named ones.

    Raises:
        LayoutError: where the borders of items cannot be told.
    """
    leaves, tree = tree_flatten((args, kwargs))
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    main = next((place for place, leaf in tensors.items() if leaf.is_floating_point()), None)
    if main is None:
        raise LayoutError(f"{path}=spread: it is called without a tensor of numbers. Spread a module that reads items.")
    total = tensors[main].shape[0]
    whole = {place: leaf for place, leaf in tensors.items() if not leaf.is_floating_point()}
    told = next((found for place, leaf in whole.items() if (found := _counts(leaf, total)) is not None), None)
    if told is None and tensors[main].dim() < 3:
        shape = tuple(tensors[main].shape)
        raise LayoutError(
            f"{path}=spread: of its input of shape {shape} Weft cannot tell which rows are one item. Call it with "
            "whole numbers that say how many rows each has, such as grid_thw, or with a row for each item, "
            "(items, ..., ...)."
        )
    rows, spans = told or ((1,) * total, (1,) * total)
    by_row = tuple(place for place, leaf in tensors.items() if leaf.shape[0] == total)
    by_item = tuple(place for place, leaf in tensors.items() if place not in by_row and leaf.shape[0] == len(rows))
    if told and len(rows) == total:  # every item is one row
        by_row, by_item = (*by_row, *by_item), ()
    return Items(rows, spans, tuple(leaves), tree, by_row, by_item)


def _counts(leaf: Tensor, total: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rows of each item, and how many of them attend to each other; None where the numbers do not say that."""
    if leaf.dtype == torch.bool or leaf.is_meta:
        return None
    if leaf.dim() == 1 and leaf.shape[0] <= total:
        rows = tuple(leaf.tolist())
        return (rows, rows) if sum(rows) == total and min(rows, default=0) >= 0 else None
    if leaf.dim() == 2 and leaf.shape[1] in _GRIDS and leaf.shape[0] <= total:
        grids: list[list[int]] = leaf.tolist()
        spans = tuple(grid[-1] * grid[-2] for grid in grids)
        rows = tuple(span * (grid[0] if len(grid) == 3 else 1) for span, grid in zip(spans, grids, strict=True))
        return (rows, spans) if sum(rows) == total else None
    return None
