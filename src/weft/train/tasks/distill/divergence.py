"""How far a student's next token is from a teacher's.

    loss = (1 - a) t^2 KL(p || q) + a CE(q_1, label),   p = softmax(teacher / t), q = softmax(student / t), q_1 at t = 1

for each trained token, with the temperature t and the mix a: Hinton et al. 2015, arXiv 1503.02531. The factor t^2 keeps
gradients as large as those of the cross-entropy. With k, the divergence is that of the teacher's k likeliest entries
and of all others together as one, which is never larger than the whole one.

N tokens, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def distilled_losses(
    student_NV: Tensor, teacher_NV: Tensor, labels_N: Tensor, *, temperature: float, mix: float, top_k: int = 0
) -> Tensor:
    """Return the loss of each token in nats, (N,), fp32 (fp64 for fp64).

    Args:
        student_NV: logits, with a gradient.
        teacher_NV: logits of the same entries.
        labels_N: the next tokens.
        temperature: above 0.
        mix: 0 is the divergence alone, 1 the cross-entropy alone.
        top_k: so many of the teacher's entries are told apart; 0: all.
    """
    kept = torch.promote_types(student_NV.dtype, torch.float32)
    student_NV, teacher_NV = student_NV.to(kept), teacher_NV.to(kept)
    p_NV, q_NV = F.log_softmax(teacher_NV / temperature, 1), F.log_softmax(student_NV / temperature, 1)
    if 0 < top_k < p_NV.shape[1]:
        p_NV, places = p_NV.topk(top_k, 1)
        q_NV = q_NV.gather(1, places)
        p_NV, q_NV = (torch.cat([one, _log_rest(one)[:, None]], 1) for one in (p_NV, q_NV))
    losses = (1 - mix) * temperature**2 * F.kl_div(q_NV, p_NV, reduction="none", log_target=True).sum(1)
    if mix:
        losses = losses + mix * F.cross_entropy(student_NV, labels_N, reduction="none")
    return losses


def _log_rest(log_p_NK: Tensor) -> Tensor:
    """The log of 1 less the sum of probabilities; of a sum that rounds to 1, of the smallest step below it."""
    log_sum = log_p_NK.logsumexp(1).clamp(max=-torch.finfo(log_p_NK.dtype).eps)
    return torch.log(-torch.expm1(log_sum))
