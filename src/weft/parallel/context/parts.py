"""Attention gathered piece by piece: what this rank's queries have seen so far, and the gradients of it.

B sequences, T queries, S keys, H query heads, K key-value heads, C width of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from weft.parallel.context.kernel import attend, attend_backward, sum_dtype
from weft.parallel.context.pieces import Piece

#: Keys and values, each (B, K, S, C): a pair, or one tensor (2, B, K, S, C).
KeysValues: TypeAlias = Tensor | tuple[Tensor, Tensor]


class Seen:
    """Output and log-sum-exp of queries over the keys met so far. The first keys must hold each query's own token."""

    def __init__(self, q_BHTC: Tensor, scale: float):
        self._q, self._scale = q_BHTC, scale
        dtype = sum_dtype(q_BHTC.dtype)
        # Memory order of (B, T, H, C): models flatten the heads of each token, which then is no copy.
        batch, heads, num, width = q_BHTC.shape
        self._out = q_BHTC.new_empty((batch, num, heads, width), dtype=dtype).transpose(1, 2)
        self._lse = q_BHTC.new_empty((batch, heads, num), dtype=dtype)

    def meet(self, kv: KeysValues, pieces: Sequence[Piece]) -> None:
        """Take in keys and values. Triangles come first and set the output of their queries; rectangles add to it."""
        for piece in pieces:
            q, k, v = (_of(x, piece.rows, start, end) for x, start, end in _sides(self._q, kv, piece))
            out, lse = attend(q, k, v, piece.causal, self._scale)
            whole_out = _of(self._out, piece.rows, piece.q0, piece.q1)
            whole_lse = _of(self._lse, piece.rows, piece.q0, piece.q1)
            if piece.causal:
                whole_out.copy_(out)
                whole_lse.copy_(lse)
                continue
            total = torch.logaddexp(whole_lse, lse)
            whole_out.mul_((whole_lse - total).exp_()[..., None])
            whole_out.addcmul_(out.to(whole_out.dtype), (lse - total).exp_()[..., None])
            whole_lse.copy_(total)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output (B, H, T, C) in the queries' format, and log-sum-exp (B, H, T)."""
        return self._out.to(self._q.dtype), self._lse


class Gradients:
    """Gradients of queries, summed here, and of each lot of keys and values, given to who asks."""

    def __init__(self, grad_BHTC: Tensor, q_BHTC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, scale: float):
        self._grad, self._q, self._out, self._lse, self._scale = grad_BHTC, q_BHTC, out_BHTC, lse_BHT, scale
        self.q_BHTC = torch.zeros_like(q_BHTC, dtype=sum_dtype(q_BHTC.dtype))

    def meet(self, kv: KeysValues, pieces: Sequence[Piece], grad_kv: KeysValues) -> None:
        """Add this lot's part to the queries' gradient, and to `grad_kv` that of its keys and values."""
        for piece in pieces:
            q, k, v = (_of(x, piece.rows, start, end) for x, start, end in _sides(self._q, kv, piece))
            grad, out, lse = (_of(x, piece.rows, piece.q0, piece.q1) for x in (self._grad, self._out, self._lse))
            parts = attend_backward(grad, q, k, v, out, lse, piece.causal, self._scale)
            for whole, part in zip(_sides(self.q_BHTC, grad_kv, piece), parts, strict=True):
                x, start, end = whole
                _of(x, piece.rows, start, end).add_(part)


def _of(x: Tensor, rows: tuple[int, int] | None, start: int, end: int) -> Tensor:
    """Some sequences, and some tokens in dim 2; the tensor itself where that is all."""
    if rows is not None and rows != (0, x.shape[0]):
        x = x[rows[0] : rows[1]]
    return x if (start, end) == (0, x.shape[2]) else x[:, :, start:end]


def _sides(q_BHTC: Tensor, kv: KeysValues, piece: Piece) -> list[tuple[Tensor, int, int]]:
    """Queries, keys and values, each with the first token and the one behind the last."""
    return [
        (q_BHTC, piece.q0, piece.q1),
        (kv[0], piece.k0, piece.k1),
        (kv[1], piece.k0, piece.k1),
    ]
