"""Attention that drops some of its weights, by position; over whole sequences, with any mask.

B sequences, T queries, S keys, H query heads, K key-value heads, C width of one head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from weft.parallel.context.kernel import AttentionDrop, Noise, Scoring, attend_plainly, plain_gradients
from weft.private_torch import without_modes


def dropped_attention(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
    drop: AttentionDrop,
) -> Tensor:  # fmt: skip
    """Attend as F.scaled_dot_product_attention does, dropping by position; (B, H, T, C).

    Args:
        q_BHTC: queries.
        k_BKSC: keys; K divides H.
        v_BKSC: values.
        mask: bool (True is seen) or added to scores, of any shape that broadcasts to (B, H, T, S); None: all is seen.
        is_causal: each token sees those up to itself.
        scale: of the scores.
        drop: which elements go, by position.
    """
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    args = (q_BHTC, k_BKSC, v_BKSC, mask, is_causal, scale, drop)
    if has_torch_function((q_BHTC, k_BKSC, v_BKSC)):
        return handle_torch_function(dropped_attention, (q_BHTC, k_BKSC, v_BKSC), *args)
    return _Dropped.apply(*args)


#: What `weft.memory` looks for.
dropped_attention.is_attention = True


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
        drop: AttentionDrop,
    ) -> Tensor:  # fmt: skip
        ctx.is_causal, ctx.scoring, ctx.drop, ctx.mask = is_causal, Scoring(scale), drop, mask
        with without_modes():
            noise = _noise(drop, q_BHTC, k_BKSC)
            out_BHTC, lse_BHT = attend_plainly(q_BHTC, k_BKSC, v_BKSC, is_causal, ctx.scoring, noise, mask)
        ctx.save_for_backward(q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT)
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, grad_BHTC: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT = ctx.saved_tensors
        noise = _noise(ctx.drop, q_BHTC, k_BKSC)
        grads = plain_gradients(
            grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, ctx.is_causal, ctx.scoring, noise, ctx.mask
        )
        return (*grads, None, None, None, None)


def _noise(drop: AttentionDrop, q_BHTC: Tensor, k_BKSC: Tensor) -> Noise:
    queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (q_BHTC, k_BKSC))
    return drop.noise(drop.lines(q_BHTC.shape[1], queries), keys)
