"""Attention of one piece with its log-sum-exp, and its gradients when that of the whole is known.

The softmax of a query over all keys is a weighted mean of its softmaxes over parts of them, with weights from the
parts' log-sum-exp (Milakov & Gimelshein 2018, arXiv 1805.02867). Backward needs only the whole's output and
log-sum-exp: each part's gradients follow from them alone (Dao et al. 2022, arXiv 2205.14135).

B sequences, T queries, S keys, H query heads, K key-value heads, G = H / K, C width of one head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.parallel.context.pieces import BOTH_WAYS, CAUSAL, Sight
from weft.parallel.private_torch import CPU_FLASH, CPU_FLASH_BACKWARD, CUDA_FLASH, CUDA_FLASH_BACKWARD
from weft.parallel.randomness import keeps, lines_of

#: Scores that plain arithmetic holds at a time, where no fused kernel gives the log-sum-exp.
_SCORES = 2**24


@dataclass(frozen=True, slots=True)
class Noise:
    """Which weights are dropped: each with probability `rate`, by numbers of queries (B, H, T) and keys (B, 1, S)."""

    rate: float
    lines_BHT: Tensor
    columns_B1S: Tensor

    def factors(self, rows: slice, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """What weights of some queries are multiplied with, (B, K, G, T, S): 0, or one over the share that stays."""
        lines = self.lines_BHT[:, :, rows].unflatten(1, (kv_heads, -1))
        kept = keeps(lines[..., None], self.columns_B1S[:, :, None, None], self.rate)
        return kept.to(dtype).mul_(1.0 / (1.0 - self.rate))


@dataclass(frozen=True, slots=True)
class AttentionDrop:
    """What one call of attention drops: each weight with probability `rate`, by (sample, head, query, key).

    samples: numbers of this call's in the whole, int64 (B,). first_head: of this rank's.
    """

    rate: float
    key: int | Tensor
    samples: Tensor
    first_head: int

    def lines(self, heads: int, places_T: Tensor) -> Tensor:
        """Numbers of queries, (B, H, T)."""
        heads_H = torch.arange(self.first_head, self.first_head + heads, device=places_T.device)
        return lines_of(self.key, [self.samples.to(places_T.device), heads_H, places_T])

    def noise(self, lines_BHT: Tensor, places_S: Tensor) -> Noise:
        """For queries of these numbers and keys at these places."""
        columns = lines_of(~self.key, [places_S])
        return Noise(self.rate, lines_BHT, columns.expand(lines_BHT.shape[0], 1, -1))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one call of attention scores queries and keys: products times `scale`, then softcap * tanh(score / softcap).

    sight: which keys a query sees, which is a matter of pieces and not of kernels. drop: what is dropped of the
    weights.
    """

    scale: float
    sight: Sight = CAUSAL
    softcap: float | None = None
    drop: AttentionDrop | None = None

    @property
    def is_usual(self) -> bool:
        """Whether one call of torch's attention over whole sequences gives it."""
        return self.softcap is None and self.drop is None and self.sight in (CAUSAL, BOTH_WAYS)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format in which parts are added up: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, causal: bool, scoring: Scoring, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, C) and log-sum-exp (B, H, T), the latter in `sum_dtype`. causal: T = S, each up to itself."""
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
    """Gradients of queries, keys and values. out, lse: of these queries over all keys, not those of this piece."""
    kind = _kind(q_BHTC, scoring, noise)
    if kind == "cpu":
        return CPU_FLASH_BACKWARD(
            grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, 0.0, causal, scale=scoring.scale
        )
    if kind == "flash":
        nothing = torch.empty(0, dtype=torch.uint64, device=q_BHTC.device)  # no dropout, so no state of it
        return CUDA_FLASH_BACKWARD(
            grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT.contiguous(), None, None, q_BHTC.shape[2],
            k_BKSC.shape[2], 0.0, causal, nothing, nothing, scale=scoring.scale,
        )  # fmt: skip
    return plain_gradients(grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, causal, scoring, noise)


def _kind(q_BHTC: Tensor, scoring: Scoring, noise: Noise | None) -> str:
    """Which kernel takes these: torch's for the CPU, flash attention, or plain arithmetic."""
    if scoring.softcap is not None or noise is not None:
        return "plain"
    if q_BHTC.device.type == "cpu":
        return "cpu"
    half = q_BHTC.dtype in (torch.bfloat16, torch.float16)
    if q_BHTC.device.type == "cuda" and half and q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= 256:
        return "flash"
    return "plain"


def _scores(q_BHTC: Tensor, k_BKSC: Tensor, start: int, causal: bool, scoring: Scoring, mask: Tensor | None) -> Tensor:
    """Scores (B, K, G, T, S) of some queries, the first of which is number `start`."""
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
    """Queries at a time, so that no more than `_SCORES` scores are held."""
    return max(1, _SCORES // (q_BHTC.shape[0] * q_BHTC.shape[1] * k_BKSC.shape[2]))


def attend_plainly(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, causal: bool, scoring: Scoring, noise: Noise | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attend` in plain arithmetic, some queries at a time; a query that sees nothing gets zeros.

    mask: bool (True is seen) or added to scores, of four dims that expand to (B, H, T, S).
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
    """`attend_backward` in plain arithmetic. mask: as in `attend_plainly`."""
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
            grad_score *= 1 - scores.clamp_(min=-cap).div_(cap).square_()  # slope of tanh; hidden scores are -inf
        grad_q[:, :, rows] = (grad_score @ k[:, :, None]).flatten(1, 2).to(q_BHTC.dtype)
        grad_k += (grad_score.transpose(-1, -2) @ q).sum(2)
    return grad_q, grad_k.to(k_BKSC.dtype), grad_v.to(v_BKSC.dtype)
