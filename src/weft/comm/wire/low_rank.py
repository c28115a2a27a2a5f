"""Matrices of low rank in place of large ones (PowerSGD): what they are, and where they lie in a flat tensor.

With M_r the matrix of rank r of R, and what it still owes added (a x b), Q what the last step left (b x r):

    P = orthonormal(sum_r M_r Q)       a x r
    Q = sum_r M_r^T P                  b x r, kept for the next step
    sums = P Q^T,  owed by rank r: M_r - sums / R

P and Q are sums over ranks, which travel as they are. Method: Vogels et al. 2019, arXiv 1905.13727.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from weft.comm.wire.wire_format import Wire

#: What a coder carries the bases Q as.
BASIS = "basis"
#: Smaller matrices travel as they are: two collectives would gain little.
LEAST_NUMEL = 4096


class Matrix(NamedTuple):
    """Where a matrix lies in a flat tensor, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.rows * self.columns

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its view, (rows, columns), into a flat tensor of any dtype, (numel,)."""
        return flat[self.start : self.start + self.numel].view(self.rows, self.columns)


class LowRank(Wire):
    """Two thin matrices for each large one; `LowRankSum` makes them, and what they leave out is owed."""

    feeds_back = True


def matrices_of(shape: Sequence[int], start: int, end: int, offset: int, rank: int) -> list[Matrix]:
    """Return the matrix that a parameter is, or as many of its rows as lie in a stretch of its elements; none: [].

    Several dimensions are rows and columns where that is nearest to a square.

    Args:
        shape: of the parameter, in the order of its memory.
        start: first element of the stretch.
        end: its end.
        offset: where the parameter's first element is in the flat tensor.
        rank: a matrix counts whose two thin ones have less than half of its elements.
    """
    if len(shape) < 2 or end <= start:
        return []
    sizes = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape))]
    columns = min(sizes, key=sum)[1]
    first, rows = -(-start // columns), end // columns - -(-start // columns)
    numel = rows * columns
    if rows < 2 or numel < LEAST_NUMEL or 2 * rank * (rows + columns) >= numel or rank > min(rows, columns):
        return []
    return [Matrix(offset + first * columns, rows, columns)]


def first_basis(matrix: Matrix, rank: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return what a run begins with, (columns, rank): the same numbers on all ranks, and in every run.

    Args:
        matrix: its place.
        rank: columns of the basis.
        name: of the coder.
        like: whose format and device it has.
    """
    seed = hashlib.blake2b(f"{name} {matrix.start}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    return torch.randn(matrix.columns, rank, generator=generator, dtype=torch.float64).to(like)


def orthonormal(p_AR: torch.Tensor) -> torch.Tensor:
    """Return columns that span what these do; not finite where one of these is not."""
    if not p_AR.isfinite().all():
        return torch.full_like(p_AR, torch.nan)
    factors = cast("tuple[torch.Tensor, torch.Tensor]", torch.linalg.qr(p_AR))  # pyright: ignore[reportUnknownMemberType]  # torch gives it no type
    return factors[0]
