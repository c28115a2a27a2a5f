"""What the loss of a head does with logits element by element: two passes, in one of three forms.

On a CPU exponentials take the place of logits, which is the least memory. On a GPU torch's own kernel normalises narrow
logits in one pass, and gradients take their place. Compiled, both passes read the logits themselves, in
the format of the product, and nothing wider is ever written.

C tokens at a time, V entries of the vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Labels(NamedTuple):
    """Of each token its label's place among this rank's entries, and whether it is here; the place is 0 if not."""

    place_C1: Tensor
    is_here_C: Tensor


class LogitPasses(NamedTuple):
    """Two functions.

    sums: (logits_CV, labels, dtype of sums) to (what the other needs, log-sum-exp_C here, logit_C at the place).
    gradient: (what the first kept, log-sum-exp_C of the whole vocabulary, logit_C, labels, dtype) to the gradient of
    each logit, (C, V). Logits may be overwritten.
    """

    sums: Callable[[Tensor, Labels, torch.dtype], tuple[Any, Tensor, Tensor]]
    gradient: Callable[[Any, Tensor, Tensor, Labels, torch.dtype], Tensor]


def passes_for(logits_CV: Tensor, sums: torch.dtype, is_compiled: bool) -> LogitPasses:
    """Those for such logits, whose sums have that dtype."""
    if is_compiled:
        return _compiled()
    # Beside logits of the format of the sum, normalised ones would be as large again.
    return _IN_PLACE if logits_CV.device.type == "cpu" or logits_CV.dtype == sums else _NORMALISED


def _logit_at(logits_CV: Tensor, labels: Labels, dtype: torch.dtype) -> Tensor:
    return logits_CV.gather(1, labels.place_C1).squeeze(1).to(dtype)


def _less_label(share_CV: Tensor, whole_C: Tensor, label_C: Tensor, labels: Labels) -> Tensor:
    """In place: less 1 at the label, before that is rounded: near 1 a narrow format has few values."""
    less_C = ((label_C - whole_C).exp_() - 1.0).to(share_CV.dtype)
    there_C = share_CV.gather(1, labels.place_C1).squeeze(1)
    return share_CV.scatter_(1, labels.place_C1, less_C.where(labels.is_here_C, there_C)[:, None])


def _sums_in_place(logits_CV: Tensor, labels: Labels, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    label_C = _logit_at(logits_CV, labels, dtype)
    wide_CV = logits_CV.to(dtype)
    largest_C = wide_CV.amax(1)
    wide_CV -= largest_C[:, None]
    return (wide_CV.exp_(), largest_C), wide_CV.sum(1).log_() + largest_C, label_C


def _gradient_in_place(kept: Any, whole_C: Tensor, label_C: Tensor, labels: Labels, dtype: torch.dtype) -> Tensor:
    wide_CV, largest_C = kept
    wide_CV *= (largest_C - whole_C).exp_()[:, None]
    return _less_label(wide_CV.to(dtype), whole_C, label_C, labels)


_IN_PLACE = LogitPasses(_sums_in_place, _gradient_in_place)


def _sums_normalised(logits_CV: Tensor, labels: Labels, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    label_C = _logit_at(logits_CV, labels, dtype)
    normal_CV = torch.log_softmax(logits_CV, 1, dtype)
    lse_C = label_C - normal_CV.gather(1, labels.place_C1).squeeze(1)
    return (normal_CV, lse_C, logits_CV), lse_C, label_C


def _gradient_normalised(kept: Any, whole_C: Tensor, label_C: Tensor, labels: Labels, dtype: torch.dtype) -> Tensor:
    normal_CV, lse_C, logits_CV = kept
    if whole_C is not lse_C:  # the vocabulary is cut
        normal_CV += (lse_C - whole_C)[:, None]
    return _less_label(torch.exp(normal_CV, out=logits_CV), whole_C, label_C, labels)


_NORMALISED = LogitPasses(_sums_normalised, _gradient_normalised)


def _narrow_sums(logits_CV: Tensor, place_C1: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    label_C = logits_CV.gather(1, place_C1).squeeze(1).to(dtype)
    return logits_CV.to(dtype).logsumexp(1), label_C


def _narrow_gradient(
    logits_CV: Tensor, whole_C: Tensor, place_C1: Tensor, is_here_C: Tensor, dtype: torch.dtype
) -> Tensor:
    share_CV = (logits_CV.to(whole_C.dtype) - whole_C[:, None]).exp()
    entries_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    is_label_CV = (entries_V == place_C1) & is_here_C[:, None]
    return (share_CV - is_label_CV.to(share_CV.dtype)).to(dtype)


@cache
def _compiled() -> LogitPasses:
    """By torch.compile, for any number of tokens; compiled when they are first called."""
    sums, gradient = torch.compile(_narrow_sums, dynamic=True), torch.compile(_narrow_gradient, dynamic=True)
    return LogitPasses(
        lambda logits_CV, labels, dtype: (logits_CV, *sums(logits_CV, labels.place_C1, dtype)),
        lambda kept, whole_C, label_C, labels, dtype: gradient(kept, whole_C, labels.place_C1, labels.is_here_C, dtype),
    )
