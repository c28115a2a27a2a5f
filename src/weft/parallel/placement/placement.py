"""What a technique did to a parameter: which part of the whole this rank holds, and over whom its gradient adds up.

Tensor, expert and pipeline parallelism change a module in place before data parallelism takes it: a parameter is
replaced by a plain one of this rank's part, under the same name. They return a `Placement` by name for each parameter
they changed; one without is whole on every rank, and its gradient a sum over `mesh.batch` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weft.errors import ModelError


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this rank's part of one parameter lies in the whole.

    cut: the mesh axes over whose ranks the whole is divided, such as ("tp",) or ("ep",); () where it is whole here.
    dim: the dimension that is cut, into equal contiguous parts in order of the joined axis.
    parts: sizes, in the whole, of segments of `dim` that are cut each by itself (fused query-key-value, gate-up).
    index: the rows of `dim` that this rank holds where they are not the equal part; then `whole_shape` is needed.
    Rows may be held by several ranks (key-value heads fewer than tp): with `partial` of the cut axis, adjacent ranks
    hold the same rows, and gradients add up over those.
    whole_shape: the shape of the whole, without padding; () where it follows from the part.
    partial: mesh axes, besides the data axes, over whose ranks the gradient is a partial sum: it is added over them.
    pad: rows that `dim` of the whole has at its end for equal parts; no part of checkpoints, zero after loading.
    name: the whole's in checkpoints, where it is another than here: a weight that two stages share.
    """

    cut: tuple[str, ...] = ()
    dim: int = 0
    parts: tuple[int, ...] = ()
    index: tuple[int, ...] | None = None
    whole_shape: tuple[int, ...] = ()
    partial: tuple[str, ...] = ()
    pad: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.index is not None and not self.whole_shape:
            raise ModelError("placement: index= needs the shape of the whole. Give whole_shape=.")
        if self.parts and (self.pad or self.index is not None):
            raise ModelError(
                "placement: parts= cannot be combined with pad= or index=. Give the rows of this rank by index=."
            )

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds only a part."""
        return bool(self.cut)

    def shape_of_whole(self, local: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the whole's shape, from the part's and the number of ranks of the cut axis."""
        if self.whole_shape or not self.cut:
            return self.whole_shape or tuple(local)
        shape = list(local)
        shape[self.dim] = shape[self.dim] * size - self.pad
        return tuple(shape)

    def num_equal(self, local: Sequence[int], size: int) -> int:
        """Return how many ranks of the cut axis hold the same rows."""
        if self.index is None or not set(self.cut) <= set(self.partial):
            return 1
        return size * local[self.dim] // (self.whole_shape[self.dim] + self.pad)

    def rows(self, local: Sequence[int], rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return the rows of `dim` that a rank holds, as ranges; those of padding lie beyond the whole.

        Args:
            local: shape of a rank's part.
            rank: on the joined cut axis.
            size: of that axis.
        """
        if self.index is not None:
            return tuple(_ranges(self.index))
        if not self.parts:
            return ((rank * local[self.dim], (rank + 1) * local[self.dim]),)
        found, start = [], 0
        for part in self.parts:
            found.append((start + rank * part // size, start + (rank + 1) * part // size))
            start += part
        return tuple(found)

    def local(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's part of the whole: a view where the rows are contiguous.

        Args:
            whole: the tensor as it is without the cut.
            rank: on the joined cut axis.
            size: of that axis.
        """
        if not self.cut:
            return whole
        if self.index is not None:
            rows = torch.tensor(self.index, device=whole.device)
            return self._padded(whole).index_select(self.dim, rows)
        pieces = [
            self._equal(segment, rank, size)
            for segment in (
                self._padded(whole).split(list(self.parts), self.dim) if self.parts else [self._padded(whole)]
            )
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, parts: Sequence[torch.Tensor], indexes: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """Return the whole, from the parts of all ranks of the cut axis.

        indexes: each rank's `index`, where it is used.

        A row that several ranks hold is taken from the first of them.
        """
        if not self.cut:
            return parts[0]
        if self.index is not None:
            assert indexes is not None
            return self._scattered(parts, indexes)
        if not self.parts:
            whole = torch.cat(list(parts), self.dim)
        else:
            sizes = [size // len(parts) for size in self.parts]
            columns = zip(*(part.split(sizes, self.dim) for part in parts), strict=True)
            whole = torch.cat([piece for column in columns for piece in column], self.dim)
        return whole.narrow(self.dim, 0, whole.shape[self.dim] - self.pad)

    def _scattered(self, parts: Sequence[torch.Tensor], indexes: Sequence[Sequence[int]]) -> torch.Tensor:
        shape = list(self.whole_shape)
        shape[self.dim] += self.pad
        whole = parts[0].new_zeros(shape)
        for part, rows in zip(reversed(parts), reversed(indexes), strict=True):
            whole.index_copy_(self.dim, torch.tensor(list(rows), device=whole.device), part)
        return whole.narrow(self.dim, 0, self.whole_shape[self.dim])

    def _padded(self, whole: torch.Tensor) -> torch.Tensor:
        if not self.pad:
            return whole
        shape = list(whole.shape)
        shape[self.dim] = self.pad
        return torch.cat([whole, whole.new_zeros(shape)], self.dim)

    def _equal(self, segment: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        rows, rest = divmod(segment.shape[self.dim], size)
        if rest:
            raise ModelError(
                f"placement: {segment.shape[self.dim]} rows of dim {self.dim} are not a multiple of the {size} ranks "
                f"of {'*'.join(self.cut)}. Give pad={size - rest}, or the rows of each rank by index=."
            )
        return segment.narrow(self.dim, rank * rows, rows)


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of neighbours, in their order."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


#: A parameter that nobody cut.
WHOLE = Placement()


def merge_placements(*found: Mapping[str, Placement]) -> dict[str, Placement]:
    """Return what several techniques did, as one. A parameter is cut by one of them; partial sums of all are added up.

    Raises:
        ModelError: where two techniques cut the same parameter.
    """
    merged: dict[str, Placement] = {}
    for placements in found:
        for name, placement in placements.items():
            before = merged.get(name, WHOLE)
            if before.is_cut and placement.is_cut:
                raise ModelError(
                    f"parameter {name!r}: it was cut over {'*'.join(before.cut)} and then over "
                    f"{'*'.join(placement.cut)}. Let one technique cut it."
                )
            partial = (*before.partial, *(axis for axis in placement.partial if axis not in before.partial))
            saved = before.name or placement.name
            merged[name] = replace(placement if placement.is_cut else before, partial=partial, name=saved)
    return merged
