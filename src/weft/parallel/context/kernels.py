"""Attention over a sharded sequence, split into blocks that need no mask.

Queries and keys are chunks of one sequence. A query attends to a band around its own position, and documents are
intervals. So the mask between two chunks consists of full rectangles, lower triangles (query i attends to keys up to i)
and upper triangles (from key i on), which become lower triangles if both are reversed. A window shorter than a chunk
gives many equal triangles in sequence. These tiles form one block.

No tensor of size (queries x keys) is allocated. Scores that windows or documents mask out are never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from weft.devices import access
from weft.parallel.private_torch import CPU_FLASH, CPU_FLASH_BACKWARD, CUDA_FLASH, CUDA_FLASH_BACKWARD
from weft.parallel.random.streams import keeps, lines_of

#: First tokens of the documents in one sequence, ascending from 0, followed by the sequence length.
Borders = tuple[int, ...]
#: Keys of a block that a query attends to: all keys, keys up to the query's index in the block, or keys from that index
#: on.
Shape: TypeAlias = Literal["all", "lower", "upper"]


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Number of tokens before and after a token that it attends to, in addition to itself. None means no limit."""

    before: int | None = None
    after: int | None = 0


CAUSAL = AttentionWindow()
BOTH_WAYS = AttentionWindow(None, None)


class AttentionBlock(NamedTuple):
    """Queries q0 to q1 that attend to keys k0 to k1 (both exclusive), as indices within a rank's tokens.

    Attributes:
        rows: range of batch sequences, end exclusive; None for all.
        shape: "all", or the triangle of keys that a query attends to.
        tiles: number of equal tiles of queries and keys. Each query tile attends only to its key tile.
    """

    rows: tuple[int, int] | None
    q0: int
    q1: int
    k0: int
    k1: int
    shape: Shape = "all"
    tiles: int = 1

    def moved(self, rows: tuple[int, int] | None, q: int, k: int) -> AttentionBlock:
        """Return the same block for the sequences `rows`, with query and key indices shifted by `q` and `k`."""
        return AttentionBlock(rows, self.q0 + q, self.q1 + q, self.k0 + k, self.k1 + k, self.shape, self.tiles)


def attention_blocks(
    mine: Sequence[int],
    theirs: Sequence[int],
    length: int,
    borders: Sequence[Borders] | None = None,
    sight: AttentionWindow = CAUSAL,
) -> list[AttentionBlock]:
    """Return the blocks in which queries of the chunks `mine` attend to keys of the chunks `theirs`. May be empty.

    Args:
        mine, theirs: ascending chunk indices. The two lists are equal or have no common chunk.
        length: tokens per chunk.
        borders: document boundaries of each sequence of the batch; None if each sequence is one document.
        sight: attention window.
    """
    if borders is None:
        if sight in (CAUSAL, BOTH_WAYS):
            return list(_undivided(tuple(mine), tuple(theirs), length, sight))
        return list(_divided(None, mine, theirs, length, (0, (max(*mine, *theirs) + 1) * length), sight))
    found: list[AttentionBlock] = []
    start = 0
    for row_borders, rows in groupby(borders):
        end = start + len(list(rows))
        found += _divided((start, end), mine, theirs, length, row_borders, sight)
        start = end
    return found


def _undivided(
    mine: tuple[int, ...], theirs: tuple[int, ...], length: int, sight: AttentionWindow
) -> Iterator[AttentionBlock]:
    if mine == theirs or sight == BOTH_WAYS:
        # Both lists ascend, so their order is the order of the sequence.
        yield AttentionBlock(
            None, 0, len(mine) * length, 0, len(theirs) * length, "all" if sight == BOTH_WAYS else "lower"
        )
        return
    # Chunks ascend, so the chunks before a query's chunk are a prefix. Adjacent queries with equal prefixes share a
    # block.
    seen = [sum(chunk < query for chunk in theirs) for query in mine]
    start = 0
    for count, group in groupby(seen):
        end = start + len(list(group))
        if count:
            yield AttentionBlock(None, start * length, end * length, 0, count * length)
        start = end


def _divided(
    rows: tuple[int, int] | None,
    mine: Sequence[int],
    theirs: Sequence[int],
    length: int,
    borders: Borders,
    sight: AttentionWindow,
) -> Iterator[AttentionBlock]:
    for i, query in enumerate(mine):
        for j, key in enumerate(theirs):
            for first, end in pairwise(borders):
                q0, q1 = max(first, query * length), min(end, (query + 1) * length)
                k0, k1 = max(first, key * length), min(end, (key + 1) * length)
                if q0 < q1 and k0 < k1:
                    for piece in _band(q0, q1, k0, k1, sight):
                        yield piece.moved(rows, (i - query) * length, (j - key) * length)


def _band(q0: int, q1: int, k0: int, k1: int, sight: AttentionWindow) -> Iterator[AttentionBlock]:
    """Yield the blocks in which queries q0 to q1 attend to keys k0 to k1 (exclusive), as positions in the sequence."""
    before = q1 - k0 if sight.before is None else sight.before
    after = k1 - q0 if sight.after is None else sight.after
    q0, q1 = max(q0, k0 - after), min(q1, k1 + before)  # queries with visible keys
    if q0 >= q1:
        return
    # From `slides` on, the first key of a query's window advances with it. Before `stops`, its last key does.
    slides, stops = (min(max(place, q0), q1) for place in (k0 + before, k1 - after))
    for start, end in pairwise(sorted({q0, slides, stops, q1})):
        if start >= slides and end <= stops:
            yield from _window(start, end, before, after)
        elif start >= slides:
            yield AttentionBlock(None, start, end, start - before, end - before, "upper")
            yield from _rectangle(start, end, end - before, k1)
        elif end <= stops:
            yield from _rectangle(start, end, k0, start + after)
            yield AttentionBlock(None, start, end, start + after, end + after, "lower")
        else:
            yield from _rectangle(start, end, k0, k1)


def _window(start: int, end: int, before: int, after: int) -> Iterator[AttentionBlock]:
    """Yield blocks for queries whose full window is in the sequence: tiles of the window's length, and the rest."""
    length = max(1, before + after)
    whole = (end - start) // length
    for q0, q1, tiles in ((start, start + whole * length, whole), (start + whole * length, end, 1)):
        if q0 == q1:
            continue
        yield AttentionBlock(None, q0, q1, q0 + after, q1 + after, "lower", tiles)
        if before + after:
            yield AttentionBlock(None, q0, q1, q0 - before, q1 - before, "upper", tiles)
        if tiles == 1:
            yield from _rectangle(q0, q1, q1 - before, q0 + after)


def _rectangle(q0: int, q1: int, k0: int, k1: int) -> Iterator[AttentionBlock]:
    if k0 < k1:
        yield AttentionBlock(None, q0, q1, k0, k1)


# Attention of one block with its log-sum-exp, and its gradients given the log-sum-exp over all keys.

#: Maximum number of scores in memory if no fused kernel returns the log-sum-exp.
_SCORES = 2**24


@dataclass(frozen=True, slots=True)
class Noise:
    """Dropout of weights with probability `rate`, from a random number per query (B, H, T) and per key (B, 1, S)."""

    rate: float
    lines_BHT: Tensor
    columns_B1S: Tensor

    def factors(self, rows: slice, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the dropout factors of some queries' weights, (B, K, G, T, S): 0, or 1 / (1 - rate)."""
        lines = self.lines_BHT[:, :, rows].unflatten(1, (kv_heads, -1))
        kept = keeps(lines[..., None], self.columns_B1S[:, :, None, None], self.rate)
        return kept.to(dtype).mul_(1.0 / (1.0 - self.rate))


@dataclass(frozen=True, slots=True)
class AttentionDrop:
    """Dropout of one attention call: each weight with probability `rate`, by (sample, head, query, key).

    `samples` holds the global indices of this call's samples, int64 (B,). `first_head` is this rank's first head.
    """

    rate: float
    key: int | Tensor
    samples: Tensor
    first_head: int

    def lines(self, heads: int, places_T: Tensor) -> Tensor:
        """Return the random numbers of queries, (B, H, T)."""
        heads_H = torch.arange(self.first_head, self.first_head + heads, device=places_T.device)
        return lines_of(self.key, [self.samples.to(places_T.device), heads_H, places_T])

    def noise(self, lines_BHT: Tensor, places_S: Tensor) -> Noise:
        """Return the dropout for queries with these random numbers and keys at these positions."""
        columns = lines_of(~self.key, [places_S])
        return Noise(self.rate, lines_BHT, columns.expand(lines_BHT.shape[0], 1, -1))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one attention call computes scores: scale * q @ k.T, then softcap * tanh(score / softcap).

    `sight` is the attention window; it is applied by the choice of blocks, not by kernels. `drop` is the dropout of the
    weights.
    """

    scale: float
    sight: AttentionWindow = CAUSAL
    softcap: float | None = None
    drop: AttentionDrop | None = None

    @property
    def is_usual(self) -> bool:
        """True if one call to torch's attention over full sequences computes these scores."""
        return self.softcap is None and self.drop is None and self.sight in (CAUSAL, BOTH_WAYS)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, causal: bool, scoring: Scoring, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, T, C) and log-sum-exp (B, H, T), the latter in `sum_dtype`. If `causal`, T must equal S."""
    kind = _kind(q_BHTC, scoring, noise)
    if kind == "cpu":
        return CPU_FLASH(q_BHTC, k_BKSC, v_BKSC, 0.0, causal, scale=scoring.scale)
    if kind == "flash":
        found = CUDA_FLASH(q_BHTC, k_BKSC, v_BKSC, 0.0, causal, False, scale=scoring.scale)
        return found[0], found[1]
    return attend_plainly(q_BHTC, k_BKSC, v_BKSC, causal, scoring, noise)


def attend_backward(
    grad_BHTC: Tensor, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, causal: bool,
    scoring: Scoring, noise: Noise | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of queries, keys and values. `out` and `lse` cover all keys, not only this block's keys."""
    kind = _kind(q_BHTC, scoring, noise)
    if kind == "cpu":
        return CPU_FLASH_BACKWARD(
            grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, 0.0, causal, scale=scoring.scale
        )
    if kind == "flash":
        nothing = torch.empty(0, dtype=torch.uint64, device=q_BHTC.device)  # no dropout, so no RNG state
        return CUDA_FLASH_BACKWARD(
            grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT.contiguous(), None, None, q_BHTC.shape[2],
            k_BKSC.shape[2], 0.0, causal, nothing, nothing, scale=scoring.scale,
        )  # fmt: skip
    return plain_gradients(grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, causal, scoring, noise)


def _kind(q_BHTC: Tensor, scoring: Scoring, noise: Noise | None) -> str:
    """Return "cpu" (torch's CPU flash kernel), "flash" (CUDA flash attention) or "plain" (plain arithmetic)."""
    if scoring.softcap is not None or noise is not None:
        return "plain"
    if q_BHTC.device.type == "cpu":
        return "cpu"
    half = q_BHTC.dtype in (torch.bfloat16, torch.float16)
    if access.has_cuda_kernels(q_BHTC.device) and half and q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= 256:
        return "flash"
    return "plain"


def _scores(q_BHTC: Tensor, k_BKSC: Tensor, start: int, causal: bool, scoring: Scoring, mask: Tensor | None) -> Tensor:
    """Return scores (B, K, G, T, S) of some queries, beginning with query `start`."""
    batch, heads, num, width = q_BHTC.shape
    kv_heads = k_BKSC.shape[1]
    q_BKGTC = q_BHTC.reshape(batch, kv_heads, heads // kv_heads, num, width)
    scores = (q_BKGTC @ k_BKSC[:, :, None].transpose(-1, -2)) * scoring.scale
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if causal:
        place = torch.arange(max(k_BKSC.shape[2], start + num), device=q_BHTC.device)
        scores.masked_fill_(place[: k_BKSC.shape[2]] > place[start : start + num, None], -torch.inf)
    if mask is not None:
        whole = mask.expand(batch, heads, -1, -1) if mask.shape[1] > 1 else mask.expand(batch, 1, -1, -1)
        part = whole[:, :, start : start + num] if whole.shape[2] > 1 else whole
        part = part.unflatten(1, (kv_heads, -1)) if part.shape[1] > 1 else part[:, :, None]
        scores = scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part)
    return scores


def _rows(q_BHTC: Tensor, k_BKSC: Tensor) -> int:
    """Return the number of queries per iteration, so that at most `_SCORES` scores are in memory."""
    return max(1, _SCORES // (q_BHTC.shape[0] * q_BHTC.shape[1] * k_BKSC.shape[2]))


def attend_plainly(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, causal: bool, scoring: Scoring, noise: Noise | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attend` in plain arithmetic, some queries per iteration. A query that attends to no key gets zeros.

    mask: bool (True: attend) or a float added to scores, with four dims that expand to (B, H, T, S).
    """
    dtype = sum_dtype(q_BHTC.dtype)
    k_BKSC, v_BKSC = k_BKSC.to(dtype), v_BKSC.to(dtype)
    outs, sums, size = [], [], _rows(q_BHTC, k_BKSC)
    for start in range(0, q_BHTC.shape[2], size):
        rows = slice(start, start + size)
        scores = _scores(q_BHTC[:, :, rows].to(dtype), k_BKSC, start, causal, scoring, mask)
        total = scores.logsumexp(-1)
        total.masked_fill_(total == -torch.inf, 0.0)
        weights = (scores - total[..., None]).exp_()
        if noise is not None:
            weights *= noise.factors(rows, k_BKSC.shape[1], dtype)
        outs.append((weights @ v_BKSC[:, :, None]).flatten(1, 2).to(q_BHTC.dtype))
        sums.append(total.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def plain_gradients(
    grad_BHTC: Tensor, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, causal: bool,
    scoring: Scoring, noise: Noise | None = None, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `attend_backward` in plain arithmetic. `mask` is as in `attend_plainly`."""
    dtype = sum_dtype(q_BHTC.dtype)
    k, v = k_BKSC.to(dtype), v_BKSC.to(dtype)
    grad_q, grad_k, grad_v = torch.empty_like(q_BHTC), torch.zeros_like(k), torch.zeros_like(v)
    grouped = (k.shape[1], q_BHTC.shape[1] // k.shape[1])
    size = _rows(q_BHTC, k)
    for start in range(0, q_BHTC.shape[2], size):
        rows = slice(start, start + size)
        q, grad, out = (x[:, :, rows].to(dtype).unflatten(1, grouped) for x in (q_BHTC, grad_BHTC, out_BHTC))
        scores = _scores(q.flatten(1, 2), k, start, causal, scoring, mask)
        share = (scores - lse_BHT[:, :, rows].unflatten(1, grouped)[..., None]).exp_()
        factors = noise.factors(rows, k.shape[1], dtype) if noise is not None else None
        grad_v += ((share if factors is None else share * factors).transpose(-1, -2) @ grad).sum(2)
        grad_share = grad @ v[:, :, None].transpose(-1, -2)
        grad_share = grad_share if factors is None else grad_share.mul_(factors)
        grad_score = grad_share.sub_((grad * out).sum(-1, keepdim=True)).mul_(share).mul_(scoring.scale)
        if (cap := scoring.softcap) is not None:
            grad_score *= 1 - scores.clamp_(min=-cap).div_(cap).square_()  # slope of tanh; masked scores are -inf
        grad_q[:, :, rows] = (grad_score @ k[:, :, None]).flatten(1, 2).to(q_BHTC.dtype)
        grad_k += (grad_score.transpose(-1, -2) @ q).sum(2)
    return grad_q, grad_k.to(k_BKSC.dtype), grad_v.to(v_BKSC.dtype)


# Attention accumulated block by block, and its gradients.

#: Keys and values, each (B, K, S, C): a pair, or one tensor (2, B, K, S, C).
KeysValues: TypeAlias = Tensor | tuple[Tensor, Tensor]


class PartialAttention:
    """Output and log-sum-exp of queries over the keys added so far. places_T: the queries' positions."""

    def __init__(self, q_BHTC: Tensor, scoring: Scoring, places_T: Tensor):
        self._q, self._scoring = q_BHTC, scoring
        self._lines = _lines(q_BHTC, scoring, places_T)
        dtype = sum_dtype(q_BHTC.dtype)
        # Memory order (B, T, H, C): models flatten the heads of each token, which then needs no copy.
        batch, heads, num, width = q_BHTC.shape
        self._out = q_BHTC.new_zeros((batch, num, heads, width), dtype=dtype).transpose(1, 2)
        self._lse = q_BHTC.new_full((batch, heads, num), -torch.inf, dtype=dtype)

    def add(self, kv: KeysValues, pieces: Sequence[AttentionBlock], places_S: Tensor) -> None:
        """Add the attention to keys and values in the blocks `pieces`. places_S: positions of the keys."""
        noise = _noise(self._lines, self._scoring, places_S)
        for piece in pieces:
            q = _taken(self._q, piece, piece.q0, piece.q1)
            k, v = (_taken(x, piece, piece.k0, piece.k1) for x in kv)
            found = attend(q, k, v, piece.shape != "all", self._scoring, _noise_of(noise, piece))
            out, lse = (_merge_back(x, piece) for x in found)
            whole_out, whole_lse = (_part(x, piece, piece.q0, piece.q1) for x in (self._out, self._lse))
            total = torch.logaddexp(whole_lse, lse)
            whole_out.mul_((whole_lse - total).exp_()[..., None])
            whole_out.addcmul_(out.to(whole_out.dtype), (lse - total).exp_()[..., None])
            whole_lse.copy_(total)

    def result(self, sink_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return output (B, H, T, C) in the queries' dtype, and log-sum-exp (B, H, T).

        sink_H: attention sinks, a score per head that takes part in the softmax and has no value.
        """
        if sink_H is not None:
            total = torch.logaddexp(self._lse, sink_H.to(self._lse.dtype)[:, None])
            self._out.mul_((self._lse - total).exp_()[..., None])
            self._lse = total
        return self._out.to(self._q.dtype), self._lse


def sink_gradient(grad_BHTC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, sink_H: Tensor | None) -> Tensor | None:
    """Return the gradient of the attention sinks, or None without sinks. `out` and `lse` include the sinks."""
    if sink_H is None:
        return None
    share_BHT = (sink_H.to(lse_BHT.dtype)[:, None] - lse_BHT).exp_()
    product_BHT = (grad_BHTC.to(lse_BHT.dtype) * out_BHTC).sum(-1)
    return share_BHT.mul_(product_BHT).sum((0, 2)).neg_().to(sink_H.dtype)


class Gradients:
    """Gradients of attention: of queries, accumulated here, and of keys and values, added to the caller's buffers."""

    def __init__(
        self, grad_BHTC: Tensor, q_BHTC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, scoring: Scoring, places_T: Tensor
    ):
        self._grad, self._q, self._out, self._lse, self._scoring = grad_BHTC, q_BHTC, out_BHTC, lse_BHT, scoring
        self._lines = _lines(q_BHTC, scoring, places_T)
        self.q_BHTC = torch.zeros_like(q_BHTC, dtype=sum_dtype(q_BHTC.dtype))

    def add(self, kv: KeysValues, pieces: Sequence[AttentionBlock], places_S: Tensor, grad_kv: KeysValues) -> None:
        noise = _noise(self._lines, self._scoring, places_S)
        for piece in pieces:
            queries, keys = (piece.q0, piece.q1), (piece.k0, piece.k1)
            grad, q, out, lse = (_taken(x, piece, *queries) for x in (self._grad, self._q, self._out, self._lse))
            k, v = (_taken(x, piece, *keys) for x in kv)
            is_triangle, part_noise = piece.shape != "all", _noise_of(noise, piece)
            parts = attend_backward(grad, q, k, v, out, lse, is_triangle, self._scoring, part_noise)
            wholes = ((self.q_BHTC, queries), (grad_kv[0], keys), (grad_kv[1], keys))
            for (whole, places), part in zip(wholes, parts, strict=True):
                _part(whole, piece, *places).add_(_merge_back(part, piece))


def _lines(q_BHTC: Tensor, scoring: Scoring, places_T: Tensor) -> Tensor | None:
    return scoring.drop.lines(q_BHTC.shape[1], places_T) if scoring.drop else None


def _noise(lines_BHT: Tensor | None, scoring: Scoring, places_S: Tensor) -> Noise | None:
    return scoring.drop.noise(lines_BHT, places_S) if scoring.drop and lines_BHT is not None else None


def _noise_of(noise: Noise | None, piece: AttentionBlock) -> Noise | None:
    if noise is None:
        return None
    lines = _taken(noise.lines_BHT, piece, piece.q0, piece.q1)
    return Noise(noise.rate, lines, _taken(noise.columns_B1S, piece, piece.k0, piece.k1))


def _part(x: Tensor, piece: AttentionBlock, start: int, end: int) -> Tensor:
    """Return a block's sequences and its tokens `start` to `end` (exclusive) in dim 2, without a copy."""
    if piece.rows is not None and piece.rows != (0, x.shape[0]):
        x = x[piece.rows[0] : piece.rows[1]]
    return x if (start, end) == (0, x.shape[2]) else x[:, :, start:end]


def _taken(x: Tensor, piece: AttentionBlock, start: int, end: int) -> Tensor:
    """Return `_part` with each tile as a separate sequence, reversed if the block is an upper triangle."""
    x = _part(x, piece, start, end)
    if piece.tiles > 1:
        x = x.unflatten(2, (piece.tiles, -1)).transpose(1, 2).flatten(0, 1)
    return x.flip(2) if piece.shape == "upper" else x


def _merge_back(x: Tensor, piece: AttentionBlock) -> Tensor:
    """Undo `_taken`: join the tiles into one sequence, in forward order."""
    x = x.flip(2) if piece.shape == "upper" else x
    return x.unflatten(0, (-1, piece.tiles)).transpose(1, 2).flatten(2, 3) if piece.tiles > 1 else x
