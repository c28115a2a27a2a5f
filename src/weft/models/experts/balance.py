"""How experts get alike many tokens: a loss for each sequence, or a bias that moves after each step.

Both are the same under every plan. The loss is DeepSeek-V3's sequence-wise one (arXiv 2412.19437, eq. 17-20), a sum
over sequences, so it does not matter how a batch is cut into microbatches and ranks; where the tokens of one sequence
lie on several ranks, `Span` adds their counts up. The bias (Wang et al. 2024, arXiv 2408.15664) follows whole-number
counts of a whole step.

The loss does not travel with the model's output: its gradient enters the router's in backward, so that any loss
function, pipeline stage or user's own loop has it without a word. What was counted is counted in backward too, once
for each backward, however often a recomputed forward runs.

B sequences, T tokens of them here, S tokens in all, K experts that a token visits, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: A selection bias is kept in whole millionths: no number format rounds its small moves away, sums are exact.
BIAS_UNIT = 1e-6


class Span:
    """How the sequences lie on ranks: here each is whole. `weft.parallel` has the other kind."""

    @property
    def num_parts(self) -> int:
        """Over how many ranks each sequence is divided, in equal parts."""
        return 1

    def sum(self, x_BE: Tensor) -> Tensor:
        """Sum over the ranks that hold other tokens of the same sequences; differentiable."""
        return x_BE

    def whole(self, ids_BTK: Tensor) -> Tensor:
        """Bring together the ids of all tokens, in the order of the sequence; (B, S, K)."""
        return ids_BTK

    def part(self, x_BSK: Tensor) -> Tensor:
        """Cut out this rank's tokens again; (B, T, K)."""
        return x_BSK


class Load:
    """What one router counted since `clear`: tokens by expert, and the sum of the auxiliary loss over tokens."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.tokens_E: Tensor | None = None
        self.aux_sum: Tensor | None = None

    def add(self, tokens_E: Tensor, aux_sum: Tensor) -> None:
        """Count one microbatch."""
        if self.tokens_E is None or self.aux_sum is None:
            self.tokens_E, self.aux_sum = tokens_E.clone(), aux_sum.double().clone()
        else:
            self.tokens_E += tokens_E
            self.aux_sum += aux_sum

    def clear(self) -> None:
        """Start counting anew."""
        self.tokens_E = self.aux_sum = None


def count_tokens(ids_BTK: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens of each sequence visit each expert; int64 (B, E)."""
    flat = ids_BTK.flatten(1)
    counts = torch.zeros(flat.shape[0], num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))


def sequence_loss(tokens_BE: Tensor, probs_BTE: Tensor, top_k: int, span: Span) -> Tensor:
    """Sum S * sum over experts of f * P over sequences: S when a sequence is spread evenly, up to S * E / K.

    f: an expert's tokens over its even share of them; P: its mean probability.

    Args:
        tokens_BE: tokens that chose each expert, of this rank's part of each sequence.
        probs_BTE: probabilities of all experts, float.
        top_k: experts of a token.
        span: the ranks that hold other parts of the same sequences.
    """
    num_experts, num_tokens = tokens_BE.shape[1], probs_BTE.shape[1] * span.num_parts
    sums_BE = probs_BTE.sum(1)
    both_BE = span.sum(torch.cat((tokens_BE.to(sums_BE.dtype), sums_BE), 1))
    tokens, sums = both_BE.split(num_experts, 1)
    return (tokens.detach() * sums).sum() * (num_experts / (top_k * num_tokens))


def keep_within(ids_BTK: Tensor, num_experts: int, capacity_factor: float, span: Span) -> Tensor:
    """Which pairs of token and expert stay where an expert takes so many times its even share of a sequence.

    Bool (B, T, K). Earlier tokens of the sequence go first, so what is dropped depends on the sequence alone: not on
    the batch around it, nor on the ranks, nor on later tokens. At least one token stays for each expert.
    """
    ids_BSK = span.whole(ids_BTK)
    batch, num_tokens, top_k = ids_BSK.shape
    # Rounded first: 1.1 * 10 tokens is 11, not 11.000000000000002 and so 12.
    share = round(capacity_factor * num_tokens * top_k / num_experts, 6)
    capacity = max(1, int(-(-share // 1)))
    sorted_ids, source = ids_BSK.reshape(batch, -1).sort(dim=1, stable=True)
    experts = torch.arange(num_experts, device=ids_BTK.device, dtype=ids_BTK.dtype).expand(batch, -1).contiguous()
    starts = torch.searchsorted(sorted_ids, experts)
    queue = torch.arange(sorted_ids.shape[1], device=ids_BTK.device) - starts.gather(1, sorted_ids)
    keep = torch.empty_like(queue, dtype=torch.bool).scatter_(1, source, queue < capacity)
    return span.part(keep.view(batch, num_tokens, top_k))


def attach(weights: Tensor, aux_sum: Tensor, scale: float | Tensor, tokens_E: Tensor, load: Load) -> Tensor:
    """Return the same weights; their backward sends `scale` to the auxiliary loss, and counts.

    Args:
        weights: of the chosen experts.
        aux_sum: 0-d, the auxiliary loss.
        scale: its gradient, a number or 0-d.
        tokens_E: tokens that chose each expert.
        load: where they are counted.
    """
    return _Attach.apply(weights, aux_sum, scale, tokens_E, load)


def move_bias(bias_ppm_E: Tensor, tokens_E: Tensor, rate: float) -> None:
    """Move the selection bias one step, in place: up where an expert had less than its even share, down where more.

    Args:
        bias_ppm_E: int64, in units of BIAS_UNIT.
        tokens_E: tokens that chose each expert in this step, over all ranks.
        rate: of one step.
    """
    surplus = tokens_E * tokens_E.numel() - tokens_E.sum()
    bias_ppm_E -= round(rate / BIAS_UNIT) * surplus.sign()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, aux_sum: Tensor, scale: float | Tensor, tokens_E: Tensor, load: Load
    ) -> Tensor:
        ctx.scale, ctx.load = scale, load
        ctx.save_for_backward(aux_sum, tokens_E)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        aux_sum, tokens_E = ctx.saved_tensors
        ctx.load.add(tokens_E, aux_sum)
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None, None
        is_known = not isinstance(ctx.scale, Tensor)
        aux_grad = torch.full_like(aux_sum, ctx.scale) if is_known else ctx.scale.to(aux_sum).expand_as(aux_sum)
        return grad, aux_grad, None, None, None
