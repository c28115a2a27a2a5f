"""Attention of one piece with its log-sum-exp, and its gradients when that of the whole is known.

The softmax of a query over all keys is a weighted mean of its softmaxes over parts of them, with weights from the
parts' log-sum-exp (Milakov & Gimelshein 2018, arXiv 1805.02867). Backward needs only the whole's output and
log-sum-exp: each part's gradients follow from them alone (Dao et al. 2022, arXiv 2205.14135).

B sequences, T queries, S keys, H query heads, K key-value heads, G = H / K, C width of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Scores that plain arithmetic holds at a time, where no fused kernel gives the log-sum-exp.
_SCORES = 2**24


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format in which parts are added up: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, C) and log-sum-exp (B, H, T), the latter in `sum_dtype`. causal: T = S, each up to itself."""
    kind = _kind(q_BHTC)
    if kind == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(q_BHTC, k_BKSC, v_BKSC, 0.0, causal, scale=scale)
    if kind == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BHTC, k_BKSC, v_BKSC, 0.0, causal, False, scale=scale
        )
        return found[0], found[1]
    return _attend_plainly(q_BHTC, k_BKSC, v_BKSC, causal, scale)


def attend_backward(
    grad_BHTC: Tensor, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values. out, lse: of these queries over all keys, not those of this piece."""
    kind = _kind(q_BHTC)
    if kind == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, 0.0, causal, scale=scale)
    if kind == "flash":
        nothing = torch.empty(0, dtype=torch.uint64, device=q_BHTC.device)  # no dropout, so no state of it
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT.contiguous(), None, None, q_BHTC.shape[2],
            k_BKSC.shape[2], 0.0, causal, nothing, nothing, scale=scale,
        )  # fmt: skip
    return _backward_plainly(grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, causal, scale)


def _kind(q_BHTC: Tensor) -> str:
    """Which kernel takes these: torch's for the CPU, flash attention, or plain arithmetic."""
    if q_BHTC.device.type == "cpu":
        return "cpu"
    half = q_BHTC.dtype in (torch.bfloat16, torch.float16)
    if q_BHTC.device.type == "cuda" and half and q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= 256:
        return "flash"
    return "plain"


def _scores(q_BHTC: Tensor, k_BKSC: Tensor, start: int, causal: bool, scale: float) -> Tensor:
    """Scores (B, K, G, T, S) of some queries, the first of which is number `start`."""
    batch, heads, num, width = q_BHTC.shape
    kv_heads = k_BKSC.shape[1]
    q_BKGTC = q_BHTC.reshape(batch, kv_heads, heads // kv_heads, num, width)
    scores = (q_BKGTC @ k_BKSC[:, :, None].transpose(-1, -2)) * scale
    if causal:
        place = torch.arange(k_BKSC.shape[2], device=q_BHTC.device)
        scores.masked_fill_(place > place[start : start + num, None], -torch.inf)
    return scores


def _rows(q_BHTC: Tensor, k_BKSC: Tensor) -> int:
    """Queries at a time, so that no more than `_SCORES` scores are held."""
    return max(1, _SCORES // (q_BHTC.shape[0] * q_BHTC.shape[1] * k_BKSC.shape[2]))


def _attend_plainly(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = sum_dtype(q_BHTC.dtype)
    k_BKSC, v_BKSC = k_BKSC.to(dtype), v_BKSC.to(dtype)
    outs, sums, start = [], [], 0
    for part in q_BHTC.split(_rows(q_BHTC, k_BKSC), 2):
        scores = _scores(part.to(dtype), k_BKSC, start, causal, scale)
        start += part.shape[2]
        total = scores.logsumexp(-1)
        out = (scores - total[..., None]).exp_() @ v_BKSC[:, :, None]
        outs.append(out.flatten(1, 2).to(q_BHTC.dtype))
        sums.append(total.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _backward_plainly(
    grad_BHTC: Tensor, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, out_BHTC: Tensor, lse_BHT: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = sum_dtype(q_BHTC.dtype)
    k, v = k_BKSC.to(dtype), v_BKSC.to(dtype)
    grad_q, grad_k, grad_v = torch.empty_like(q_BHTC), torch.zeros_like(k), torch.zeros_like(v)
    grouped = (k.shape[1], q_BHTC.shape[1] // k.shape[1])
    size, num = _rows(q_BHTC, k), q_BHTC.shape[2]
    for start in range(0, num, size):
        rows = slice(start, min(start + size, num))
        q, grad, out = (x[:, :, rows].to(dtype).unflatten(1, grouped) for x in (q_BHTC, grad_BHTC, out_BHTC))
        lse = lse_BHT[:, :, rows].unflatten(1, grouped)
        share = (_scores(q.flatten(1, 2), k, start, causal, scale) - lse[..., None]).exp_()
        grad_v += (share.transpose(-1, -2) @ grad).sum(2)
        grad_score = share * (grad @ v[:, :, None].transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        grad_q[:, :, rows] = (grad_score @ k[:, :, None]).flatten(1, 2).to(q_BHTC.dtype)
        grad_k += (grad_score.transpose(-1, -2) @ q).sum(2)
    return grad_q, grad_k.to(k_BKSC.dtype), grad_v.to(v_BKSC.dtype)
