"""Attention gathered piece by piece: what this rank's queries have seen so far, and the gradients of it.

B sequences, T queries, S keys, H query heads, K key-value heads, C width of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from weft.parallel.context.kernel import Noise, Scoring, attend, attend_backward, sum_dtype
from weft.parallel.context.pieces import Piece

#: Keys and values, each (B, K, S, C): a pair, or one tensor (2, B, K, S, C).
KeysValues: TypeAlias = Tensor | tuple[Tensor, Tensor]


class Seen:
    """Output and log-sum-exp of queries over the keys met so far: of a query that has met none, zero and -inf.

    places_T: of the queries in the sequence.
    """

    def __init__(self, q_BHTC: Tensor, scoring: Scoring, places_T: Tensor):
        self._q, self._scoring = q_BHTC, scoring
        self._lines = _lines(q_BHTC, scoring, places_T)
        dtype = sum_dtype(q_BHTC.dtype)
        # Memory order of (B, T, H, C): models flatten the heads of each token, which then is no copy.
        batch, heads, num, width = q_BHTC.shape
        self._out = q_BHTC.new_zeros((batch, num, heads, width), dtype=dtype).transpose(1, 2)
        self._lse = q_BHTC.new_full((batch, heads, num), -torch.inf, dtype=dtype)

    def meet(self, kv: KeysValues, pieces: Sequence[Piece], places_S: Tensor) -> None:
        """Take in keys and values. places_S: of the keys in the sequence."""
        noise = _noise(self._lines, self._scoring, places_S)
        for piece in pieces:
            q = _taken(self._q, piece, piece.q0, piece.q1)
            k, v = (_taken(x, piece, piece.k0, piece.k1) for x in kv)
            found = attend(q, k, v, piece.shape != "all", self._scoring, _noise_of(noise, piece))
            out, lse = (_given_back(x, piece) for x in found)
            whole_out, whole_lse = (_part(x, piece, piece.q0, piece.q1) for x in (self._out, self._lse))
            total = torch.logaddexp(whole_lse, lse)
            whole_out.mul_((whole_lse - total).exp_()[..., None])
            whole_out.addcmul_(out.to(whole_out.dtype), (lse - total).exp_()[..., None])
            whole_lse.copy_(total)

    def result(self, sink_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output (B, H, T, C) in the queries' format, and log-sum-exp (B, H, T).

        sink_H: a score of each head beside those of the keys, which takes its share of the weights and adds nothing.
        """
        if sink_H is not None:
            total = torch.logaddexp(self._lse, sink_H.to(self._lse.dtype)[:, None])
            self._out.mul_((self._lse - total).exp_()[..., None])
            self._lse = total
        return self._out.to(self._q.dtype), self._lse


def sink_gradient(grad_BHTC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, sink_H: Tensor | None) -> Tensor | None:
    """Gradient of the sinks from that of the output; out, lse: with the sinks among the scores."""
    if sink_H is None:
        return None
    share_BHT = (sink_H.to(lse_BHT.dtype)[:, None] - lse_BHT).exp_()
    product_BHT = (grad_BHTC.to(lse_BHT.dtype) * out_BHTC).sum(-1)
    return share_BHT.mul_(product_BHT).sum((0, 2)).neg_().to(sink_H.dtype)


class Gradients:
    """Gradients of queries, summed here, and of each lot of keys and values, given to who asks."""

    def __init__(
        self, grad_BHTC: Tensor, q_BHTC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, scoring: Scoring, places_T: Tensor
    ):
        self._grad, self._q, self._out, self._lse, self._scoring = grad_BHTC, q_BHTC, out_BHTC, lse_BHT, scoring
        self._lines = _lines(q_BHTC, scoring, places_T)
        self.q_BHTC = torch.zeros_like(q_BHTC, dtype=sum_dtype(q_BHTC.dtype))

    def meet(self, kv: KeysValues, pieces: Sequence[Piece], places_S: Tensor, grad_kv: KeysValues) -> None:
        """Add this lot's part to the queries' gradient, and to `grad_kv` that of its keys and values."""
        noise = _noise(self._lines, self._scoring, places_S)
        for piece in pieces:
            queries, keys = (piece.q0, piece.q1), (piece.k0, piece.k1)
            grad, q, out, lse = (_taken(x, piece, *queries) for x in (self._grad, self._q, self._out, self._lse))
            k, v = (_taken(x, piece, *keys) for x in kv)
            is_triangle, part_noise = piece.shape != "all", _noise_of(noise, piece)
            parts = attend_backward(grad, q, k, v, out, lse, is_triangle, self._scoring, part_noise)
            wholes = ((self.q_BHTC, queries), (grad_kv[0], keys), (grad_kv[1], keys))
            for (whole, places), part in zip(wholes, parts, strict=True):
                _part(whole, piece, *places).add_(_given_back(part, piece))


def _lines(q_BHTC: Tensor, scoring: Scoring, places_T: Tensor) -> Tensor | None:
    """Numbers of the queries for dropout, (B, H, T)."""
    return scoring.drop.lines(q_BHTC.shape[1], places_T) if scoring.drop else None


def _noise(lines_BHT: Tensor | None, scoring: Scoring, places_S: Tensor) -> Noise | None:
    return scoring.drop.noise(lines_BHT, places_S) if scoring.drop and lines_BHT is not None else None


def _noise_of(noise: Noise | None, piece: Piece) -> Noise | None:
    """Of the piece's pairs alone."""
    if noise is None:
        return None
    lines = _taken(noise.lines_BHT, piece, piece.q0, piece.q1)
    return Noise(noise.rate, lines, _taken(noise.columns_B1S, piece, piece.k0, piece.k1))


def _part(x: Tensor, piece: Piece, start: int, end: int) -> Tensor:
    """The piece's sequences, and some tokens in dim 2; the tensor itself where that is all."""
    if piece.rows is not None and piece.rows != (0, x.shape[0]):
        x = x[piece.rows[0] : piece.rows[1]]
    return x if (start, end) == (0, x.shape[2]) else x[:, :, start:end]


def _taken(x: Tensor, piece: Piece, start: int, end: int) -> Tensor:
    """`_part` with each tile as a sequence of its own, backwards where the piece is an upper triangle."""
    x = _part(x, piece, start, end)
    if piece.tiles > 1:
        x = x.unflatten(2, (piece.tiles, -1)).transpose(1, 2).flatten(0, 1)
    return x.flip(2) if piece.shape == "upper" else x


def _given_back(x: Tensor, piece: Piece) -> Tensor:
    """The opposite of `_taken`: one sequence again, forwards."""
    x = x.flip(2) if piece.shape == "upper" else x
    return x.unflatten(0, (-1, piece.tiles)).transpose(1, 2).flatten(2, 3) if piece.tiles > 1 else x
