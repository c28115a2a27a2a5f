"""Advantages of completions, weights of their tokens, and the policy loss.

G groups of n completions. R rows, T tokens. For each trained token, with the log probabilities p of the model, o of the
model at the time of sampling, s of the sampler and f of a reference:

    ratio = exp(p - o), or its geometric mean over the completion     GSPO, Zheng et al. 2025, arXiv 2507.18071
    loss  = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)        Schulman et al. 2017, arXiv 1707.06347
            * min(exp(o - s), cap)                                 if there is a cap: truncated importance sampling
            + beta (exp(f - p) - (f - p) - 1)                      estimator k3 of the KL divergence, arXiv 2402.03300

A is the advantage of the token's completion. For distillation it is f - o, with a teacher as the reference: its mean is
the negative reverse KL divergence from the model to the teacher.

All log probabilities are of the softmax of logits / temperature over the full vocabulary, whatever top_k and top_p
restrict sampling to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.config.sections import GrpoSection
from weft.parallel.layers.index_check import check_labels
from weft.parallel.tensor.language_head import HeadLogProbs
from weft.train.tasks.decoder_loss import IGNORE

#: Added to the standard deviation of a group.
_EPSILON = 1e-4
#: Weights of tokens for normalize=auto, by method.
_AUTO = {"grpo": "sequence", "dr_grpo": "constant", "rloo": "sum", "distill": "tokens"}


def group_advantages(rewards_Gn: Tensor, method: str) -> Tensor:
    """Return the advantages of all completions, (G, n).

    A reward of nan does not count in its group, and its advantage is 0. So is the advantage in a group with fewer than
    two rewards.

    Args:
        rewards_Gn: float64, one row per group.
        method: grpo, dr_grpo or rloo.
    """
    known = rewards_Gn.isfinite()
    number = known.sum(1, keepdim=True)
    mean = rewards_Gn.where(known, 0.0).sum(1, keepdim=True) / number.clamp(min=1)
    found = (rewards_Gn - mean).where(known & (number > 1), 0.0)
    others = (number - 1).clamp(min=1)
    if method == "rloo":
        return found * number / others
    if method == "grpo":
        return found / ((found.square().sum(1, keepdim=True) / others).sqrt() + _EPSILON)
    return found


def token_weights(lengths: Sequence[int], settings: GrpoSection) -> list[float]:
    """Return the weight of each token of each completion. The loss is the weighted sum over the number of completions.

    lengths: trained tokens of all completions of the global batch.
    """
    kind = _AUTO[settings.method] if settings.normalize == "auto" else settings.normalize
    if kind == "tokens":
        return [len(lengths) / max(1, sum(lengths))] * len(lengths)
    if kind == "sequence":
        return [1 / max(1, length) for length in lengths]
    return [1 / settings.max_tokens if kind == "constant" else 1.0] * len(lengths)


def token_log_probs(output: Any, labels_RT: Tensor, temperature: float) -> Tensor:
    """Return the log probability of each label at a temperature, (R, T), fp32 (fp64 for fp64); 0 without a label.

    output: logits (R, T, V), or log probabilities at temperature 1 that the head computed.
    """
    if isinstance(output, HeadLogProbs):
        assert temperature == 1, "the head computes log probabilities at temperature 1"
        return output.log_probs
    check_labels(labels_RT, output.shape[-1], IGNORE)
    logits = (output if output.dtype == torch.float64 else output.float()) / temperature
    losses = F.cross_entropy(logits.flatten(0, 1), labels_RT.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view(labels_RT.shape)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Loss of each token, (R, T), and values without a gradient for metrics. Values are 0 at tokens without a label."""

    losses: Tensor
    log_probs: Tensor
    mismatch: Tensor
    clipped: Tensor
    kl: Tensor


def policy_losses(
    log_probs_RT: Tensor,
    batch: dict[str, Any],
    settings: GrpoSection,
    along_sequence: Callable[[Tensor], Tensor] = lambda values: values,
) -> TokenLosses:
    """Return the loss of each token, as in the module docstring.

    Args:
        log_probs_RT: log probabilities of the labels, with a gradient.
        batch: labels, advantages and sampled (log probabilities of the sampler), (R, T). old has the model's log
            probabilities at the time of sampling; without it, they are the current ones. reference has the log
            probabilities of the reference or the teacher.
        settings: the objective.
        along_sequence: sums values over the ranks that have parts of the sequences.
    """
    own, trained = log_probs_RT, batch["labels"] != IGNORE
    old = batch["old"].to(own) if "old" in batch else own.detach()
    reference = batch["reference"].to(own) if "reference" in batch else None
    advantages = batch["advantages"].to(own)
    if settings.method == "distill":
        assert reference is not None
        advantages = reference - old
    log_ratio = own - old
    if settings.ratio == "sequence":
        sums_R2 = along_sequence(torch.stack([log_ratio.where(trained, 0.0).sum(1), trained.sum(1)], 1).detach())
        mean_R1 = sums_R2[:, :1] / sums_R2[:, 1:].clamp(min=1)
        # The value of the mean, with a gradient to each token as if the ratio were the token's own: with the weights of
        # normalize=sequence, this is the gradient of the mean.
        log_ratio = mean_R1 + own - own.detach()
    ratio = log_ratio.exp()
    limited = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    losses = -torch.minimum(ratio * advantages, limited * advantages)
    is_clipped = (limited * advantages < ratio * advantages).detach()
    if settings.importance_cap:
        losses = losses * (old - batch["sampled"].to(own)).exp().clamp(max=settings.importance_cap)
    kl = torch.zeros_like(own)
    if reference is not None:
        kl = (reference - own).exp() - (reference - own) - 1
        if settings.beta:
            losses = losses + settings.beta * kl
    mismatch = (old - batch["sampled"].to(own)).abs()
    return TokenLosses(
        losses.where(trained, 0.0),
        own.detach().where(trained, 0.0),
        mismatch.where(trained, 0.0),
        (is_clipped & trained).to(own),
        kl.detach().where(trained, 0.0),
    )
