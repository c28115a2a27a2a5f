"""Low-rank approximations of large matrices (PowerSGD), and their positions in a flat tensor.

With M_i the matrix (a x b) on process i of n plus its residual, k the rank of the approximation, and Q (b x k) the
basis of the last step:

    P = orthonormal(sum_i M_i Q)       a x k
    Q = sum_i M_i^T P                  b x k, kept for the next step
    sums = P Q^T,  residual of process i: M_i - sums / n

P and Q are sums over processes and are sent unencoded. Method: Vogels et al. 2019, arXiv 1905.13727.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from weft.comm.wire.wire_format import Wire

#: Key of the bases Q in a coder's state.
BASIS = "basis"
#: Smaller matrices are sent unchanged, because two collectives would gain little.
LEAST_NUMEL = 4096


class Matrix(NamedTuple):
    """Position of a row-major matrix in a flat tensor."""

    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view (rows, columns) of the matrix in a flat tensor (numel,) of any dtype."""
        return flat[self.start : self.start + self.numel].view(self.rows, self.columns)


class LowRank(Wire):
    """Wire that sends two thin matrices for each large one, with error feedback. `LowRankSum` computes the sums."""

    feeds_back = True


def matrices_of(shape: Sequence[int], start: int, end: int, offset: int, rank: int) -> list[Matrix]:
    """Return the matrix of a parameter, limited to the full rows in a flat slice, or [] if this would save too little.

    Several dims are grouped into rows and columns such that the matrix is closest to a square.

    Args:
        shape: the parameter's shape, in memory order.
        start, end: range of the flat slice in the parameter, end exclusive.
        offset: index of the parameter's first element in the flat tensor.
        rank: rank of the approximation. Its two thin matrices must have less than half of the elements.
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
    """Return the initial basis (columns, rank), the same numbers on all ranks and in every run."""
    seed = hashlib.blake2b(f"{name} {matrix.start}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    return torch.randn(matrix.columns, rank, generator=generator, dtype=torch.float64).to(like)


def orthonormal(p_AR: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns with the same span as the columns of `p_AR`, or NaN if a value is not finite."""
    if not p_AR.isfinite().all():
        return torch.full_like(p_AR, torch.nan)
    factors = cast("tuple[torch.Tensor, torch.Tensor]", torch.linalg.qr(p_AR))  # pyright: ignore[reportUnknownMemberType]  # torch gives it no type
    return factors[0]
