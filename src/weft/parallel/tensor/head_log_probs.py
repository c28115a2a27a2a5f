"""Token log-probabilities directly from hidden states, for losses that are not a sum over tokens.

The gradient of a token's log-probability is available only after the forward. Backward therefore recomputes the logits
in chunks of tokens, and full logits never exist. It uses the code of the token loss in `head.py`, with the gradients of
the log-probabilities as weights.

B sequences, T tokens, S tokens of this rank, D features, V entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.parallel.tensor.head import LossChunking, TokenChunks
from weft.parallel.tensor.linear import SharedLayer


def token_log_probs(
    x_BSD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_BT: torch.Tensor,
    line: SharedLayer,
    vocab: int,
    ignore: int,
    way: LossChunking | None = None,
) -> torch.Tensor:
    """Return log p(label) of each token in nats, (B, T), fp32 (fp64 for fp64); 0 if the label is `ignore`.

    Args:
        x_BSD: input of the head; this rank's tokens if sp shards them.
        bias_V: this rank's part of the bias, or None.
        labels_BT: labels of all tokens, int64.
        vocab: size of the full vocabulary without padding.
        way: chunk size, or None for the default of a CPU.
    """
    return _TokenLogProbs.apply(x_BSD, weight_VD, bias_V, labels_BT, line, vocab, ignore, way or LossChunking())


@torch.no_grad()
def token_scores(
    x_BSD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_BT: torch.Tensor,
    line: SharedLayer,
    vocab: int,
    ignore: int,
    way: LossChunking | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities as `token_log_probs`, without gradients, and a mask of the likeliest labels, (B, T).

    The arguments are those of `token_log_probs`.
    """
    whole = line.start_gather(x_BSD).wait() if line.cuts_tokens else x_BSD
    chunks = TokenChunks(weight_VD, bias_V, line, vocab, ignore, way or LossChunking(), [False] * 3, whole, labels_BT)
    chunks.is_top = []
    found = [*chunks.losses()]
    if not found:
        zeros = torch.zeros(labels_BT.shape, dtype=chunks.sums, device=whole.device)
        return zeros, zeros.bool()
    both = (-torch.cat(found), torch.cat(chunks.is_top))
    log_probs, is_top = (chunks.of_all(one).view(labels_BT.shape) for one in both)
    return log_probs, is_top


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_BT: torch.Tensor,
        line: SharedLayer,
        vocab: int,
        ignore: int,
        way: LossChunking,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_BSD, weight_VD, bias_V, labels_BT)
        ctx.rest = (line, vocab, ignore, way)
        whole = line.start_gather(x_BSD).wait() if line.cuts_tokens else x_BSD
        chunks = TokenChunks(weight_VD, bias_V, line, vocab, ignore, way, [False] * 3, whole, labels_BT)
        found = [*chunks.losses()] or [torch.zeros(0, dtype=chunks.sums, device=whole.device)]
        return -chunks.of_all(torch.cat(found)).view(labels_BT.shape)

    @staticmethod
    def backward(ctx: Any, grad_BT: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BSD, weight_VD, bias_V, labels_BT = ctx.saved_tensors
        line, vocab, ignore, way = ctx.rest
        whole = line.start_gather(x_BSD).wait() if line.cuts_tokens else x_BSD
        chunks = TokenChunks(
            weight_VD, bias_V, line, vocab, ignore, way, list(ctx.needs_input_grad[:3]), whole, labels_BT
        )
        for _ in chunks.losses(chunks.of_pass(-grad_BT.reshape(-1).to(chunks.sums))):
            pass
        grad_x = chunks.grad_of_all()
        if grad_x is not None:
            grad_x = line.start_sum(grad_x).wait().to(x_BSD.dtype)
        grad_weight = None if chunks.grad_weight is None else chunks.grad_weight.to(weight_VD.dtype)
        grad_bias = None if chunks.grad_bias is None or bias_V is None else chunks.grad_bias.to(bias_V.dtype)
        return (grad_x, grad_weight, grad_bias, *[None] * 5)
