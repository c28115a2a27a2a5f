"""How work and bytes of a layer grow with the batch, the sequence and the layout.

Letters: B samples in a pass on a rank, S tokens of a sequence on it, t tensor-parallel ranks, c context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Growth:
    """A number that grows with B and S: one + batch B + seq S + tokens B S + seq_square S^2 + square B S^2."""

    one: float = 0.0
    batch: float = 0.0
    seq: float = 0.0
    tokens: float = 0.0
    seq_square: float = 0.0
    square: float = 0.0

    def at(self, batch: Any, seq: Any) -> Any:
        """Return its value; numbers or numpy arrays."""
        linear, square = self.seq + self.tokens * batch, self.seq_square + self.square * batch
        return self.one + self.batch * batch + (linear + square * seq) * seq

    def __add__(self, other: Growth) -> Growth:
        return Growth(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Growth)))

    def __mul__(self, factor: float) -> Growth:
        return Growth(*(getattr(self, each.name) * factor for each in fields(Growth)))


@dataclass(frozen=True, slots=True)
class Matmul:
    """`batch` products of an m x k with a k x n matrix; a convolution is one too.

    cut: what tensor parallelism divides: "columns" n, "rows" k, "inside" the batch, "none" nothing.
    input_grad, weight_grad: whether backward makes the product for the left side, for the right side.
    """

    m: Growth
    n: Growth
    k: Growth
    batch: Growth
    cut: str = "none"
    input_grad: bool = True
    weight_grad: bool = True

    def sizes(self, batch: Any, seq: Any, t: Any) -> tuple[Any, Any, Any, Any]:
        """Return m, n, k and the number of products on one rank.

        Args:
            batch: sequences.
            seq: tokens of each on this rank.
            t: ranks that divide the layer, where it is cut.
        """
        found = [each.at(batch, seq) for each in (self.m, self.n, self.k, self.batch)]
        place = {"columns": 1, "rows": 2, "inside": 3}.get(self.cut)
        if place is not None:
            found[place] = found[place] / t
        return found[0], found[1], found[2], found[3]

    def flops(self, batch: Any, seq: Any, t: Any) -> Any:
        """Return the FLOPs of forward, on one rank.

        Args:
            batch: sequences.
            seq: tokens of each on this rank.
            t: ranks that divide the layer, where it is cut.
        """
        m, n, k, count = self.sizes(batch, seq, t)
        return 2.0 * m * n * k * count

    @property
    def num_backward(self) -> int:
        """Products of the same size that backward makes."""
        return self.input_grad + self.weight_grad


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """One fused attention. queries: in all, B S of them; keys: that each may see. cut: heads are divided by t."""

    heads: int
    kv_heads: int
    head_dim: int
    queries: Growth
    keys: Growth
    causal: bool = True
    cut: bool = False

    def flops(self, batch: Any, seq: Any, t: Any, c: Any) -> Any:
        """Return the FLOPs of forward, on one rank: a causal mask leaves half of the square.

        Args:
            batch: sequences.
            seq: tokens of each on this rank.
            t: ranks that divide the heads, where they are cut.
            c: ranks that share a sequence: keys are those of all of it.
        """
        heads = self.heads / t if self.cut else self.heads
        rows = self.queries.at(batch, seq)
        return 4.0 * rows * self.keys.at(batch, seq * c) * heads * self.head_dim * (0.5 if self.causal else 1.0)


@dataclass(frozen=True, slots=True)
class DividedBytes:
    """Bytes by what divides them. cut: t does. gathered: t never does, also not under sp. whole: t does under sp."""

    cut: Growth = Growth()
    gathered: Growth = Growth()
    whole: Growth = Growth()

    def at(self, batch: Any, seq: Any, t: Any, between: Any) -> Any:
        """Return the bytes on one rank.

        Args:
            batch: sequences.
            seq: tokens of each.
            t: ranks that divide what is cut.
            between: what divides activations outside of cut regions: t under sp, else 1.
        """
        return self.cut.at(batch, seq) / t + self.gathered.at(batch, seq) + self.whole.at(batch, seq) / between

    def __add__(self, other: DividedBytes) -> DividedBytes:
        return DividedBytes(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(DividedBytes)))

    def __mul__(self, factor: float) -> DividedBytes:
        return DividedBytes(*(getattr(self, each.name) * factor for each in fields(DividedBytes)))
